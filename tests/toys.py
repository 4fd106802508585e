"""Small models and data for tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.transformer.config import TransformerConfig

VOCAB = 96


def config(**changes: Any) -> TransformerConfig:
  """A two-layer Llama of 20 thousand parameters."""
  sizes: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": VOCAB,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
  }
  return ModelConfig(**{**sizes, **changes})


def model(seed: int = 0, *, lora_rank: int = 0, **changes: Any) -> nnx.Module:
  """A fresh model; with LoRA on all its matrices when a rank is given."""
  fresh = AutoModel.from_config(config(**changes), seed=seed)
  if not lora_rank:
    return fresh
  adapted = lora.apply(fresh, lora.LoraConfig(rank=lora_rank, alpha=2.0 * lora_rank))
  # B starts at zero, which would hide mistakes in A's gradient.
  key = jax.random.key(seed)
  for _, node in nnx.iter_graph(adapted):
    if isinstance(node, nnx.LoRAParam):
      key, use = jax.random.split(key)
      node.set_value(0.1 * jax.random.normal(use, node.shape, node.dtype))
  return adapted


def logits(model: nnx.Module, tokens: Any, **more: Any) -> jax.Array:
  """`model(tokens, ...)[0]` as one program: a call would compile each operation."""
  graph, state = nnx.split(model)
  is_array = lambda x: isinstance(x, np.ndarray | jax.Array)
  arrays = {name: x for name, x in more.items() if is_array(x)}
  others = tuple((name, x) for name, x in more.items() if not is_array(x))
  return _logits(graph, state, jnp.asarray(tokens), arrays, others)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _logits(graph, state, tokens, arrays, others):
  return nnx.merge(graph, state)(tokens, **arrays, **dict(others))[0]


def batch(
  seed: int, rows: int = 8, length: int = 16, vocab: int = VOCAB
) -> dict[str, np.ndarray]:
  """Random rows of different lengths; about two thirds of the tokens are trained."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, vocab, (rows, length), dtype=np.int32)
  lengths = rng.integers(length // 2, length + 1, (rows, 1))
  inside = np.arange(length) < lengths
  trained = inside & (rng.random((rows, length)) < 0.7)
  segments = inside.astype(np.int32)
  return {
    "input_tokens": tokens * inside,
    "input_mask": trained.astype(np.int32),
    "segment_ids": segments,
  }


def batches(count: int, **options: Any) -> list[dict[str, np.ndarray]]:
  """`count` different batches."""
  return [batch(seed, **options) for seed in range(count)]


def cut(whole: dict[str, np.ndarray], parts: int) -> list[dict[str, np.ndarray]]:
  """A batch as `parts` micro-batches of equally many rows."""
  return [
    dict(zip(whole, pieces))
    for pieces in zip(*(np.split(x, parts) for x in whole.values()))
  ]


def packed(whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The same examples, two in a row of twice the length where they fit."""
  rows, length = whole["input_tokens"].shape
  out = {k: np.zeros((rows // 2, 2 * length), x.dtype) for k, x in whole.items()}
  for row in range(rows):
    used = int(whole["segment_ids"][row].sum())
    target, start = row // 2, 0
    if row % 2:
      start = int((out["segment_ids"][target] > 0).sum())
    place = slice(start, start + used)
    out["input_tokens"][target, place] = whole["input_tokens"][row, :used]
    out["input_mask"][target, place] = whole["input_mask"][row, :used]
    out["segment_ids"][target, place] = 1 + row % 2
  return out


class TokensOnly(nnx.Module):
  """A user's model: tokens in, logits out, with dropout, no cache, no seams."""

  def __init__(self, rngs: nnx.Rngs, *, vocab: int = VOCAB, rate: float = 0.0):
    self.embed = nnx.Embed(vocab, 16, rngs=rngs)
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.out = nnx.Linear(16, vocab, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    context = jnp.cumsum(self.embed(tokens), axis=1)
    return self.out(jnp.tanh(self.dropout(context)))


class FourArguments(nnx.Module):
  """A user's model of the four-argument convention, with real attention masks."""

  def __init__(self, rngs: nnx.Rngs, *, vocab: int = VOCAB):
    self.embed = nnx.Embed(vocab, 16, rngs=rngs)
    self.out = nnx.Linear(16, vocab, rngs=rngs)

  def __call__(self, input_tokens, positions, cache, attention_mask):
    x = self.embed(input_tokens) + jnp.sin(positions[..., None] * jnp.arange(16.0))
    weights = jax.nn.softmax(jnp.where(attention_mask, x @ x.mT, -1e9))
    return self.out(weights @ x), cache


@functools.cache
def default_lora() -> lora.LoraConfig:
  return lora.LoraConfig(rank=4, alpha=8.0)
