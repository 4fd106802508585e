"""Decays inside a chunk keep float32's digits; the memory of chunks is linear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.checkpoints import relative
from tunix.ops.recurrences import delta_rule, linear_recurrence, state_space


def test_decays_by_hand():
  g = np.log([0.5, 0.25, 0.1, 0.2], dtype=np.float32)[None, None, None]
  fresh = np.array([[False, False, True, False]])
  between, before = linear_recurrence.decays(g, fresh)
  want = [[1, 0, 0, 0], [0.25, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0.2, 1]]
  np.testing.assert_allclose(between[0, 0, 0], want, rtol=1e-6)
  np.testing.assert_allclose(before[0, 0, 0], [0.5, 0.125, 0, 0], rtol=1e-6)


def test_fast_decays_lose_no_digits():
  # Every eighth token forgets all; the tokens between decay by about exp(-0.1).
  rng = np.random.default_rng(0)
  g = -0.2 * rng.random(64).astype(np.float32)
  g[::8] = -30
  between, _ = linear_recurrence.decays(g[None, None, None], np.zeros((1, 64), bool))
  total = np.cumsum(g, dtype=np.float64)
  want = np.tril(np.exp(np.minimum(total[:, None] - total, 0)))
  assert relative(between[0, 0, 0], want) < 3e-7
  # What differences of float32 sums would give.
  total = np.cumsum(g)
  short = np.tril(np.exp(np.minimum(total[:, None] - total, 0)))
  assert relative(short, want) > 3e-6


@pytest.mark.parametrize("module", [delta_rule, state_space])
def test_temporaries_of_chunks_grow_linearly(module):
  def size(length):
    vectors, values, rates = ((1, length, *x) for x in ((2, 8), (4, 8), (4,)))
    shapes = {
      delta_rule: (vectors, vectors, values, rates, rates),
      state_space: (values, rates, (4,), vectors, vectors),
    }[module]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    loss = lambda *arrays: jnp.sum(module.chunked(*arrays, chunk=16)[0] ** 2)
    program = jax.jit(jax.grad(loss, range(5))).lower(*arrays).compile()
    return program.memory_analysis().temp_size_in_bytes

  # A matrix [T, T] would make it 4 times as much.
  assert size(1024) < 2.1 * size(512)
