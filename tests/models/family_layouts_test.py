"""New families, tiny: packed rows on a mesh of 8 devices learn as on one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tunix.models import families, tiny
from tunix.models.automodel import AutoModel
from tunix.sft.losses import next_token_loss
from tunix.utils import mesh as mesh_lib, tree

MESH = {"fsdp": 2, "cp": 2, "tp": 2}
# CI runs the first ones; all are slow.
IN_CI = {
  "gemma4_e2b": MESH,
  "glm4p7_flash": {"ep": 2, "cp": 2, "tp": 2},
  "nemotron_nano_9b_v2": MESH,
  "qwen3p5_0p8b": MESH,
}
SLOW = dict.fromkeys(
  [
    "gemma2_2b",
    "gemma3_1b",
    "granite3p3_2b",
    "granite4_1b",
    "llama3p2_1b",
    "ministral3_3b",
    "mistral_7b_v0p3",
    "olmo2_1b",
    "olmo3_7b",
    "phi4_mini_3p8b",
    "qwen2p5_0p5b",
    "qwen3_0p6b",
    "smollm3_3b",
  ],
  MESH,
) | {
  "deepseek_v3_671b": {"fsdp": 2, "ep": 2, "tp": 2},
  "gemma4_26b_a4b": {"fsdp": 2, "ep": 4},
  "gpt_oss_20b": {"fsdp": 2, "ep": 2, "tp": 2},
  "nemotron3_nano_30b_a3b": {"fsdp": 2, "ep": 4},
  "qwen3p5_35b_a3b": {"ep": 2, "cp": 2, "tp": 2},
}
# Mixtures above whose mesh has no cp, with rows split over devices.
SLOW_WITH_CP = {
  "deepseek_v3_671b": {"ep": 2, "cp": 2, "tp": 2},
  "gemma4_26b_a4b": {"fsdp": 2, "ep": 2, "cp": 2},
  "gpt_oss_20b": {"ep": 2, "cp": 2, "tp": 2},
  "nemotron3_nano_30b_a3b": {"fsdp": 2, "ep": 2, "cp": 2},
}
PRESETS = (*IN_CI, *SLOW)


@functools.cache
def learnt(preset, axes):
  """{name: array}: the loss of packed rows, and its gradient."""
  config = tiny.shrink(families.preset(preset)[1](scan_layers=False), toys.VOCAB)
  count = math.prod(size for _, size in axes)
  mesh = mesh_lib.create_mesh(dict(axes), jax.devices()[:count])
  with jax.set_mesh(mesh):
    model = AutoModel.from_config(config, mesh=mesh, dtype=jnp.float32)
    graph, state = nnx.split(model)
    batch = toys.packed(toys.batch(0))

    def loss(state):
      out = next_token_loss(nnx.merge(graph, state), **batch)
      return out.total / out.weight

    value, gradient = jax.jit(jax.value_and_grad(loss))(state)
  return {"loss": float(value), **tree.flatten(mesh_lib.to_host(gradient))}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("preset", "axes"),
  [
    *(pytest.param(*case, marks=pytest.mark.ci) for case in IN_CI.items()),
    *SLOW.items(),
    *SLOW_WITH_CP.items(),
  ],
  ids=str,
)
def test_gradients_are_those_of_one_device(preset, axes):
  want, got = (learnt(preset, tuple(x.items())) for x in ({"fsdp": 1}, axes))
  assert got.keys() == want.keys() and len(want) > 5
  total = math.sqrt(sum(np.sum(np.square(x)) for x in want.values()))
  for name, value in want.items():
    gap = np.linalg.norm(got[name] - value)
    assert gap < 1e-5 * total, (name, gap / total)
