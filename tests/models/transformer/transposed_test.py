"""Products of few rows on a CPU, and which kernels are stored for them."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from tests import toys
from tunix.generate import layout
from tunix.models import quantisation
from tunix.models.automodel import AutoModel
from tunix.models.transformer.layers import Linear
from tunix.models.transformer.quantised import QuantisationConfig
from tunix.models.transformer.transposed import TransposedKernel, few_rows, suits


def normal(*shape: int) -> jax.Array:
  values = np.random.default_rng(sum(shape)).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("lead", [(1,), (8,), (2, 3), (70,)])
def test_a_transposed_kernel_gives_the_product(lead):
  x, kernel = normal(*lead, 24), normal(24, 40)
  linear = Linear(24, 40, spec=(None, None), use_bias=True, rngs=nnx.Rngs(0))
  linear.kernel = nnx.data(TransposedKernel(nnx.Param(kernel.T)))
  assert linear.kernel.shape == (24, 40)
  np.testing.assert_array_equal(linear.dense(), kernel)
  got = nnx.jit(lambda m, x: m(x))(linear, x)
  want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
  np.testing.assert_allclose(got, want, atol=2e-5)


def test_only_few_rows_of_float32_are_multiplied_the_other_way():
  assert suits(normal(64, 4)) and suits(normal(8, 8, 4))
  assert not suits(normal(65, 4)) and not suits(normal(8, 4).astype(jnp.bfloat16))


def test_the_gradient_of_the_product():
  x, matrix, weights = normal(3, 5), normal(7, 5), normal(3, 7)
  loss = lambda product: jnp.sum(weights * product)
  got = jax.grad(lambda x, m: loss(few_rows(x, m)), (0, 1))(x, matrix)
  want = jax.grad(lambda x, m: loss(x @ m.T), (0, 1))(x, matrix)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def kinds(model) -> set[tuple[str, type]]:
  """Returns (name, type of the kernel) of each linear map of an unstacked model."""
  model = model.unstack()
  layout.transpose_kernels(model)
  found = {p[-1]: m for p, m in nnx.iter_graph(model) if isinstance(m, Linear)}
  return {(str(name), type(linear.kernel)) for name, linear in found.items()}


def test_float32_matrices_of_layers_and_head_are_transposed():
  model = AutoModel.from_config(toys.config(tie_embeddings=False), seed=0)
  names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
  want = {(name, TransposedKernel) for name in (*names, "lm_head")}
  assert kinds(model) == want
  half = AutoModel.from_config(toys.config(), seed=0, dtype="bfloat16")
  assert {kind for _, kind in kinds(half)} == {nnx.Param}


def test_quantised_kernels_and_products_of_qwix_stay():
  model = AutoModel.from_config(toys.config(tie_embeddings=True), seed=0)
  config = QuantisationConfig(method="int8")
  quantised = quantisation.quantise(
    AutoModel.from_config(toys.config(tie_embeddings=True), seed=0), config
  )
  assert TransposedKernel not in {kind for _, kind in kinds(quantised)}
  provider = qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=4.0)
  wrapped = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
  assert TransposedKernel not in {kind for _, kind in kinds(wrapped)}
