"""Training for TPUs goes through splash attention: packed rows, windows and soft caps.

Lowered for TPUs that are not here, which asks for no TPU compiler: kernels are opaque
to it, and what is not in the lowered program is not in the compiled one.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tests import toys
from tunix.models.transformer.attention import fused
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.visibility import Visibility
from tunix.perf.hlo_flops import count_flops
from tunix.sft.losses import next_token_loss

TPU = AbstractDevice("TPU v5 lite", 1, "tpu")
MESH = AbstractMesh((2, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2, abstract_device=TPU)
ROWS, LENGTH, WINDOW = 4, 1536, 300  # three blocks of 512; two that a window meets


def on_tpus(function, *arguments, argnums=0):
  with jax.sharding.use_abstract_mesh(MESH):
    traced = jax.jit(jax.grad(function, argnums)).trace(*arguments)
    return traced, traced.lower(lowering_platforms=("tpu",))


def test_a_train_step_of_packed_rows():
  config = toys.config(
    num_layers=2,
    layer_types=("sliding", "full"),
    sliding_window=WINDOW,
    attention_softcap=30.0,
    activation="silu",
    remat="block",
    scan_layers=True,
  )
  graph, state = sharding.abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)

  def loss(state, tokens):
    model = nnx.merge(graph, state)
    return next_token_loss(model, tokens, tokens, segment_ids=tokens).total

  traced, lowered = on_tpus(loss, state, tokens)
  text = lowered.as_text()
  for phase in ("fwd", "dq", "dkv"):
    assert f"splash_mha_{phase}_segmented" in text
  assert f"{LENGTH}x{LENGTH}" not in text  # no scores outside of a kernel
  for most in (2, 3):  # tables of blocks, of the sliding and of the full layer
    assert f"tensor<1x3x{most}xi8>" in text
  assert " tanh " in str(traced.jaxpr)  # of the cap; the activation has none


@pytest.mark.parametrize("rows", [4, 2])  # two, or one, on each device
def test_what_the_kernels_compute(rows):
  heads, width = 4, 128
  shape = lambda n: jax.ShapeDtypeStruct((rows, LENGTH, n, width), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)

  def flops(window):
    def loss(query, key, value, ids):
      visible = Visibility(jnp.arange(LENGTH), segment_ids=ids, aligned=True)
      options = 1.0, None, window, ShardingRules()
      out = fused.splash(query, key, value, visible, *options)
      return out.astype(jnp.float32).sum()

    # Of all three: newer versions of JAX leave a kernel out whose result nobody reads.
    arguments = shape(heads), shape(2), shape(2), ids
    return count_flops(on_tpus(loss, *arguments, argnums=(0, 1, 2))[1]).flops

  # Forward 2 products; for the gradient of queries 3, of keys and values 4: each
  # computes the scores, and the gradient of the weights, for itself.
  a_pair = 2 * (2 + 3 + 4) * rows * heads * width
  beside = 2 * rows * heads * LENGTH * width  # outputs with their cotangents
  assert flops(None) == a_pair * (1 + 2 + 3) * 512**2 + beside
  assert flops(WINDOW) == a_pair * (1 + 2 + 2) * 512**2 + beside
