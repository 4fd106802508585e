"""The engine's programs, compiled for TPU chips that this machine does not have."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tunix.generate.decoders import layout
from tunix.generate.engine.cache.paged_store import PageKeeper
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device import launch, state as state_lib
from tunix.generate.engine.device.state import Round
from tunix.generate.engine.run import arrays
from tunix.generate.engine.scheduling.plan import Plan
from tunix.generate.padded import decode
from tunix.models import automodel
from tunix.models.llama3.model import ModelConfig
from tunix.perf import programs
from tunix.plan import topology
from tunix.utils import mesh as mesh_lib

SLOTS = 32
SIZES = EngineConfig(
  slots=SLOTS, max_tokens=4096, cache_tokens=65536, prefill_tokens=128
)


def compile_for(name, axes, gather, **kinds):
  """Prints how two layers of Llama 3.1 8B decode, and prefill beside decoding.

  Args:
    name, axes: the chips, and their mesh.
    gather: see `layout.for_decoding`.
    **kinds: fields of the configuration that set the kinds of the layers.
  """
  mesh = topology.find(name).mesh(axes)
  config = dataclasses.replace(
    ModelConfig.llama3p1_8b(),
    num_layers=2,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
    **kinds,
  )
  with mesh_lib.use_mesh(mesh):
    model = automodel.of_shapes(config, mesh)
    graph, state = nnx.split(model)
    with programs.recording():
      weights = layout.for_decoding(model, state, gather)
      opened = decode.opened(graph, state, weights)
    keeper = PageKeeper(nnx.merge(*opened).config, SIZES, "ragged", mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    none = [None] * SLOTS
    table = shape(np.zeros((SLOTS, 256), np.int32))
    tables = (table,) * len(keeper.store.tables)
    pages = dataclasses.replace(keeper.store, tables=tables)
    carry = Round(
      jax.tree.map(shape, arrays.slots_of(none, Plan(), SIZES)),
      pages,
      jax.tree.map(shape, jax.eval_shape(lambda: state_lib.empty(SLOTS, 16, 0))),
    )
    uses = frozenset({"draws", "scores"})
    rules = arrays.rules_of(none, SLOTS, uses)
    until = np.array([16, 99], np.int32)
    decoding = launch.decode.lower(*opened, carry, rules, None, until, 0)
    blocks = arrays.blocks_of([], [], 8, SIZES)
    mixing = launch.mixed.lower(*opened, carry, rules, None, blocks, np.int32(2))
    arrays_of = [x for layer in pages.layers for x in layer.pages]
    local = [x.sharding.shard_shape(x.shape) for x in arrays_of]
    own = sum(2 * int(np.prod(dims)) for dims in local)
    for lowered in (decoding, mixing):
      compiled = lowered.compile()
      text = compiled.as_text()
      dims = "|".join({",".join(map(str, each)) for each in local})
      copies = re.findall(rf"= bf16\[(?:{dims})\]\S* copy\(", text)
      gathered = re.findall(r"= \w+\[([0-9,]+)\]\S* all-gather(?:-start)?\(", text)
      # The smallest weight has 4096 x 1024 numbers.
      large = [g for g in gathered if np.prod(list(map(int, g.split(",")))) >= 2**22]
      weights_moved = [g for g in large if "16032" not in g]  # logits of the slots
      memory = compiled.memory_analysis()
      print(
        f"{len(copies)} copies, {len(weights_moved)} weights gathered,",
        f"aliased {memory.alias_size_in_bytes >= own}",
      )


@pytest.mark.slow
def test_launches_compile_for_tpu_chips():
  """Pages stay where they are, and no round gathers weights."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the TPU compiler is not installed: pip install 'jax[tpu]'")
  code = """
from tests.generate.engine.tpu_test import compile_for
compile_for("v5e:2x4", {"tp": 8}, None)
compile_for("v6e:2x4", {"fsdp": 8}, "split")
kinds = {"layer_types": ("sliding", "full"), "sliding_window": 128}
compile_for("v5e:2x4", {"tp": 8}, None, **kinds)
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.splitlines() == ["0 copies, 0 weights gathered, aliased True"] * 6
