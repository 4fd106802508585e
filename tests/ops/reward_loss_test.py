import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.pair_scores import LN2, LN3, close
from tunix.ops.reward_loss import bradley_terry

CHOSEN, REJECTED = jnp.array([LN3, 1.0, 0.0]), jnp.array([0.0, 1.0, LN2])


def test_values_by_hand():
  want = [math.log(4 / 3), LN2, LN3]
  got = bradley_terry(CHOSEN, REJECTED)
  close(got.values, want)
  # Margins ln 3, 0, -ln 2 leave gaps 0, 0, 0.
  margin = jnp.array([LN3, 0.0, -LN2])
  close(bradley_terry(CHOSEN, REJECTED, margin).values, [LN2] * 3)
  centred = np.array(want) + 0.1 * np.array([LN3**2, 4.0, LN2**2])
  close(bradley_terry(CHOSEN, REJECTED, centering=0.1).values, centred)
  close(got.metrics["rewards/chosen"], CHOSEN)
  close(got.metrics["rewards/rejected"], REJECTED)
  close(got.metrics["rewards/margin"], [LN3, 0, -LN2])
  close(got.metrics["rewards/accuracy"], [1, 0.5, 0])


def test_gradients_by_hand():
  fn = lambda c, r, m: bradley_terry(c, r, m, centering=0.5).values.sum()
  margin = jnp.array([LN3, 0.0, -LN2])
  chosen, rejected, of_margin = jax.jit(jax.grad(fn, (0, 1, 2)))(
    CHOSEN, REJECTED, margin
  )
  # -1/2 from each gap of 0, and the sum of the rewards from the centering.
  total = np.asarray(CHOSEN + REJECTED)
  close(chosen, total - 0.5)
  close(rejected, total + 0.5)
  assert not np.any(of_margin)
  through = lambda c: bradley_terry(c, REJECTED).metrics["rewards/margin"].sum()
  assert not np.any(jax.jit(jax.grad(through))(CHOSEN))


def test_extremes_and_precision():
  vast = jnp.array([1e5, -1e5], jnp.bfloat16)
  fn = lambda c: bradley_terry(c, -c, centering=0.1).values.sum()
  got = bradley_terry(vast, -vast)
  assert got.values.dtype == jnp.float32 and np.isfinite(got.values).all()
  assert np.isfinite(np.asarray(jax.jit(jax.grad(fn))(vast), np.float32)).all()


def test_adding_a_constant_is_free_unless_centred():
  move = lambda **kw: bradley_terry(CHOSEN + 3, REJECTED + 3, **kw).values
  close(move(), bradley_terry(CHOSEN, REJECTED).values)
  assert (
    move(centering=0.1) > bradley_terry(CHOSEN, REJECTED, centering=0.1).values
  ).all()


def test_negative_centring_is_refused():
  with pytest.raises(ValueError, match=r"centering=-0\.1"):
    bradley_terry(CHOSEN, REJECTED, centering=-0.1)
