"""What the devices of a compiled program send each other.

Read off the text of the optimised HLO: each collective with the bytes of its result,
times as often as the loops around it run. The TPU compiler cuts a collective that runs
beside other work into pieces (start, under way, done), which all carry its channel and
its origin: they count once. A channel alone says too little, `shard_map` gives many the
same. The compiler's reduce-scatters are an all-reduce and a slice in one computation.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

from tunix.plan import hlo_text

KINDS = hlo_text.COLLECTIVES
_COLLECTIVE = re.compile(
  rf"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ({'|'.join(KINDS)})(?:-start)?\("
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_MESH_GROUP = re.compile(r"replica_groups=@?mesh\[([^{]*)\{([^}]*)\}")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")  # the part of an axis, too
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective operation of a program.

  Attributes:
    kind: one of KINDS.
    shape: of its arrays, such as "bf16[4096,1024]".
    bytes: of what a device has at its end.
    group: devices that take part in it together.
    count: how often a run of the program does it; loops whose length depends on data
      count as one pass.
    waits: nothing else runs meanwhile: it is not begun in one place and ended in
      another, nor part of an operation that computes.
  """

  kind: str
  shape: str
  bytes: int
  group: int
  count: int
  waits: bool = False

  @property
  def received(self) -> float:
    """Bytes that a device must receive in all, however it is done: of a gather what it
    lacks, of a reduction as much for the sums, and again for handing them out."""
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


def read(text: str, devices: int) -> list[Collective]:
  """The collectives of a program.

  Args:
    text: `compiled.as_text()`.
    devices: of the whole program; a group that is not written down has them all.
  """
  computations = hlo_text.computations(text)
  fused = set(hlo_text.FUSED.findall(text))
  out: dict[str, Collective] = {}  # by channel and origin; without one each is its own
  for name, times in hlo_text.runs(computations):
    for number, line in enumerate(computations[name]):
      found = _COLLECTIVE.match(line)
      if found is None:
        continue
      is_start, sums = "-start(" in line, name.startswith("all-reduce-scatter")
      waits = not is_start and (name not in fused or sums)
      channel = _CHANNEL.search(line)
      key = f"{name}, {times}, {number}"
      if channel is not None:
        origin = _ORIGIN.search(line)
        key = f"{channel[1]} {origin[1] if origin else ''}"
      if key in out:
        out[key] = dataclasses.replace(out[key], waits=out[key].waits and waits)
        continue
      shape = _result(found[1], is_start=is_start)
      size = sum(hlo_text.array_bytes(*array) for array in _ARRAY.findall(shape))
      kind, group = found[2], _group(line, devices)
      if kind == "all-reduce" and sums:
        kind, size = "reduce-scatter", size // group
      out[key] = Collective(
        kind=kind, shape=shape, bytes=size, group=group, count=times, waits=waits
      )
  return list(out.values())


def counts(collectives: Sequence[Collective]) -> dict[str, int]:
  """{kind: how many a run of the program does}, without kinds that it lacks."""
  out: collections.Counter[str] = collections.Counter()
  for one in collectives:
    out[one.kind] += one.count
  return {kind: out[kind] for kind in KINDS if out[kind]}


def _result(shape: str, *, is_start: bool) -> str:
  """The shape of what comes out: a start gives (operands, results, state)."""
  arrays = [f"{kind}[{sizes}]" for kind, sizes in _ARRAY.findall(shape)]
  if not is_start:
    return ", ".join(arrays)
  whole = [x for x in arrays if not x.endswith("[]")]
  return ", ".join(whole[len(whole) // 2 :])


def _group(line: str, devices: int) -> int:
  """Devices that take part together: of `[groups,size]<=[..]`, `{{0,1},{2,3}}`, or
  `mesh['a'=2,'b'=4] {'b'}`."""
  if (named := _MESH_GROUP.search(line)) is not None:
    sizes = dict(_MESH_AXIS.findall(named[1]))
    axes = _GROUP_AXIS.findall(named[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  if (tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]", line)) is not None:
    return int(tiled[2])
  if (listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line)) is not None:
    return len(listed[1].split(","))
  if "source_target_pairs=" in line:
    return 2
  return devices
