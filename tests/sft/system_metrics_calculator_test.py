import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import optimizers
from tunix.sft import system_metrics_calculator as calculator


class Layers(nnx.Module):
  """Eight square layers, stacked."""

  def __init__(self):
    self.w = nnx.Param(jnp.ones((8, 16, 16)))

  def __call__(self, x, unroll):
    body = lambda x, w: (jnp.tanh(x @ w), None)
    return jax.lax.scan(body, x, self.w[...], unroll=unroll)[0]


def train_step(model, optimizer, batch, *, unroll=1):
  grads = nnx.grad(lambda model: model(batch, unroll).sum())(model)
  optimizer.update(model, grads)


@pytest.mark.parametrize("unroll", [1, 8])
def test_scanned_layers_count_as_often_as_they_run(unroll):
  model = Layers()
  optimizer = nnx.Optimizer(model, optimizers.sgd(0.1), wrt=nnx.Param)
  step = nnx.jit(lambda m, o, b: train_step(m, o, b, unroll=unroll))
  batch = jnp.ones((4, 16))
  tflops = calculator.measure_tflops_per_step(step, model, optimizer, batch)
  # Forward, input and weight gradients of 8 layers. Newer versions of JAX drop the
  # input gradient of the first of the unrolled layers, which nothing reads.
  products = (24, 23) if unroll == 8 else (24,)
  assert tflops in [count * 2 * 4 * 16 * 16 / 1e12 for count in products]


def test_what_cannot_be_measured_is_none_with_a_warning(caplog):
  def measure(function):
    return calculator.measure_tflops_per_step(function, jnp.ones(3), None, None)

  assert measure(lambda m, o, b: m) is None
  assert "no .lower()" in caplog.text

  def broken(m, o, b):
    raise ZeroDivisionError("in the user's step")

  assert measure(jax.jit(broken)) is None
  assert "ZeroDivisionError: in the user's step" in caplog.text


def test_loops_of_unknown_length_are_named(caplog):
  step = jax.jit(
    lambda m, o, b: jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x @ x, m)
  )
  tflops = calculator.measure_tflops_per_step(step, jnp.ones((4, 4)), None, None)
  assert tflops == 2 * 4**3 / 1e12
  assert "1 loops" in caplog.text


def test_approximate_tflops_per_second(caplog):
  value = calculator.approximate_tflops_per_second(10**9, 2000, 0.5)
  np.testing.assert_allclose(value, 6 * 1e9 * 2000 / 0.5 / 1e12)
  assert not caplog.records
  for bad in ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0)):
    assert calculator.approximate_tflops_per_second(*bad) == 0.0
  assert len(caplog.records) == 3


def test_a_step_that_changes_a_module_under_jax_jit_is_counted_whole(caplog):
  model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optimizers.sgd(0.1), wrt=nnx.Param)
  batch = jnp.ones((4, 8))

  def step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(batch) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  measure = calculator.measure_tflops_per_step
  whole = measure(nnx.jit(step), model, optimizer, batch)
  assert not caplog.records
  assert measure(jax.jit(step), model, optimizer, batch) == whole
  assert "Wrap it in nnx.jit" in caplog.text
