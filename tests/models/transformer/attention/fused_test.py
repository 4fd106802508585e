"""Splash in the Pallas interpreter, cuDNN's arguments through XLA, and splash through
the TPU compiler where it is installed."""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import optimizers
from tests.models.transformer import attention_cases as cases
from tunix.models.transformer.attention import fused
from tunix.models.transformer.config import ShardingRules
from tunix.utils import mesh as mesh_lib

splash = functools.partial(fused.splash, rules=ShardingRules(), interpret=True)


@pytest.mark.parametrize(
  "kind, length, options",
  [
    ("causal", 130, {}),
    ("segments", 200, {"window": 70, "softcap": 2.0}),
  ],
)
def test_splash_equals_plain(kind, length, options):
  case = cases.case(kind, 1, length=length, head_dim=128, **options)
  got = cases.value_and_grads(case, splash)
  cases.assert_equal(got, cases.plain(case))


def test_splash_under_a_mesh(mesh_fsdp4_tp2):
  # Rows over fsdp, 2 key heads and their 4 query heads over tp.
  case = sharded_case()
  want = cases.plain(case)[0]
  with jax.set_mesh(mesh_fsdp4_tp2):
    program = jax.jit(lambda *x: splash(*x, case.visible, **case.options))
    arrays = case.query, case.key, case.value
    text = program.lower(*arrays).as_text()
    got = program(*arrays)
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert 'manual_axes={"fsdp", "tp"}' in text
  assert "tensor<1x2x128x128xf32>" in text, "one row and two query heads a device"


def sharded_case():
  rng = np.random.default_rng(0)
  draw = lambda heads: jnp.asarray(rng.normal(size=(4, 128, heads, 128)), jnp.float32)
  case = cases.case("segments", 0, length=128, rows=4, window=50)
  fields = {"query": draw(4), "key": draw(2), "value": draw(2), "weights": draw(4)}
  return dataclasses.replace(case, **fields)


@pytest.mark.parametrize("kind", ["causal", "segments"])
def test_key_heads_that_tp_does_not_divide_stay_whole(mesh_fsdp4_tp2, kind):
  case = cases.case(kind, 1, length=16, rows=4, window=5)
  one = case.query[:, :, :2], case.key[:, :, :1], case.value[:, :, :1]
  run = functools.partial(fused.cudnn, rules=ShardingRules(), backend="xla")
  alone = run(*one, case.visible, **case.options)
  with jax.set_mesh(mesh_fsdp4_tp2):
    got = jax.jit(lambda *x: run(*x, case.visible, **case.options))(*one)
  np.testing.assert_allclose(got, alone, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 5, 20])
def test_blocks_of_the_mask_are_as_they_are_said_to_be(window):
  from tunix.models.transformer.attention.splash_mask import ReachMask

  slots = np.r_[8:16, 32:40, 0:8]  # pieces of a row, in the order of some device
  age = slots[:, None] - np.arange(48)
  seen = (age >= 0) & (age < (window or 48))
  mask = ReachMask(slots, 48, window)
  for i, j in np.ndindex(6, 12):
    block = np.s_[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
    np.testing.assert_array_equal(np.broadcast_to(mask[block], (4, 4)), seen[block])
  assert mask[0:4, 40:44].shape == (1, 1)  # later than all of them


@pytest.mark.parametrize("kind", ["causal", "segments"])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_cudnn_is_asked_for_the_same_window(window, kind):
  case = cases.case(kind, 2, length=30, window=window)
  run = functools.partial(fused.cudnn, rules=ShardingRules(), backend="xla")
  cases.assert_equal(cases.value_and_grads(case, run), cases.plain(case))


def test_segments_in_rows_of_odd_length_are_padded_for_cudnn():
  """It refuses a bias of odd lengths."""
  case = cases.case("segments", 2, length=15, window=4)
  run = functools.partial(fused.cudnn, rules=ShardingRules(), backend="xla")
  cases.assert_equal(cases.value_and_grads(case, run), cases.plain(case))
  text = str(
    jax.make_jaxpr(lambda *x: run(*x, case.visible, **case.options))(
      case.query, case.key, case.value
    )
  )
  rows = case.query.shape[0]
  assert f"bool[{rows},1,16,16]" in text


def test_cudnn_is_what_is_asked_for():
  # On a machine without a GPU, JAX itself refuses.
  if jax.default_backend() == "gpu":
    pytest.skip("this machine may have it")
  case = cases.case("causal", 2, length=16)
  half = [x.astype(jnp.bfloat16) for x in (case.query, case.key, case.value)]
  with pytest.raises(RuntimeError, match=r"cuDNN|CUDA|cuda|gpu"):
    fused.cudnn(*half, case.visible, **case.options, rules=ShardingRules())


def compile_for_tpu():
  """Compiles a train step of one attention layer for four v5e chips."""
  import optax
  from flax import nnx
  from jax.experimental import topologies
  from jax.sharding import NamedSharding, PartitionSpec as P

  from tunix.models.transformer.attention import rope
  from tunix.models.transformer.attention.layer import Attention
  from tunix.models.transformer.config import RopeConfig
  from tunix.models.transformer.dense.layers import Linear
  from tunix.models.transformer.visibility import Visibility

  chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
  mesh = mesh_lib.create_mesh({"fsdp": 2, "tp": 2}, chips)
  rows, length, heads, head_dim = 4, 1000, 4, 128
  linear = lambda i, o, *spec: Linear(i, o, spec=spec, rngs=nnx.Rngs(0))
  wide, narrow = heads * head_dim, heads * head_dim // 2
  layer = Attention(
    linear(256, wide, "fsdp", "tp"),
    linear(256, narrow, "fsdp", "tp"),
    linear(256, narrow, "fsdp", "tp"),
    linear(wide, 256, "tp", "fsdp"),
    head_dim=head_dim,
    softcap=30.0,
    window=500,
    implementation="splash",
  )
  graph, state = nnx.split(layer)
  optimizer = optimizers.adamw(1e-3)

  def step(state, moments, x, segments):
    def loss(state):
      index = jnp.arange(length)
      sin_cos = rope.angles(index[None], head_dim, RopeConfig())
      visible = Visibility(index, segment_ids=segments)
      out, _ = nnx.merge(graph, state)(x, sin_cos, visible)
      return jnp.mean(out.astype(jnp.float32) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss))(state)
    updates, moments = optimizer.update(grads, moments, state)
    return optax.apply_updates(state, updates), moments, value

  def placed(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

  abstract = lambda tree: jax.tree.map(lambda x: placed(x.shape, x.dtype), tree)
  x = placed((rows, length, 256), jnp.bfloat16, "fsdp")
  segments = placed((rows, length), jnp.int32, "fsdp")
  moments = jax.eval_shape(optimizer.init, state)
  with jax.set_mesh(mesh):
    lowered = jax.jit(step).lower(abstract(state), abstract(moments), x, segments)
    print("KERNELS", lowered.compile().as_text().count('"tpu_custom_call"'))


@pytest.mark.slow
def test_splash_step_compiles_for_tpu_chips():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the TPU compiler is not installed: pip install 'jax[tpu]'")
  code = f"from {__name__} import compile_for_tpu; compile_for_tpu()"
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  # One forward kernel, one for the queries' gradient, one for keys and values.
  assert "KERNELS 3" in done.stdout, done.stdout
