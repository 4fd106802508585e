"""What stays in a device's memory while a program of the run works on something else.

The compiler's plan of a program knows its own arguments. The optimizer's state stays
where it is while completions are sampled, and so does a reference while the policy
learns: whatever another program of the job is given, and no program has made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import jax

from tunix.perf import programs
from tunix.perf.programs import Noted
from tunix.sft import offload


def beside(
  noted: Mapping[str, Noted], elsewhere: Collection[str] = ()
) -> dict[str, int]:
  """{program: bytes of a device that the run holds besides its arguments}.

  Args:
    noted: all programs of a job.
    elsewhere: programs whose arguments are kept in host memory between their runs.
  """
  made = {id(x) for one in noted.values() for x in programs.shapes_in(one.result)}
  taken = {
    name: {
      id(x): shard_bytes(x) for x in programs.shapes_in(one.args) if id(x) not in made
    }
    for name, one in noted.items()
  }
  held: dict[int, int] = {}
  for name, leaves in taken.items():
    held |= {} if name in elsewhere else leaves
  return {
    name: sum(size for leaf, size in held.items() if leaf not in leaves)
    for name, leaves in taken.items()
  }


def shard_bytes(x: jax.ShapeDtypeStruct) -> int:
  """Of a device; what lies in its host's memory takes nothing of it."""
  if offload.is_on_host(x):
    return 0
  shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
  return math.prod(shape) * jax.dtypes.itemsize_bits(x.dtype) // 8
