import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.sft.steps.inflight_throttler import InflightThrottler


def gated(number, order):
  """A computation that notes when the device has done it."""

  def note(x):
    order.append(number)
    return np.asarray(x)

  return jax.jit(
    lambda x: jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), x)
  )(jnp.float32(number))


def test_waits_for_the_oldest_only_when_full():
  done = []
  throttler = InflightThrottler(2)
  for number in range(6):
    throttler.wait_for_next()
    # At most one is still under way here: room for the next.
    assert len(done) >= number - 1
    throttler.add_computation({"loss": gated(number, done)})
  throttler.wait_for_all()
  assert sorted(done) == list(range(6))


def test_zero_means_no_bound_and_still_waits_for_all():
  done = []
  throttler = InflightThrottler(0)
  for number in range(3):
    throttler.wait_for_next()
    throttler.add_computation(gated(number, done))
  throttler.wait_for_all()
  assert 2 in done


def test_a_negative_bound_is_refused():
  with pytest.raises(ValueError, match="max_inflight is -1"):
    InflightThrottler(-1)
