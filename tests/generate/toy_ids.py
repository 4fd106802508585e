"""Tokenizers and models whose every number a test knows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests import toys

LONGEST = 64  # tokens of a row in full passes


class Ids:
  """Text is ids in words: "3 1 4". No BOS, no EOS; padding is 0."""

  def encode(self, text):
    # Other words are id 2: an adapter encodes letters to see how text goes on.
    return [int(word) if word.isdigit() else 2 for word in text.split()]

  def decode(self, ids):
    return " ".join(map(str, ids))

  def bos_id(self):
    return None

  def eos_id(self):
    return None

  def pad_id(self):
    return 0


def sharp_model(**changes):
  """A toy Llama whose best token is best by far, so that no rounding swaps two."""
  model = toys.model(**changes)
  model.lm_head.kernel.set_value(model.lm_head.kernel[...] * 40)
  return model


def prompts(count, *, longest, vocab=toys.VOCAB, seed=0):
  """Random prompts of 1 to `longest` tokens."""
  rng = np.random.default_rng(seed)
  return [rng.integers(0, vocab, rng.integers(1, longest + 1)) for _ in range(count)]


def full_logits(model, prompt, completion):
  """float32 [len(completion), V]: what one uncached pass says before each token."""
  tokens = np.zeros((1, LONGEST), np.int32)
  used = len(prompt) + len(completion)
  tokens[0, :used] = [*prompt, *completion]  # causal: what follows changes nothing
  logits = np.asarray(_forward(*nnx.split(model), tokens)[0], np.float32)
  return logits[len(prompt) - 1 : used - 1]


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, state, tokens):
  return nnx.merge(graph, state)(tokens)[0]


class OwnCache(nnx.Module):
  """A user's model with a cache of its own form: logits say what it was shown.

  The next token is (sum of all visible tokens, each times its position + 1) mod V.
  """

  def __init__(self, vocab):
    self.vocab = vocab

  def init_cache(self, batch_size, cache_size):
    return {"seen": jnp.zeros((batch_size, cache_size)), "end": 0}

  def __call__(self, tokens, positions, cache, attention_mask):
    new = tokens * (positions + 1.0)
    seen = jax.lax.dynamic_update_slice(cache["seen"], new, (0, cache["end"]))
    total = jnp.sum(jnp.where(attention_mask, seen[:, None], 0), axis=-1)
    best = total.astype(jnp.int32) % self.vocab
    logits = jax.nn.one_hot(best, self.vocab)
    return logits, {"seen": seen, "end": cache["end"] + tokens.shape[1]}
