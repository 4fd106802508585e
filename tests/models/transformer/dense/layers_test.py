"""Linear maps with experts against a loop over experts; activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models import quantization
from tunix.models.transformer.dense.layers import Linear, RMSNorm, gelu_tanh
from tunix.models.transformer.dense.mlp import gated

EXPERTS, IN, OUT, RANK = 3, 32, 6, 2
SIZES = np.array([4, 0, 3], np.int32)


def draw(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def make(*, lora=False, dora=False, method=None):
  linear = Linear(
    IN, OUT, stack=(EXPERTS,), spec=(None,) * 3, use_bias=True, rngs=nnx.Rngs(0)
  )
  linear.kernel.set_value(draw(0, EXPERTS, IN, OUT))
  linear.bias.set_value(draw(1, EXPERTS, OUT))
  if method:
    config = quantization.QuantizationConfig(method=method, block=8)
    kernel = quantization.quantize_kernel(linear.kernel[...], (None,) * 3, config)
    linear.kernel = nnx.data(kernel)
  if lora or dora:
    linear.lora_a = nnx.data(nnx.LoRAParam(draw(2, EXPERTS, IN, RANK)))
    linear.lora_b = nnx.data(nnx.LoRAParam(draw(3, EXPERTS, RANK, OUT)))
    linear.lora_scale = 0.5
  if dora:
    linear.lora_magnitude = nnx.data(nnx.LoRAParam(1 + draw(4, EXPERTS, OUT) ** 2))
  return linear


def weight(linear, e):
  """The kernel of one expert with all that is added to it, by NumPy."""
  w = np.asarray(linear.dense()[e], np.float64)
  if linear.lora_a is None:
    return w
  a, b = np.asarray(linear.lora_a[e]), np.asarray(linear.lora_b[e])
  w = w + linear.lora_scale * a @ b
  if linear.lora_magnitude is None:
    return w
  return w / np.linalg.norm(w, axis=0) * np.asarray(linear.lora_magnitude[e])


@pytest.mark.parametrize(
  "options",
  [{}, {"lora": True}, {"dora": True}, {"dora": True, "method": "nf4"}],
  ids=str,
)
def test_both_agree_with_a_loop_over_experts(options):
  linear = make(**options)
  x = draw(5, int(SIZES.sum()), IN)
  owner = np.repeat(np.arange(EXPERTS), SIZES)
  want = np.stack(
    [
      np.asarray(row) @ weight(linear, e) + np.asarray(linear.bias[e])
      for row, e in zip(x, owner)
    ]
  )
  got = jax.jit(lambda x, n: linear.grouped(x, n))(x, jnp.asarray(SIZES))
  assert checkpoints.relative(got, want) < 1e-5
  x = draw(6, EXPERTS, 2, 5, IN)
  want = np.stack(
    [
      np.asarray(x[e]) @ weight(linear, e) + np.asarray(linear.bias[e])
      for e in range(EXPERTS)
    ]
  )
  assert checkpoints.relative(linear.per_expert(x), want) < 1e-5


@pytest.mark.parametrize("method", [None, "nf4"])
def test_gradients_of_grouped_and_per_expert_agree(method):
  linear = make(dora=True, method=method)
  graph, params, rest = nnx.split(linear, nnx.LoRAParam, ...)
  x = draw(5, EXPERTS, 4, IN)
  sizes = jnp.full(EXPERTS, 4)

  def loss(params, x, grouped):
    module = nnx.merge(graph, params, rest)
    rows = x.reshape(-1, IN)
    y = module.grouped(rows, sizes) if grouped else module.per_expert(x)
    return jnp.sum(jnp.sin(y))

  one, two = (jax.grad(loss, (0, 1))(params, x, grouped) for grouped in (True, False))
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    assert float(jnp.abs(a).max()) > 0
    assert checkpoints.relative(a, np.asarray(b)) < 1e-4


def test_an_output_without_magnitude_is_left_alone():
  linear = make(dora=True)
  linear.lora_magnitude.set_value(jnp.zeros((EXPERTS, OUT)))
  x = draw(6, EXPERTS, 2, IN)
  plain = make(lora=True)
  np.testing.assert_allclose(linear.per_expert(x), plain.per_expert(x), rtol=1e-6)


def test_the_gradient_of_gelu_keeps_its_digits():
  x = np.linspace(-8, 8, 4001).astype(np.float32)
  wide, slope = x.astype(np.float64), np.sqrt(2 / np.pi)
  tanh = np.tanh(slope * (wide + 0.044715 * wide**3))
  np.testing.assert_allclose(gelu_tanh(x), 0.5 * wide * (1 + tanh), atol=1e-6)
  # 1 - tanh^2 without a difference.
  fall = np.cosh(slope * (wide + 0.044715 * wide**3)) ** -2
  want = 0.5 * (1 + tanh)
  want += 0.5 * wide * fall * slope * (1 + 3 * 0.044715 * wide**2)
  error = lambda f: np.max(np.abs(jax.vmap(jax.grad(f))(x) - want) / (abs(want) + 1e-3))
  assert error(gelu_tanh) < 3e-5
  assert error(jax.nn.gelu) > 1e-3


def _kept(fn, *args) -> dict[str, int]:
  """Returns the bytes that the backward pass of fn(*args) keeps, by dtype."""
  backward = jax.eval_shape(lambda: jax.vjp(fn, *args)[1])
  kept = dict.fromkeys(("bfloat16", "float32"), 0)
  for x in jax.tree.leaves(backward):
    kept[x.dtype.name] += x.size * x.dtype.itemsize
  return kept


def test_a_16_bit_model_keeps_no_float32_values_of_norms_and_activations():
  x = jnp.ones((4, 256), jnp.bfloat16)
  norm = RMSNorm(256, 1e-6, spec=(None,), param_dtype=jnp.bfloat16)
  assert _kept(norm, x) == {"bfloat16": x.nbytes + 512, "float32": 0}
  combine = lambda gate, up: gated(gate, up, jax.nn.silu, None)
  assert _kept(combine, x, x) == {"bfloat16": 2 * x.nbytes, "float32": 0}


def test_a_float32_norm_recomputes_nothing():
  norm = RMSNorm(256, 1e-6, spec=(None,))
  text = str(jax.make_jaxpr(norm)(jnp.ones((4, 256))))
  assert "checkpoint" not in text and "remat" not in text
