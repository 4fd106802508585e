"""Arrays that stay in a device's memory while a program runs that does not use them.

The compiler knows only the arguments of one program. The optimizer's state stays in
memory while completions are sampled, and a reference model stays while the policy is
updated. Such arrays are arguments of another program and the result of none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import jax
from jax.sharding import Mesh

from tunix.perf import programs
from tunix.perf.programs import ProgramRecord
from tunix.sft.steps import offload


def beside(
  records: Mapping[str, ProgramRecord], elsewhere: Collection[str] = ()
) -> dict[str, int]:
  """Returns {program: bytes that a device holds besides the program's arguments}.

  Args:
    records: {name: program} of a job, all of them.
    elsewhere: names of programs whose arguments lie in host memory between their runs,
      or are freed.
  """
  forms = [form for one in records.values() for form in (one, *one.others)]
  made = {id(x) for form in forms for x in programs.shapes_in(form.result)}
  taken = {
    name: {
      id(x): shard_bytes(x) for x in programs.shapes_in(one.args) if id(x) not in made
    }
    for name, one in records.items()
  }
  held: dict[int, int] = {}
  for name, leaves in taken.items():
    held |= {} if name in elsewhere else leaves
  return {
    name: sum(size for leaf, size in held.items() if leaf not in leaves)
    for name, leaves in taken.items()
  }


def is_on(record: ProgramRecord, mesh: Mesh | None) -> bool:
  """Returns True if a program runs on the devices of a mesh, and on no others."""
  if mesh is None:
    return False
  leaves = programs.shapes_in((*record.args, record.result))
  device_sets = [x.sharding.device_set for x in leaves if x.sharding is not None]
  return bool(device_sets) and set.union(*device_sets) == set(mesh.devices.flat)


def gib(size: float) -> str:
  """Returns bytes as text, in GiB or in MiB."""
  return (
    f"{size / 2**30:,.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:,.1f} MiB"
  )


def shard_bytes(x: jax.ShapeDtypeStruct) -> int:
  """Returns bytes of an array's shard on one device; 0 for an array in host memory."""
  if offload.is_on_host(x):
    return 0
  shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
  return math.prod(shape) * jax.dtypes.itemsize_bits(x.dtype) // 8
