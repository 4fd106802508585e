import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.sft import trainers
from tunix.sft.config import TrainingInput
from tunix.sft.losses import batch_fields, next_token_loss


class Table(nnx.Module):
  """Logits of the next token depend on this token alone: a table of log-odds."""

  def __init__(self):
    self.table = nnx.Param(jnp.log(jnp.array([[1.0, 3.0], [1.0, 1.0]])))

  def __call__(self, tokens):
    return self.table[...][tokens]


class WithCache(Table):
  def __call__(self, tokens):  # pyright: ignore
    return super().__call__(tokens), {"cache": None}


class Positional(Table):
  """Records what the four-argument convention hands over."""

  def __call__(self, input_tokens, positions, cache, attention_mask, images=None):
    self.seen = nnx.data((positions, cache, attention_mask, images))
    return super().__call__(input_tokens), cache


TOKENS = np.array([[0, 1, 0, 1]], np.int32)


def test_hand_computed():
  # p(1 | 0) = 3/4, p(0 | 1) = 1/2; the first token is never a target.
  mask = np.array([[1, 1, 1, 0]])
  for model in (Table(), WithCache(), Positional()):
    loss = next_token_loss(model, TOKENS, mask)
    np.testing.assert_allclose(loss.total, -math.log(3 / 4) - math.log(1 / 2), 1e-6)
    assert float(loss.weight) == 2


def test_weights_and_segment_borders():
  # Targets 1, 0, 1 with weights .5, 2, 1; the third begins another segment.
  mask = np.array([[1, 0.5, 2, 1]])
  segments = np.array([[1, 1, 2, 2]])
  loss = next_token_loss(Positional(), TOKENS, mask, segment_ids=segments)
  np.testing.assert_allclose(loss.total, -1.5 * math.log(3 / 4), rtol=1e-6)
  assert float(loss.weight) == 1.5


def test_four_arguments_get_positions_and_a_causal_mask():
  model = Positional()
  next_token_loss(model, TOKENS, TOKENS, images=np.ones(3))
  positions, cache, mask, images = model.seen
  assert positions.tolist() == [[0, 1, 2, 3]] and cache is None
  np.testing.assert_array_equal(mask, np.tril(np.ones((1, 4, 4), bool)))
  assert images.tolist() == [1, 1, 1]


def test_a_field_that_nobody_takes_is_an_error_with_the_nearest_name():
  message = "field 'postions', which neither .* did you mean 'positions'"
  with pytest.raises(TypeError, match=message):
    next_token_loss(Positional(), TOKENS, TOKENS, postions=TOKENS)


def test_a_mask_of_another_form_is_refused():
  message = r"attention_mask has shape \(1, 4\), expected \[batch, tokens, tokens\]"
  with pytest.raises(ValueError, match=message):
    next_token_loss(Positional(), TOKENS, TOKENS, attention_mask=np.ones((1, 4)))


def test_loss_weights_multiply_the_mask():
  model, weights = Positional(), np.array([[0.0, 2.0, 0.0, 1.0]])
  ones = np.ones_like(TOKENS)
  got = next_token_loss(model, TOKENS, ones, loss_weights=weights)
  want = next_token_loss(model, TOKENS, weights)
  assert (float(got.total), float(got.weight)) == (float(want.total), 3.0)


class ByName(nnx.Module):
  """Takes tokens, and by name what it can use."""

  def __call__(self, tokens, positions=None, attention_mask=None):
    self.seen = nnx.data((positions, attention_mask))
    return jnp.zeros((*tokens.shape, 8))


def test_what_a_model_takes_by_name_it_gets():
  model, segments = ByName(), np.array([[1, 1, 2, 2]])
  next_token_loss(model, TOKENS, TOKENS, positions=TOKENS, segment_ids=segments)
  positions, mask = model.seen
  assert positions is TOKENS
  assert mask[0, 3].tolist() == [False, False, True, True]
  next_token_loss(model, TOKENS, TOKENS)
  assert model.seen[1] is None


def test_packed_rows_restart_positions_and_stay_apart():
  model = Positional()
  next_token_loss(model, TOKENS, TOKENS, segment_ids=np.array([[1, 1, 2, 2]]))
  positions, _, mask, _ = model.seen
  assert positions.tolist() == [[0, 1, 0, 1]]
  assert mask[0].astype(int).tolist() == [
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [0, 0, 1, 0],
    [0, 0, 1, 1],
  ]


def test_positions_and_mask_of_the_batch_win():
  model = Positional()
  given = np.array([[5, 6, 7, 8]]), np.ones((1, 4, 4), bool)
  next_token_loss(model, TOKENS, TOKENS, positions=given[0], attention_mask=given[1])
  assert model.seen[0] is given[0] and model.seen[2] is given[1]


def test_our_decoder_gives_the_loss_of_its_logits():
  model = toys.model()
  batch = toys.batch(0, rows=2)
  got = next_token_loss(model, **batch)
  logits, _ = model(batch["input_tokens"], segment_ids=batch["segment_ids"])
  logps = jax.nn.log_softmax(logits)[:, :-1]
  targets = batch["input_tokens"][:, 1:]
  nll = -np.take_along_axis(np.asarray(logps), targets[..., None], -1)[..., 0]
  mask = batch["input_mask"][:, 1:]
  np.testing.assert_allclose(got.total, (nll * mask).sum(), rtol=1e-5)
  assert float(got.weight) == mask.sum()


class ThreeArguments(nnx.Module):
  def __call__(self, tokens, types, lengths):
    return tokens


def test_a_model_of_another_form_is_refused_with_the_remedy():
  message = r"takes \(tokens, types, lengths\).*with_loss_fn.*with_gen_model_input_fn"
  with pytest.raises(TypeError, match=message):
    next_token_loss(ThreeArguments(), TOKENS, TOKENS)


def test_sequential_models_are_called_with_tokens_alone():
  parts = trainers.tokens_only()
  model = nnx.Sequential(parts.embed, parts.out)
  loss = next_token_loss(model, TOKENS, TOKENS)
  assert np.isfinite(loss.total)


@dataclasses.dataclass
class Plain:
  input_tokens: int
  positions: int | None = None


class Named(NamedTuple):
  input_tokens: int
  positions: int | None = None


def test_fields_of_batches():
  assert batch_fields(TrainingInput(1, 2)) == {"input_tokens": 1, "input_mask": 2}
  for batch in (Plain(1), Named(1), {"input_tokens": 1, "positions": None}):
    assert batch_fields(batch) == {"input_tokens": 1}
  with pytest.raises(TypeError, match=r"type list has no named fields.*with_loss_fn"):
    batch_fields([1, 2])
