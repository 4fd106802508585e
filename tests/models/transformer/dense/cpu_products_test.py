"""Products of few rows on a CPU, and which kernels are stored for them."""

import dataclasses
import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from tests import toys
from tests.generate import scored
from tunix.generate.decoders import layout
from tunix.generate.engine.cache import rows
from tunix.generate.engine.cache.row_keeper import RowKeeper
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.run.device import Device
from tunix.models import quantization
from tunix.models.automodel import AutoModel
from tunix.models.transformer.dense import qwix_seam
from tunix.models.transformer.dense.cpu_products import (
  TransposedKernel,
  einsum,
  few_rows,
  invariant_product,
  suits,
  take,
)
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.dense.quantized import QuantizationConfig

# The compiler decides about the bits and the buffers of products.
pytestmark = pytest.mark.shipped


def normal(*shape: int) -> jax.Array:
  values = np.random.default_rng(sum(shape)).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("lead", [(1,), (8,), (2, 200), (2, 0)])
def test_a_transposed_kernel_gives_the_product(lead):
  x, kernel = normal(*lead, 24), normal(24, 70)
  linear = Linear(24, 70, spec=(None, None), use_bias=True, rngs=nnx.Rngs(0))
  linear.kernel = nnx.data(TransposedKernel(kernel))
  assert linear.kernel.shape == (24, 70) and linear.kernel.matrix.shape == (70, 24)
  np.testing.assert_array_equal(linear.dense(), kernel)
  run = nnx.jit(lambda m, x: m(x))
  want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
  np.testing.assert_allclose(run(linear, x), want, atol=2e-5)
  half = run(linear, x.astype(jnp.bfloat16))
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(np.float32), want, atol=0.2)


@scored.has_compared_bits
@pytest.mark.parametrize("outs", [16, 17, 64])
def test_invariant_products_of_few_rows_have_the_bits_of_many(outs):
  x, matrix = normal(300, 160), normal(outs, 160)
  want = jax.jit(invariant_product)(x, matrix.T)
  few = jax.jit(functools.partial(few_rows, invariant=True))
  for count in (1, 2, 3, 8, 200):
    np.testing.assert_array_equal(few(x[:count], matrix), want[:count])
  if outs == 64:  # the form without `invariant` has another order
    plain = jax.jit(few_rows)(x[:8], matrix)
    assert np.any(np.asarray(plain) != want[:8])


def test_few_rows_are_multiplied_the_other_way():
  half = normal(8, 4).astype(jnp.bfloat16)
  assert suits(normal(256, 4)) and suits(normal(8, 32, 4)) and suits(half)
  assert not suits(normal(257, 4)) and not suits(normal(8, 4).astype(jnp.float16))


@pytest.mark.parametrize(
  "dtype,rows", [("float32", 3), ("bfloat16", 3), ("bfloat16", 1)]
)
def test_the_gradient_of_few_rows(dtype, rows):
  x, matrix, weights = normal(rows, 5), normal(7, 5), normal(rows, 7)
  x, matrix = x.astype(dtype), matrix.astype(dtype)
  loss = lambda product: jnp.sum(weights * product)
  got = jax.jit(jax.grad(lambda x, m: loss(few_rows(x, m)), (0, 1)))(x, matrix)
  want = jax.jit(jax.grad(lambda x, m: loss(x @ m.T), (0, 1)))(x, matrix)
  bound = 1e-5 if dtype == "float32" else 0.02
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, bound, bound), got, want)


