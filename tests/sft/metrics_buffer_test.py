import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.sft.metrics_buffer import MetricsBuffer


def test_values_come_home_a_step_late():
  buffer = MetricsBuffer()
  buffer.put(1, {"loss": jnp.float32(2.5), "seconds": 0.25})
  assert buffer.ready() == [] and len(buffer) == 1
  buffer.put(2, {"loss": jnp.bfloat16(1.5)})
  assert buffer.ready() == [(1, {"loss": 2.5, "seconds": 0.25})]
  assert buffer.ready() == []
  buffer.put(3, {"loss": np.float64(0.5)})
  assert buffer.drain() == [(2, {"loss": 1.5}), (3, {"loss": 0.5})]
  assert buffer.drain() == [] and len(buffer) == 0


@pytest.mark.parametrize("lag", [0, 2])
def test_the_lag_is_what_stays_inside(lag):
  buffer = MetricsBuffer(lag)
  out = []
  for step in range(5):
    buffer.put(step, {"x": step})
    out += [s for s, _ in buffer.ready()]
    assert len(buffer) == min(lag, step + 1)
  assert out == list(range(5 - lag))


def test_values_are_those_of_the_step_and_floats():
  step = jax.jit(lambda x: x * 2)
  buffer, x = MetricsBuffer(), jnp.float32(1)
  for i in range(4):
    x = step(x)
    buffer.put(i, {"x": x})
  values = [values["x"] for _, values in buffer.drain()]
  assert values == [2, 4, 8, 16] and all(type(v) is float for v in values)


def test_a_negative_lag_is_refused():
  with pytest.raises(ValueError, match="lag is -1"):
    MetricsBuffer(-1)
