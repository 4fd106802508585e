"""Exact mode: the same bits, whatever else is in the batch."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import scored
from tunix.generate import scoring
from tunix.models import lora

# The compiler decides about the bits and the buffers of products.
pytestmark = pytest.mark.shipped

PAIRS = scored.sequences(32, seed=3)


def logps(model, pairs, rows=scored.batch, **options):
  options = {"tile_rows": 4, **options}
  return np.asarray(scored.scores(model, rows(pairs), **options).logps)


def same(got, want):
  np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
  return scored.model("windowed", dtype=jnp.dtype(request.param))


@pytest.fixture(scope="module")
def want(model):
  return logps(model, PAIRS)


@pytest.mark.parametrize("count", [1, 17])
def test_the_number_of_rows_changes_no_bit(model, want, count):
  same(logps(model, PAIRS[:count]), want[:count])


def test_a_single_tile_has_the_bits_of_one_among_others():
  """XLA puts a loop of one step into its surroundings, and fuses it with them."""
  model = scored.model("dense", dtype=jnp.float32)
  want = logps(model, PAIRS, tile_rows=1)
  same(logps(model, PAIRS[:1], tile_rows=1), want[:1])


def test_the_order_of_rows_changes_no_bit(model, want):
  order = np.random.default_rng(0).permutation(len(PAIRS))
  same(logps(model, [PAIRS[i] for i in order]), want[order])


def test_ids_of_padding_change_no_bit(model, want):
  same(logps(model, PAIRS, lambda pairs: scored.batch(pairs, fill=9)), want)


@pytest.mark.parametrize("tile_rows", [1, 4])
def test_a_gradient_changes_no_bit_and_the_ratio_is_one(model, tile_rows):
  """The gradient includes entropies, and `want` was computed without them."""
  want = logps(model, PAIRS, tile_rows=tile_rows)
  rows = scored.batch(PAIRS)
  out, _ = scored.policy_gradient(model, rows, want, tile_rows=tile_rows)
  same(np.asarray(out.logps), want)
  assert np.all(np.exp(np.asarray(out.logps) - want) == 1.0)


def test_a_fixed_width_stands_for_any_padding(model):
  pairs = [(p[-4:], c[:3]) for p, c in PAIRS[:6]]
  got = [
    logps(model, pairs, lambda x, p=p, r=r: scored.batch(x, p, r), tile_tokens=16)
    for p, r in ((4, 3), (7, 5), (11, 5))
  ]
  for other in got[1:]:
    same(np.ascontiguousarray(other[:, :3]), got[0])
  assert not any(np.any(other[:, 3:]) for other in got[1:])


def test_exact_and_plain_agree_up_to_rounding(model, want):
  plain = np.asarray(scored.scores(model, scored.batch(PAIRS)).logps)
  limit = 1e-5 if model.config.dtype == jnp.float32 else 0.1
  np.testing.assert_allclose(want, plain, atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize("name", scored.MODELS)
@pytest.mark.parametrize("tile_rows", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_model(name, dtype, tile_rows):
  model = scored.model(name, dtype=jnp.dtype(dtype))
  want = logps(model, PAIRS, tile_rows=tile_rows)
  for count in (1, 2, 5, 16, 31):
    same(logps(model, PAIRS[:count], tile_rows=tile_rows), want[:count])
  order = np.random.default_rng(1).permutation(len(PAIRS))
  same(logps(model, [PAIRS[i] for i in order], tile_rows=tile_rows), want[order])
  out, _ = scored.policy_gradient(model, scored.batch(PAIRS), want, tile_rows=tile_rows)
  same(np.asarray(out.logps), want)


def test_dropout_is_refused():
  model = lora.apply(toys.model(), lora.LoraConfig(rank=2, dropout=0.5))
  rows = scored.batch(PAIRS[:4])
  scoring.score_completions(model, *rows, tile_rows=2)  # off
  model.train()
  with pytest.raises(ValueError, match="dropout"):
    scoring.score_completions(model, *rows, tile_rows=2)
  theirs = toys.TokensOnly(nnx.Rngs(0), rate=0.5)
  with pytest.raises(ValueError, match="dropout"):
    scoring.score_completions(theirs, *rows, tile_rows=2)
