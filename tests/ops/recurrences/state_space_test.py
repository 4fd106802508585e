"""Mamba-2's recurrence by hand, and its chunks against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.checkpoints import relative
from tunix.ops.recurrences import state_space


def inputs(length, seed=0, rows=2, heads=4, groups=2, width=3, state=5):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return (
    draw(rows, length, heads, width),
    np.log1p(np.exp(draw(rows, length, heads))),
    -np.exp(draw(heads)),
    draw(rows, length, groups, state),
    draw(rows, length, groups, state),
  )


def test_two_tokens_by_hand():
  one = lambda *v: jnp.asarray(v, jnp.float32).reshape(1, 2, 1, 1)
  dt = one(0.5, 2.0)[..., 0]
  y, state = state_space.recurrent(
    one(3.0, 4.0), dt, jnp.array([-1.0]), one(2.0, 1.0), one(1.0, 10.0)
  )
  first = 0.5 * 3 * 2
  second = np.exp(-2.0) * first + 2 * 4 * 1
  np.testing.assert_allclose(y[0, :, 0, 0], [first, 10 * second], rtol=1e-6)
  np.testing.assert_allclose(state[0, 0, 0, 0], second, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 24])
def test_chunks_equal_the_recurrence(length):
  x, dt, a, b, c = inputs(length)
  rng = np.random.default_rng(1)
  before = rng.normal(size=(2, 4, 3, 5)).astype(np.float32)
  starts = rng.random((2, length)) < 0.2
  weights = rng.normal(size=x.shape).astype(np.float32)

  def run(form, **options):
    def loss(*values):
      *values, state = values
      y, last = form(*values, state=state, starts=starts, **options)
      return jnp.sum(y * weights) + jnp.sum(jnp.sin(last)), (y, last)

    grad = jax.jit(jax.grad(loss, range(6), has_aux=True))
    gradients, out = grad(x, dt, a, b, c, before)
    return [*out, *gradients]

  want = run(state_space.recurrent)
  for got, expected in zip(run(state_space.chunked, chunk=8), want):
    error = np.linalg.norm(np.asarray(got) - expected)
    assert error <= 1e-5 * max(np.linalg.norm(expected), 1e-3)


def test_fast_decays_lose_no_digits():
  x, dt, _, b, c = inputs(64)
  dt = np.where(np.arange(64)[:, None] % 8, 0.1 * dt, 30.0).astype(np.float32)
  a = -np.ones(4, np.float32)
  got, last = state_space.chunked(x, dt, a, b, c)
  state, want = np.zeros((2, 4, 3, 5)), []
  for t in range(64):
    both = [np.repeat(v[:, t].astype(np.float64), 2, axis=1) for v in (b, c)]
    step = dt[:, t].astype(np.float64)
    state = np.exp(-step)[..., None, None] * state
    state += np.einsum("bh,bhp,bhn->bhpn", step, x[:, t], both[0])
    want.append(np.einsum("bhpn,bhn->bhp", state, both[1]))
  assert relative(got, np.stack(want, 1)) < 1e-6
  assert relative(last, state) < 1e-6


@pytest.mark.parametrize("form", [state_space.recurrent, state_space.chunked])
def test_segments_and_padding_are_rows_of_their_own(form):
  x, dt, a, b, c = inputs(21, rows=1)
  part = lambda start, stop: (
    [v[:, start:stop] for v in (x, dt)] + [a] + [v[:, start:stop] for v in (b, c)]
  )
  starts = np.zeros((1, 21), bool)
  starts[0, [0, 9]] = True
  dt[:, 18:] = 0  # padding at the end
  got, last = form(x, dt, a, b, c, starts=starts)
  first, _ = form(*part(0, 9))
  second, state = form(*part(9, 18))
  assert relative(got[:, :9], first) < 1e-6
  assert relative(got[:, 9:18], second) < 1e-6
  assert relative(last, state) < 1e-6