def dots(jaxpr) -> list[tuple[str, ...]]:
  """Returns the dtypes of each product: of its operands, and of its result."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      found.append(tuple(str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)))
    for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
      found += dots(value.jaxpr) if hasattr(value, "jaxpr") else []
  return found


@pytest.mark.parametrize(
  "spec,shapes",
  [
    ("...i,io->...o", [(2, 9, 24), (24, 32)]),
    ("...i,io->...o", [(1, 1, 24), (24, 32)]),
    ("e...i,eio->e...o", [(3, 9, 24), (3, 24, 32)]),
    ("e...i,eio->e...o", [(1, 24), (1, 24, 32)]),
  ],
)
def test_products_of_bfloat16_and_of_their_gradients_have_float32_results(spec, shapes):
  x, w = (normal(*shape).astype(jnp.bfloat16) for shape in shapes)
  g = normal(*jax.eval_shape(functools.partial(jnp.einsum, spec), x, w).shape)

  def gradients(einsum):
    return jax.grad(lambda x, w: jnp.sum(einsum(spec, x, w) * g), (0, 1))

  jaxpr = jax.make_jaxpr(gradients(einsum))(x, w).jaxpr
  assert set(dots(jaxpr)) == {("bfloat16", "bfloat16", "float32")}
  plain = dots(jax.make_jaxpr(gradients(jnp.einsum))(x, w).jaxpr)
  assert ("bfloat16",) * 3 in plain
  got, want = einsum(spec, x, w), jnp.einsum(spec, *map(np.float64, (x, w)))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-5)
  exact = gradients(jnp.einsum)(x.astype(np.float32), w.astype(np.float32))
  for a, b in zip(gradients(einsum)(x, w), exact):
    assert a.dtype == jnp.bfloat16
    a = a.astype(jnp.float32)
    assert jnp.linalg.norm(a - b) < 2**-8 * jnp.linalg.norm(b)


def test_a_single_row_of_bfloat16_is_multiplied_twice():
  x, w = (normal(*shape).astype(jnp.bfloat16) for shape in [(1, 1, 24), (24, 32)])
  run = lambda x, w: einsum("...i,io->...o", x, w)
  assert "bf16[1,2,24]" in str(jax.make_jaxpr(run)(x, w))
  assert run(x, w).shape == (1, 1, 32)
  assert "bf16[2,24]" in str(jax.make_jaxpr(few_rows)(x, w.T))
  assert "[1,2,24]" not in str(jax.make_jaxpr(run)(*map(jnp.float32, (x, w))))


def test_other_products_stay(mesh_fsdp8):
  x, w = normal(2, 9, 24), normal(24, 32)
  halves = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
  run = lambda x, w: einsum("...i,io->...o", x, w)
  assert "custom_vjp" in str(jax.make_jaxpr(run)(*halves))
  assert "custom_vjp" not in str(jax.make_jaxpr(run)(x, w))
  with jax.set_mesh(mesh_fsdp8):
    assert "custom_vjp" not in str(jax.make_jaxpr(run)(*halves))
    assert "custom_vjp" not in str(jax.make_jaxpr(take)(halves[1], jnp.arange(3)))


def test_rows_of_a_bfloat16_table_are_taken_by_their_bits():
  table, ids = normal(40, 6).astype(jnp.bfloat16), jnp.asarray([[3, 0], [3, 39]])
  np.testing.assert_array_equal(take(table, ids), table[ids])
  assert "uint16[40,6]" in str(jax.make_jaxpr(take)(table, ids)).replace(
    "u16", "uint16"
  )
  weights = normal(2, 2, 6)
  loss = lambda get: jax.grad(lambda table: jnp.sum(get(table, ids) * weights))(table)
  np.testing.assert_array_equal(loss(take), loss(lambda table, ids: table[ids]))


def test_a_single_row_and_none_have_logits_in_bfloat16():
  for tied in (True, False):
    sizes = toys.config(tie_embeddings=tied, vocab_size=70)
    model = AutoModel.from_config(sizes, seed=0, dtype="bfloat16")
    hidden = normal(1, 3, sizes.embed_dim).astype(jnp.bfloat16)
    run = nnx.jit(lambda model, hidden: model.logits(hidden))
    one, three = run(model, hidden[:, :1]), run(model, hidden)
    assert one.shape == (1, 1, 70)
    np.testing.assert_allclose(one, three[:, :1], rtol=1e-5, atol=1e-6)
    assert run(model, hidden[:, :0]).shape == (1, 0, 70)


def test_a_bfloat16_model_takes_rows_and_logits_in_the_fast_forms():
  sizes = toys.config(tie_embeddings=True)
  graph, state = nnx.split(AutoModel.from_config(sizes, seed=0, dtype="bfloat16"))
  embed = lambda state, ids: nnx.merge(graph, state).embed_tokens(ids, "bfloat16")
  table = state["embed_tokens"]["embedding"].get_value().astype(jnp.bfloat16)
  state["embed_tokens"]["embedding"].set_value(table)
  assert "bitcast" in str(jax.make_jaxpr(embed)(state, jnp.ones((1, 3), jnp.int32)))
  logits = lambda state, hidden: nnx.merge(graph, state).logits(hidden)
  hidden = jnp.ones((1, 3, sizes.embed_dim), jnp.bfloat16)
  assert "barrier" in str(jax.make_jaxpr(logits)(state, hidden))


def test_rows_of_a_bfloat16_model_are_float32_on_a_cpu_and_its_pages_are_not():
  model = AutoModel.from_config(toys.config(), seed=0, dtype="bfloat16")
  config = EngineConfig(slots=2, max_tokens=64)
  store = RowKeeper(model.config, config)._empty_store(64)
  row, page = store.rows_v[0], store.pages_v[0]
  assert (row.dtype, page.dtype) == (jnp.float32, jnp.bfloat16)
  drawn = normal(*row.shape).astype(jnp.bfloat16).astype(jnp.float32)
  store = dataclasses.replace(store, rows_v=(drawn, *store.rows_v[1:]))
  one, none = (
    jnp.asarray([[1, 0, 2]]),
    jnp.zeros((1, 1, 2), jnp.int32),
  )  # slot, page, to
  store = rows.write_back(store, one, 1)
  assert store.pages_v[0].dtype == jnp.bfloat16 and jnp.any(store.pages_v[0][2] != 0)
  empty = dataclasses.replace(store, rows_v=(row, *store.rows_v[1:]))
  loaded = rows.load(empty, none, 0, one, 1).rows_v[0]
  np.testing.assert_array_equal(loaded[1, :, :, :16], drawn[1, :, :, :16])


def kinds(model) -> set[tuple[str, type]]:
  """Returns (name, type of the kernel) of each linear map of an unstacked model."""
  model = model.unstack()
  layout.transpose_kernels(model)
  found = {p[-1]: m for p, m in nnx.iter_graph(model) if isinstance(m, Linear)}
  return {(str(name), type(linear.kernel)) for name, linear in found.items()}


def test_float32_matrices_of_layers_and_head_are_transposed():
  model = AutoModel.from_config(toys.config(tie_embeddings=False, head_dim=16), seed=0)
  names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
  want = {(name, TransposedKernel) for name in (*names, "lm_head")}
  assert kinds(model) == want
  half = AutoModel.from_config(toys.config(), seed=0, dtype="bfloat16")
  assert {kind for _, kind in kinds(half)} == {nnx.Param}


def test_the_engine_decodes_with_transposed_kernels_on_one_cpu(mesh_fsdp8):
  model = AutoModel.from_config(toys.config(), seed=0)
  config = EngineConfig(slots=8, max_tokens=32, draft_tokens=4)
  decoded = nnx.merge(*Device(model, config, None)._weights()[:2])
  assert isinstance(decoded.layers[0].mlp.up_proj.kernel, TransposedKernel)
  assert layout.reads_transposed(None) and not layout.reads_transposed(mesh_fsdp8)


def test_quantized_kernels_and_products_of_qwix_stay():
  model = AutoModel.from_config(toys.config(tie_embeddings=True), seed=0)
  model_linear = nnx.clone(model).layers.mlp.up_proj
  config = QuantizationConfig(method="int8")
  quantized = quantization.quantize(
    AutoModel.from_config(toys.config(tie_embeddings=True), seed=0), config
  )
  assert TransposedKernel not in {kind for _, kind in kinds(quantized)}
  provider = qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=4.0)
  wrapped = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
  wrapped_linear = wrapped.layers.mlp.up_proj
  assert qwix_seam.is_wrapped(wrapped_linear)
  assert wrapped_linear._einsum() is jnp.einsum and model_linear._einsum() is einsum
  assert TransposedKernel not in {kind for _, kind in kinds(wrapped)}
  with pytest.raises(ValueError, match="which qwix has wrapped; expected a decoder"):
    quantization.for_sampling(wrapped, "int8")
