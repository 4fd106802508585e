"""Rows, models and comparisons for the tests of scoring."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tunix.generate import scoring
from tunix.models.transformer.config import MoEConfig

P, R = 8, 6

# The bits of batch-invariant models were compared on CPUs with AVX2 or AVX-512.
_CPU = pathlib.Path("/proc/cpuinfo")
has_compared_bits = pytest.mark.skipif(
  not _CPU.exists() or "avx2" not in _CPU.read_text(),
  reason="a CPU with other products",
)

MODELS = {
  "dense": {},
  "windowed": {"layer_types": ("sliding", "full"), "sliding_window": 3},
  "softcapped": {"attention_softcap": 2.0, "final_softcap": 1.5, "norms": "both"},
  "moe": {"moe": MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=16)},
  "lora": {"lora_rank": 2},
  "tied_scan_remat": {
    "scan_layers": True,
    "remat": "block",
    "tie_embeddings": True,
    "layer_types": ("sliding", "full"),
    "sliding_window": 3,
  },
}


@functools.cache
def model(name, **changes):
  return toys.model(**MODELS[name], **changes)


def sequences(count, *, copies=1, seed=0):
  """(prompt, completion) pairs, `copies` completions a prompt."""
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(count // copies):
    prompt = rng.integers(1, toys.VOCAB, rng.integers(1, P - 1))
    for _ in range(copies):
      out.append((prompt, rng.integers(1, toys.VOCAB, rng.integers(1, R + 1))))
  return out


def batch(pairs, p=P, r=R, fill=0):
  """Prompts padded on the left to p tokens, completions on the right to r."""
  ids = np.full((len(pairs), p + r), fill, np.int32)
  mask = np.zeros(ids.shape, bool)
  for row, (prompt, completion) in enumerate(pairs):
    ids[row, p - len(prompt) : p + len(completion)] = [*prompt, *completion]
    mask[row, p - len(prompt) : p + len(completion)] = True
  return ids[:, :p], mask[:, :p], ids[:, p:], mask[:, p:]


def scores(model, rows, **options):
  """`score_completions`, compiled."""
  graph, state = nnx.split(model)
  fn = functools.partial(scoring.score_completions, **options)
  return jax.jit(lambda state, rows: fn(nnx.merge(graph, state), *rows))(state, rows)


def policy_gradient(model, rows, old, **options):
  """(scores, gradients) of a clipped objective with an entropy term, as in GRPO."""
  graph, state = nnx.split(model)
  advantages = jnp.linspace(-1.0, 1.0, len(rows[0]))[:, None]

  def loss(state):
    out = scoring.score_completions(
      nnx.merge(graph, state), *rows, entropy=True, **options
    )
    ratio = jnp.exp(out.logps - old)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantages, clipped * advantages) + 0.1 * out.entropy
    return -jnp.sum(jnp.where(rows[3], gain, 0.0)) / rows[3].sum(), out

  (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
  return out, grads
