"""Tests of tunix/models/transformer/unstack.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.transformer.unstack import unstack


def stack(features: int, dtype=jnp.float32, layers: int = 4) -> jax.Array:
  return jnp.arange(layers * features, dtype=dtype).reshape(layers, features)


@pytest.mark.parametrize("layers", [1, 3, 4])
@pytest.mark.parametrize("features", [4, 2**14 + 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_the_parts_are_the_layers(features, dtype, layers):
  x = stack(features, dtype, layers)
  parts = jax.jit(unstack)(x)
  assert [part.shape for part in parts] == [(1, features)] * layers
  np.testing.assert_array_equal(jnp.concatenate(parts), x)


def test_a_stack_that_begins_with_nan_is_cut_as_any_other():
  x = stack(4).at[0, 0].set(jnp.nan)
  np.testing.assert_array_equal(jnp.concatenate(jax.jit(unstack)(x)), x)


def test_derivatives_of_both_modes():
  x, v = stack(4), jnp.ones((4, 4)).at[1].set(2.0)

  def f(x):  # d f / d x is 2 x in layer 0, 1 in layer 1, 0 in the others
    first, second, *_ = unstack(x)
    return (first**2).sum() + second.sum()

  expected = jnp.stack([2 * x[0], jnp.ones(4), jnp.zeros(4), jnp.zeros(4)])
  np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), expected)
  _, tangent = jax.jvp(f, (x,), (v,))
  assert tangent == (expected * v).sum()


def test_small_slices_are_not_fused_into_their_readers():
  """Equal layers share one kernel: none reads the stack at its own offset."""

  def run(x, scale):
    for part in unstack(scale):
      x = jnp.sin(x * part) + jnp.cos(x)
    return x

  text = jax.jit(run).lower(jnp.ones((8, 64)), stack(64)).compile().as_text()
  entry = text[text.index("ENTRY ") :]
  lines = [line for line in entry.splitlines() if " fusion(" in line]
  fusions = [line for line in lines if "sin" in line]
  assert " while(" in text
  assert fusions and not any("f32[4,64]" in line for line in fusions)
  few = jax.jit(run).lower(jnp.ones((8, 64)), stack(64, layers=3))
  assert "while" not in few.as_text()  # a loop costs more than it saves
