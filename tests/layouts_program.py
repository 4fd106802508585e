"""Compiles programs on eight simulated devices, so that XLA says on standard error what
it finds hard about their layouts: python layouts_program.py MESH NAME ...

A name is a preset, whose train step is compiled from shapes, or a job of
tests/jobs_on_meshes.py, which is run with a tied table and compiles all that it needs.
After "done" comes a program that XLA is known to say it of.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks import tpu_aot
from tests import jobs_on_meshes, toys
from tunix.models import families
from tunix.utils import mesh as mesh_lib


def compile_step(preset: str, axes: dict[str, int]) -> None:
  tpu_aot.lower(preset, mesh_lib.create_mesh(axes), 8, 128).compile()


def run_job(name: str, axes: dict[str, int]) -> None:
  config = toys.config
  toys.config = lambda **changes: config(tie_embeddings=True, **changes)
  jobs_on_meshes.MESHES["this"] = axes
  jobs_on_meshes.learnt(name, "this")
  toys.config = config


def compile_hard() -> None:
  """Rows of a table that is split along both axes, by tokens that are not."""
  mesh = mesh_lib.create_mesh({"dp": 2, "fsdp": 2, "tp": 2})
  rows, split = (
    NamedSharding(mesh, P(*x)) for x in ((("dp", "fsdp"),), ("tp", "fsdp"))
  )
  table = jax.ShapeDtypeStruct((96, 32), jnp.float32, sharding=split)
  tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=rows)
  jax.jit(lambda t, i: t[i], out_shardings=rows).lower(table, tokens).compile()


def main() -> None:
  axes = json.loads(sys.argv[1])
  for name in sys.argv[2:]:
    os.write(2, f"== {name}\n".encode())
    presets = {p for f in families.FAMILIES.values() for p in f.presets}
    (compile_step if name in presets else run_job)(name, axes)
  os.write(2, b"done\n")
  compile_hard()


if __name__ == "__main__":
  main()
