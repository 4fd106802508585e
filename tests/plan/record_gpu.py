"""Compiles two toys for H100s and writes their HLO to the files beside this one.

  JAX_PLATFORMS=cpu python -m tests.plan.record_gpu

needs `pip install 'tunix[plan-gpu]'`. Machines without it test with the files.
"""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tunix.plan import gpus

HERE = pathlib.Path(__file__).parent
STEP, ATTENTION = HERE / "gpu_step.hlo", HERE / "gpu_attention.hlo"
LAYERS, WIDTH, ROWS = 4, 256, 4096
ROW, HEADS, HEAD_DIM, WINDOW = (8, 512), (8, 4), 64, 128  # [B, T], queries and keys
_SOURCES = re.compile(r"\n\nFileNames\n.*?\n\n\n", re.DOTALL)  # has paths of a machine
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_CONFIG = re.compile(r", backend_config=(?!.*known_trip_count).*")


def mesh(topology: str) -> jax.sharding.Mesh:
  """Returns a mesh whose axis fsdp has all GPUs."""
  devices = gpus.devices(topology)
  return jax.make_mesh(
    (len(devices),), ("fsdp",), devices=devices, axis_types=(AxisType.Auto,)
  )


def step(topology: str) -> jax.stages.Lowered:
  """Lowers loss and gradient of scanned layers whose weights and rows are split."""
  grid = mesh(topology)

  def loss(weights, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

  split = NamedSharding(grid, P(None, "fsdp")), NamedSharding(grid, P("fsdp"))
  out = NamedSharding(grid, P()), split[0]
  shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
  arguments = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
  run = jax.value_and_grad(loss)
  return jax.jit(run, in_shardings=split, out_shardings=out).lower(*arguments)


def attention(topology: str) -> jax.stages.Lowered:
  """Lowers value and gradient of cuDNN's attention, causal and with a window."""
  grid = mesh(topology)

  def total(*arrays):
    run = jax.nn.dot_product_attention
    options = {"is_causal": True, "implementation": "cudnn"}
    whole = run(*arrays, **options)
    part = run(*arrays, local_window_size=(WINDOW - 1, 0), **options)
    return jnp.sum((whole + part).astype(jnp.float32))

  rows = NamedSharding(grid, P("fsdp"))
  query, key = (
    jax.ShapeDtypeStruct((*ROW, n, HEAD_DIM), jnp.bfloat16, sharding=rows)
    for n in HEADS
  )
  shard = jax.shard_map(
    jax.grad(total, (0, 1, 2)),
    mesh=grid,
    in_specs=P("fsdp"),
    out_specs=P("fsdp"),
    check_vma=False,
  )
  return jax.jit(shard).lower(query, key, key)


def main() -> None:
  """Writes both files."""
  compiled = step("h100:8").compile().as_text() or ""
  STEP.write_text(_CONFIG.sub("", _short(compiled)))
  lowered = attention("h100:8").as_text(dialect="hlo", debug_info=True)
  ATTENTION.write_text(_short(lowered))


def _short(text: str) -> str:
  return _METADATA.sub("", _SOURCES.sub("\n\n", text))


if __name__ == "__main__":
  main()
