import jax
import jax.numpy as jnp
import numpy as np

from tunix.sft.metrics.buffer import MetricsBuffer


def test_values_come_home_a_step_late():
  buffer = MetricsBuffer()
  assert buffer.put(1, {"loss": jnp.float32(2.5), "seconds": 0.25}) == []
  before = buffer.put(2, {"loss": jnp.bfloat16(1.5)})
  assert before == [(1, {"loss": 2.5, "seconds": 0.25})]
  assert buffer.put(3, {"loss": np.float64(0.5)}) == [(2, {"loss": 1.5})]
  assert buffer.drain() == [(3, {"loss": 0.5})]
  assert buffer.drain() == []


def test_values_are_those_of_the_step_and_floats():
  step = jax.jit(lambda x: x * 2)
  buffer, x, found = MetricsBuffer(), jnp.float32(1), []
  for i in range(4):
    x = step(x)
    found += buffer.put(i, {"x": x})
  values = [values["x"] for _, values in [*found, *buffer.drain()]]
  assert values == [2, 4, 8, 16] and all(type(v) is float for v in values)
