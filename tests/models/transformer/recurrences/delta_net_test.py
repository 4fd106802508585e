"""Gated delta nets beside gated attention: every kind of call gives the same logits."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models.checkpoints import relative, visible
from tunix.models.transformer.config import DeltaNetConfig, fields_by_type
from tunix.models.transformer.shared_prompt import SharedPrompt

TOKENS = np.random.default_rng(0).integers(1, 40, (2, 12)).astype(np.int32)
SIZES = DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=5, key_dim=6)


@functools.cache
def model():
  made = toys.model(
    vocab_size=40,
    num_layers=2,
    layer_types=("linear", "full"),
    type_fields=fields_by_type(linear={"mixer": SIZES}),
    attention_gate=True,
  )
  # Filters and biases that are all alike would hide mistakes.
  mixer, key = made.layers["linear"].attn, jax.random.key(3)
  for name in ("conv_kernel", "dt_bias", "in_proj_b", "in_proj_a"):
    key, use = jax.random.split(key)
    parameter = getattr(mixer, name)
    parameter = getattr(parameter, "kernel", parameter)
    parameter.set_value(jax.random.normal(use, parameter.shape))
  return made


@functools.partial(nnx.jit, static_argnames="shared_prompt")
def run(model, tokens, **options):
  return model(tokens, **options)[0]


@functools.cache
def logits():
  return np.asarray(run(model(), TOKENS))


def test_token_by_token_through_the_cache():
  unstacked = model().unstack()
  call = jax.jit(lambda tokens, cache: unstacked(tokens, cache=cache))
  first, cache = call(TOKENS[:, :4], unstacked.init_cache(2, 12))
  steps = [np.asarray(first)]
  for t in range(4, 12):
    step, cache = call(TOKENS[:, t : t + 1], cache)
    steps.append(np.asarray(step))
  assert relative(np.concatenate(steps, 1), logits()) < 1e-5


def test_packed_rows_are_rows_alone():
  segments = np.array([[1] * 5 + [2] * 5 + [0] * 2], np.int32)
  got = np.asarray(run(model(), TOKENS[:1], segment_ids=segments))
  alone = [run(model(), TOKENS[:1, part]) for part in (slice(0, 5), slice(5, 10))]
  assert relative(got[:, :10], np.concatenate(alone, 1)) < 1e-5


def test_padding_and_groups_change_nothing():
  padded = np.concatenate([np.full((2, 3), 7, np.int32), TOKENS], 1)
  mask = np.ones_like(padded)
  mask[:, :3] = 0
  got = run(model(), padded, attention_mask=visible(mask))
  assert relative(got[:, 3:], logits()) < 1e-5
  row = np.concatenate([TOKENS[0], TOKENS[1, 4:]])[None]
  got = run(model(), row, shared_prompt=SharedPrompt(prompt=4, copies=2))
  assert relative(got[:, :12], logits()[:1]) < 1e-5
  other = np.concatenate([TOKENS[0, :4], TOKENS[1, 4:]])[None]
  assert relative(got[:, 12:], run(model(), other)[:, 4:]) < 1e-5


def test_heads_must_divide_into_groups():
  with pytest.raises(ValueError, match="num_key_heads is 3; expected a divisor"):
    DeltaNetConfig(num_heads=4, num_key_heads=3)
