"""The gated delta rule by hand, and its chunks against its recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.checkpoints import relative
from tunix.ops.recurrences import delta_rule


def inputs(length, seed=0, rows=2, heads=4, groups=2, key=6, value=3):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  return (
    draw(rows, length, groups, key),
    unit(draw(rows, length, groups, key)),
    draw(rows, length, heads, value),
    -np.log1p(np.exp(draw(rows, length, heads))),
    1 / (1 + np.exp(-draw(rows, length, heads))),
  )


@pytest.mark.parametrize("form", [delta_rule.recurrent, delta_rule.chunked])
def test_three_tokens_by_hand(form):
  # One head with K = 2 and V = 1. Token 2 has the key of token 0, so it corrects what
  # token 0 wrote; token 1 has another key.
  k = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
  q = jnp.array([[2.0, 0.0], [1.0, 1.0], [1.0, 10.0]])[None, :, None]
  v = jnp.array([4.0, 6.0, 1.0])[None, :, None, None]
  half = np.log(0.5)
  g = jnp.array([half, half, 0.0])[None, :, None]
  beta = jnp.array([0.5, 1.0, 0.25])[None, :, None]
  y, state = form(q, k, v, g, beta)
  # S after each token: [2, 0]; [1, 6]; [1 + (1 - 1) / 4, 6].
  np.testing.assert_allclose(y[0, :, 0, 0], [4, 7, 61], rtol=1e-6)
  np.testing.assert_allclose(state[0, 0, :, 0], [1, 6], rtol=1e-6)
  _, state = form(q, k, v.at[0, 2].set(5.0), g, beta)
  np.testing.assert_allclose(state[0, 0, :, 0], [2, 6], rtol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_chunks_equal_the_recurrence(length):
  values = inputs(length)
  rng = np.random.default_rng(1)
  before = rng.normal(size=(2, 4, 6, 3)).astype(np.float32)
  starts = rng.random((2, length)) < 0.2
  weights = rng.normal(size=values[2].shape).astype(np.float32)

  def run(form, **options):
    def loss(*values):
      *values, state = values
      y, last = form(*values, state=state, starts=starts, **options)
      return jnp.sum(y * weights) + jnp.sum(jnp.sin(last)), (y, last)

    grad = jax.jit(jax.grad(loss, range(6), has_aux=True))
    gradients, out = grad(*values, before)
    return [*out, *gradients]

  want = run(delta_rule.recurrent)
  for got, expected in zip(run(delta_rule.chunked, chunk=16), want):
    error = np.linalg.norm(np.asarray(got) - expected)
    assert error <= 1e-5 * max(np.linalg.norm(expected), 1e-3)


def test_equal_keys_do_not_overflow_the_chunk():
  # A has rows of ones here: its powers reach 1e18, and their sum would lose all digits.
  q, k, v, g, beta = inputs(64, rows=1)
  k[:] = k[:, :1]
  args = q, k, v, np.zeros_like(g), np.ones_like(beta)
  want, state = delta_rule.recurrent(*args)
  got, last = delta_rule.chunked(*args)
  assert relative(got, want) < 1e-5
  assert relative(last, state) < 1e-5


def test_fast_decays_lose_no_digits():
  q, k, v, g, beta = inputs(64)
  args = q, k, v, np.where(np.arange(64)[:, None] % 8, 0.1 * g, -30.0), beta
  want, _ = delta_rule.recurrent(*args)
  assert relative(delta_rule.chunked(*args)[0], want) < 1e-6


@pytest.mark.parametrize("form", [delta_rule.recurrent, delta_rule.chunked])
def test_segments_and_padding_are_rows_of_their_own(form):
  values = inputs(21, rows=1)
  part = lambda start, stop: [x[:, start:stop] for x in values]
  starts = np.zeros((1, 21), bool)
  starts[0, [0, 9]] = True
  for rate in values[3:]:
    rate[:, 18:] = 0  # padding at the end
  got, last = form(*values, starts=starts)
  first, _ = form(*part(0, 9))
  second, state = form(*part(9, 18))
  assert relative(got[:, :9], first) < 1e-6
  assert relative(got[:, 9:18], second) < 1e-6
  assert relative(last, state) < 1e-6


def test_a_chunk_must_be_a_power_of_two():
  with pytest.raises(ValueError, match="chunk is 48; expected a power of 2"):
    delta_rule.chunked(*inputs(3), chunk=48)
