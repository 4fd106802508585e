"""What the devices of a compiled program send each other.

Read off the text of the optimised HLO: each collective with the bytes of its result,
times as often as the loops around it run. The TPU compiler cuts a collective that runs
beside other work into pieces (start, under way, done), which all carry its channel:
they count once. Its reduce-scatters are an all-reduce and a slice in one computation.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_COLLECTIVE = re.compile(
  rf"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ({'|'.join(KINDS)})(?:-start)?\("
)
_WHILE = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_MESH_GROUP = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_BITS = re.compile(r"\D(\d+)")


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
  """

  kind: str
  shape: str
  bytes: int
  group: int
  count: int

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
  computations = _computations(text)
  seen: set[str] = set()
  out = []
  for name, times in _runs(computations):
    for line in computations[name]:
      found = _COLLECTIVE.match(line)
      if found is None:
        continue
      channel = _CHANNEL.search(line)
      if channel is not None:
        if channel[1] in seen:
          continue
        seen.add(channel[1])
      shape = _result(found[1], is_start="-start(" in line)
      size = sum(_bytes(*array) for array in _ARRAY.findall(shape))
      kind, group = found[2], _group(line, devices)
      if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
        kind, size = "reduce-scatter", size // group
      out.append(
        Collective(kind=kind, shape=shape, bytes=size, group=group, count=times)
      )
  return out


def counts(collectives: Sequence[Collective]) -> dict[str, int]:
  """{kind: how many a run of the program does}, without kinds that it lacks."""
  out: collections.Counter[str] = collections.Counter()
  for one in collectives:
    out[one.kind] += one.count
  return {kind: out[kind] for kind in KINDS if out[kind]}


def _computations(text: str) -> dict[str, list[str]]:
  """{name: lines}; the entry computation is named ""."""
  out: dict[str, list[str]] = {}
  lines: list[str] | None = None
  for line in text.splitlines():
    header = _COMPUTATION.match(line)
    if header is not None:
      lines = out.setdefault("" if header[1] else header[2], [])
    elif line.rstrip() == "}":  # what is told of a kernel may have lines "}}, ..."
      lines = None
    elif lines is not None:
      lines.append(line)
  return out


def _runs(computations: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
  """(computation, times that it runs), callers before what they call. A computation
  that is called from several places comes once for each number of times."""
  waiting, done = [("", 1)], set()
  while waiting:
    name, times = waiting.pop()
    if (name, times) in done or name not in computations:
      continue
    done.add((name, times))
    yield name, times
    for line in computations[name]:
      if (loop := _WHILE.search(line)) is not None:
        inside = times * _trips(line, computations.get(loop[1], []))
        waiting.append((loop[2], inside))
      else:
        callees = _CALLS.findall(line)
        for branches in _BRANCHES.findall(line):
          callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
        waiting += [(callee, times) for callee in callees]


def _trips(line: str, condition: list[str]) -> int:
  """How often a loop runs: as the compiler notes, or up to the constant that its
  condition compares a counter with (JAX's loops count from 0); else once."""
  if (known := _TRIPS.search(line)) is not None:
    return int(known[1])
  root = next((x for x in condition if x.lstrip().startswith("ROOT ")), "")
  if " compare(" not in root or "direction=LT" not in root:
    return 1
  limits = [
    int(value[1]) for x in condition if (value := re.search(r" constant\((\d+)\)", x))
  ]
  return limits[0] if len(limits) == 1 else 1


def _result(shape: str, *, is_start: bool) -> str:
  """The shape of what comes out: a start gives (operands, results, state)."""
  arrays = [f"{kind}[{sizes}]" for kind, sizes in _ARRAY.findall(shape)]
  if not is_start:
    return ", ".join(arrays)
  whole = [x for x in arrays if not x.endswith("[]")]
  return ", ".join(whole[len(whole) // 2 :])


def _bytes(kind: str, sizes: str) -> int:
  bits = _BITS.search(kind)  # of f32, bf16, s8; pred is a byte
  width = int(bits[1]) if bits else 8
  return math.prod(int(size) for size in sizes.split(",") if size) * width // 8


def _group(line: str, devices: int) -> int:
  """Devices that take part together: of `[groups,size]<=[..]`, `{{0,1},{2,3}}`, or
  `mesh['a'=2,'b'=4] {'b'}`."""
  if (named := _MESH_GROUP.search(line)) is not None:
    sizes = {axis: int(size) for axis, size in _MESH_AXIS.findall(named[1])}
    return math.prod(sizes[axis] for axis in re.findall(r"'([^']+)'", named[2]))
  if (tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]", line)) is not None:
    return int(tiled[2])
  if (listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line)) is not None:
    return len(listed[1].split(","))
  if "source_target_pairs=" in line:
    return 2
  return devices
