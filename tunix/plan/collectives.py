"""Collectives of a compiled program: what its devices send each other.

Read off the text of the optimized HLO: each collective with the bytes of its result,
counted as often as the loops around it run.

Two habits of the TPU compiler need care. It cuts a collective that runs beside other
work into pieces (start, update, done). The pieces share a channel and an origin, and
count once; the channel alone is not enough, because `shard_map` gives many collectives
the same one. And it writes a reduce-scatter as a computation of an all-reduce and a
slice.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

from tunix.perf.hlo_text import COLLECTIVES, Operation, Program

KINDS = COLLECTIVES
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_MESH_GROUP = re.compile(r"replica_groups=@?mesh\[([^{]*)\{([^}]*)\}")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")  # the part of an axis, too
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TILED_GROUP = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective operation of a program.

  Attributes:
    kind: one of KINDS.
    shape: shape of its arrays, such as "bf16[4096,1024]".
    bytes: bytes of its result on one device.
    group: devices that take part in it together.
    count: how often one run of the program executes it; a loop whose length depends on
      data counts as one pass.
    waits: True if nothing else runs meanwhile: it is not begun in one place and ended
      in another, nor part of an operation that computes.
  """

  kind: str
  shape: str
  bytes: int
  group: int
  count: int
  waits: bool = False

  @property
  def received(self) -> float:
    """Bytes that a device must receive in all, whatever the algorithm.

    A gather must bring the parts that the device lacks. An all-reduce must bring as
    much for the sums, and as much again to hand the sums out.
    """
    others = (self.group - 1) / self.group if self.group else 0.0
    match self.kind:
      case "all-reduce":
        share = 2 * others
      case "reduce-scatter":  # the result is one part of `group`
        share = self.group - 1.0
      case "collective-permute":
        share = 1.0
      case _:
        share = others
    return self.bytes * share * self.count


def read(program: Program, devices: int) -> list[Collective]:
  """Returns the collectives of a compiled program.

  Args:
    program: the program.
    devices: devices of the whole program. A collective whose group is not written down
      runs on all of them.
  """
  fused = {
    callee
    for operations in program.computations.values()
    for one in operations.values()
    if one.opcode not in ("while", "conditional")
    for callee in one.callees
  }
  # Pieces of one collective share a key: channel and origin. Without a channel each
  # operation is a collective of its own.
  out: dict[str, Collective] = {}
  for name, times in program.runs():
    for one in program.computations[name].values():
      kind = one.opcode.removesuffix("-start")
      if kind not in KINDS:
        continue
      is_start, is_scatter = kind != one.opcode, name.startswith("all-reduce-scatter")
      waits = not is_start and (name not in fused or is_scatter)
      key = f"{name}, {times}, {one.name}"
      if (channel := _CHANNEL.search(one.text)) is not None:
        origin = _ORIGIN.search(one.text)
        key = f"{channel[1]} {origin[1] if origin else ''}"
      if key in out:
        out[key] = dataclasses.replace(out[key], waits=out[key].waits and waits)
        continue
      arrays = one.arrays
      # (operands, results, scalars of its state), but an all-reduce has its results.
      if is_start and kind != "all-reduce":
        arrays = [array for array in arrays if array.sizes]
        arrays = arrays[len(arrays) // 2 :]
      size, group = sum(array.bytes for array in arrays), _group(one, devices)
      if kind == "all-reduce" and is_scatter:
        kind, size = "reduce-scatter", size // group
      out[key] = Collective(
        kind=kind,
        shape=", ".join(map(str, arrays)),
        bytes=size,
        group=group,
        count=times,
        waits=waits,
      )
  return list(out.values())


def counts(collectives: Sequence[Collective]) -> dict[str, int]:
  """Returns {kind: executions in one run of the program}, without kinds of none."""
  out: collections.Counter[str] = collections.Counter()
  for one in collectives:
    out[one.kind] += one.count
  return {kind: out[kind] for kind in KINDS if out[kind]}


def _group(one: Operation, devices: int) -> int:
  """Returns the devices of a group, which HLO writes in one of three forms.

  `[groups,size]<=[..]`, `{{0,1},{2,3}}`, or `mesh['a'=2,'b'=4] {'b'}`.
  """
  if (named := _MESH_GROUP.search(one.text)) is not None:
    sizes = dict(_MESH_AXIS.findall(named[1]))
    axes = _GROUP_AXIS.findall(named[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  if (tiled := _TILED_GROUP.search(one.text)) is not None:
    return int(tiled[2])
  if (listed := _LISTED_GROUP.search(one.text)) is not None:
    return len(listed[1].split(","))
  return 2 if "source_target_pairs=" in one.text else devices
