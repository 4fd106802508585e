"""Products of few rows on a CPU, and which kernels are stored for them."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from tests import toys
from tunix.generate.decoders import layout
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.run.device import Device
from tunix.models import quantization
from tunix.models.automodel import AutoModel
from tunix.models.transformer.dense.cpu_products import TiledKernel, few_rows, suits
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.dense.quantized import QuantizationConfig

# The compiler decides about the bits and the buffers of products.
pytestmark = pytest.mark.shipped


def normal(*shape: int) -> jax.Array:
  values = np.random.default_rng(sum(shape)).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize(
  "lead,outputs,tile", [((1,), 96, 32), ((8,), 128, 64), ((2, 70), 96, 32)]
)
def test_a_tiled_kernel_gives_the_product(lead, outputs, tile):
  x, kernel = normal(*lead, 24), normal(24, outputs)
  linear = Linear(24, outputs, spec=(None, None), use_bias=True, rngs=nnx.Rngs(0))
  linear.kernel = nnx.data(TiledKernel(kernel, 0))
  assert linear.kernel.shape == (24, outputs)
  assert linear.kernel.tiles.shape == (outputs // tile, 24, tile)
  np.testing.assert_array_equal(linear.dense(), kernel)
  run = nnx.jit(lambda m, x: m(x))
  want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
  np.testing.assert_allclose(run(linear, x), want, atol=2e-5)
  half = run(linear, x.astype(jnp.bfloat16))
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(np.float32), want, atol=0.2)


def temporaries(function, *arguments) -> int:
  lowered = nnx.jit(function).lower(*arguments)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_products_of_the_same_rows_share_no_copy_of_them():
  """XLA would compute [out, rows, in] numbers once, and read them in both products."""
  x, kernel = normal(8, 512), normal(512, 1536)
  first, second, alike = (TiledKernel(kernel, number) for number in (0, 1, 0))
  run = lambda a, b, x: nnx.silu(a.product(x, jnp.matmul)) * b.product(x, jnp.matmul)
  assert temporaries(run, first, second, x) < 2**20
  assert temporaries(run, first, alike, x) > 2**24  # else the numbers can go


@pytest.mark.parametrize("kv_heads", [4, 8])
def test_no_layer_shares_a_copy_of_its_rows(kv_heads):
  sizes = {"embed_dim": 128, "hidden_dim": 384, "head_dim": 16, "num_layers": 1}
  config = toys.config(num_heads=8, num_kv_heads=kv_heads, **sizes)
  model = AutoModel.from_config(config, seed=0).unstack()
  layout.tile_kernels(model)
  run = lambda model, tokens: model(tokens, tokens * 0)[0]
  assert temporaries(run, model, jnp.ones((8, 1), jnp.int32)) < 2**18


def test_few_rows_of_float32_are_multiplied_the_other_way():
  assert suits(normal(64, 4)) and suits(normal(8, 8, 4))
  assert not suits(normal(65, 4)) and not suits(normal(8, 4).astype(jnp.bfloat16))


def test_the_gradient_of_the_product():
  x, matrix, weights = normal(3, 5), normal(7, 5), normal(3, 7)
  loss = lambda product: jnp.sum(weights * product)
  got = jax.jit(jax.grad(lambda x, m: loss(few_rows(x, m)), (0, 1)))(x, matrix)
  want = jax.jit(jax.grad(lambda x, m: loss(x @ m.T), (0, 1)))(x, matrix)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def kinds(model) -> set[tuple[str, type]]:
  """Returns (name, type of the kernel) of each linear map of an unstacked model."""
  model = model.unstack()
  layout.tile_kernels(model)
  found = {p[-1]: m for p, m in nnx.iter_graph(model) if isinstance(m, Linear)}
  return {(str(name), type(linear.kernel)) for name, linear in found.items()}


def test_float32_matrices_of_layers_and_head_are_tiled():
  model = AutoModel.from_config(toys.config(tie_embeddings=False, head_dim=16), seed=0)
  names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
  want = {(name, TiledKernel) for name in (*names, "lm_head")}
  assert kinds(model) == want
  half = AutoModel.from_config(toys.config(), seed=0, dtype="bfloat16")
  assert {kind for _, kind in kinds(half)} == {nnx.Param}


def test_the_engine_decodes_few_rows_with_tiles_on_one_cpu(mesh_fsdp8):
  model = AutoModel.from_config(toys.config(), seed=0)
  for slots, drafts, kind in [(8, 0, TiledKernel), (8, 4, nnx.Param)]:
    config = EngineConfig(slots=slots, max_tokens=32, draft_tokens=drafts)
    decoded = nnx.merge(*Device(model, config, None)._weights()[:2])
    assert isinstance(decoded.layers[0].mlp.up_proj.kernel, kind)
  assert layout.reads_tiles(None, 8) and not layout.reads_tiles(None, 25)
  assert not layout.reads_tiles(mesh_fsdp8, 8)


def test_quantized_kernels_and_products_of_qwix_stay():
  model = AutoModel.from_config(toys.config(tie_embeddings=True), seed=0)
  config = QuantizationConfig(method="int8")
  quantized = quantization.quantize(
    AutoModel.from_config(toys.config(tie_embeddings=True), seed=0), config
  )
  assert TiledKernel not in {kind for _, kind in kinds(quantized)}
  provider = qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=4.0)
  wrapped = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
  assert TiledKernel not in {kind for _, kind in kinds(wrapped)}
  with pytest.raises(ValueError, match="which qwix has wrapped; expected a decoder"):
    quantization.for_sampling(wrapped, "int8")
