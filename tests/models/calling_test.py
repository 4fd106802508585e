"""One adapter for models of every make: what it gives must not depend on the make."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate.sampler import Sampler
from tunix.models import calling
from tunix.models.calling import Sequences

TOKENS = jnp.array([[5, 6, 7, 8], [9, 5, 6, 7]])
ROWS = Sequences(TOKENS)
TARGETS = jnp.array([[6, 7, 8, 2], [5, 6, 7, 2]])
WEIGHTS = jnp.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 1.0, 0.0]])


class WithoutSeam(nnx.Module):
  """The same decoder behind the four-argument call alone."""

  def __init__(self, decoder):
    self.decoder = decoder

  def __call__(self, input_tokens, positions, cache, attention_mask):
    return self.decoder(input_tokens, positions, cache, attention_mask)


class SeamAlone(nnx.Module):
  """The same decoder with hidden states and an unembedding, and no `logits`."""

  def __init__(self, decoder):
    self.decoder = decoder

  def unembedding(self):
    return self.decoder.unembedding()

  def __call__(self, tokens, positions=None, cache=None, mask=None, **named):
    return self.decoder(tokens, positions, cache, mask, **named)


@pytest.fixture(scope="module")
def makes():
  decoder = toys.model()
  return calling.adapt(decoder), calling.adapt(WithoutSeam(decoder))


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_model_with_the_seam_builds_no_logits(makes):
  chunked, plain = makes
  assert (chunked.builds_logits, plain.builds_logits) == (False, True)
  assert chunked.shares_prompts and not plain.shares_prompts
  assert chunked.accepts("segment_ids") and not plain.accepts("segment_ids")


def test_both_makes_say_the_same(makes):
  chunked, plain = makes
  states = [make.states(ROWS) for make in makes]
  assert states[0].shape != states[1].shape
  close(chunked.unembed(states[0]), plain.unembed(states[1]))
  close(chunked.full_logits(ROWS), plain.full_logits(ROWS))
  scores = [
    make.token_logps(s, TARGETS, temperature=0.7, entropy=True)
    for make, s in zip(makes, states)
  ]
  jax.tree.map(close, *map(tuple, scores))
  sums = [make.cross_entropy(s, TARGETS, WEIGHTS) for make, s in zip(makes, states)]
  jax.tree.map(close, *sums)
  likeliest = [make.top_k(s, 3, 1.0) for make, s in zip(makes, states)]
  jax.tree.map(close, *map(tuple, likeliest))
  at = [make.logps_at(s, x.ids) for make, s, x in zip(makes, states, likeliest)]
  close(*at)
  close(at[0], likeliest[0].logps)


def test_the_seam_alone_is_enough_for_logits_and_for_sampling(makes):
  decoder = makes[0].model
  alone = calling.adapt(SeamAlone(decoder))
  assert not alone.builds_logits
  close(alone.unembed(alone.states(ROWS)), alone.full_logits(ROWS))
  tokens = [
    Sampler(model, toy_ids.Ids())([[5, 6, 7]], 4).tokens[0].tolist()
    for model in (decoder, alone.model)
  ]
  assert tokens[0] == tokens[1]


def test_how_many_words_a_model_says_it_has(makes):
  assert calling.vocab_size(makes[0].model) == toys.VOCAB
  assert calling.vocab_size(makes[1].model) is None
  named = types.SimpleNamespace(vocab_size=5, config=makes[0].model.config)
  assert calling.vocab_size(named) == 5


def test_cross_entropy_is_that_of_the_log_probs(makes):
  for make in makes:
    states = make.states(ROWS)
    logps = make.token_logps(states, TARGETS).logps
    total, weight = make.cross_entropy(states, TARGETS, WEIGHTS)
    close(total, -jnp.sum(logps * WEIGHTS))
    assert float(weight) == 4.5


def test_a_mask_stands_for_the_segments(makes):
  segments = jnp.array([[1, 1, 2, 2], [1, 1, 1, 1]])
  same = segments[:, :, None] == segments[:, None, :]
  mask = same & np.tril(np.ones((4, 4), bool))
  positions = jnp.array([[0, 1, 0, 1], [0, 1, 2, 3]])
  by_segments, by_mask = (
    makes[0].unembed(makes[0].states(Sequences(TOKENS, positions, *how)))
    for how in ((segments, None), (segments, mask))
  )
  close(by_segments, by_mask)
  close(by_mask, makes[1].states(Sequences(TOKENS, positions, segments)))


class WithoutSegments(nnx.Module):
  """Its hidden states and its unembedding, but no argument for segments; and nothing
  that puts the two together."""

  def __init__(self, decoder):
    self.decoder = decoder

  def __call__(self, tokens, positions=None, attention_mask=None, return_hidden=False):
    return self.decoder(
      tokens, positions, None, attention_mask, return_hidden=return_hidden
    )

  def unembedding(self):
    return self.decoder.unembedding()


def test_a_model_with_the_seam_and_no_segments_is_told_of_them_by_a_mask(makes):
  segments = jnp.array([[1, 1, 2, 2], [1, 1, 1, 1]])
  positions = jnp.array([[0, 1, 0, 1], [0, 1, 2, 3]])
  packed = Sequences(TOKENS, positions, segments)
  model = calling.adapt(WithoutSegments(makes[0].model))
  assert not model.builds_logits
  close(model.states(packed), makes[0].states(packed))
  close(model.unembed(model.states(packed)), makes[1].full_logits(packed))


def test_a_call_of_another_form_is_refused():
  class Odd(nnx.Module):
    def __call__(self, tokens, something, else_):
      return tokens

  message = r"Odd.__call__ takes \(tokens, something, else_\).*tokens alone: give"
  with pytest.raises(TypeError, match=message):
    calling.adapt(Odd(), remedy=": give a loss").states(ROWS)
