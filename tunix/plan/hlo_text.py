"""The text of a compiled program: its computations, and how often each runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_WHILE = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
# Computations that are part of an operation, and no step of the program by themselves.
FUSED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_OPERANDS = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_BITS = re.compile(r"\D(\d+)")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """One line of a computation.

  Attributes:
    name, opcode: such as "fusion.7" and "fusion".
    shape: of the result as it is written, layouts and memory spaces with it.
    operands: names.
    callee: the computation of a fusion; None: it has none.
    parameter: the number of a parameter; None: it is none.
  """

  name: str
  opcode: str
  shape: str
  operands: tuple[str, ...]
  callee: str | None
  parameter: int | None

  @functools.cached_property
  def bytes(self) -> int:
    return sum(size for size, _ in _arrays(self.shape))

  @functools.cached_property
  def bytes_in_memory(self) -> int:
    """Without what lies in a memory on the chip."""
    return sum(size for size, on_chip in _arrays(self.shape) if not on_chip)

  @property
  def is_split(self) -> bool:
    """Begun in one place and ended in another, so that others run meanwhile."""
    return self.opcode.endswith(("-start", "-update", "-done"))

  @property
  def is_collective(self) -> bool:
    return self.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def operation(line: str) -> Operation | None:
  """What a line of a computation says; None: it says nothing of the kind."""
  head = _OPERATION.match(line)
  if head is None:
    return None
  inner = line[head.end() :].split(")", 1)[0]
  callee = FUSED.search(line) if head[3] == "fusion" else None
  return Operation(
    name=head[1],
    opcode=head[3],
    shape=head[2],
    operands=tuple(_OPERANDS.findall(inner)),
    callee=callee[1] if callee else None,
    parameter=int(inner) if head[3] == "parameter" else None,
  )


def array_bytes(kind: str, sizes: str) -> int:
  """Bytes of `bf16[8,128]`, its type and its sizes apart."""
  bits = _BITS.search(kind)  # of f32, bf16, s8; pred is a byte
  width = int(bits[1]) if bits else 8
  return math.prod(int(size) for size in sizes.split(",") if size) * width // 8


def _arrays(shape: str) -> Iterator[tuple[int, bool]]:
  """(bytes, whether on the chip) of each array of a result."""
  for kind, sizes, layout in _ARRAY.findall(shape):
    yield array_bytes(kind, sizes), _ON_CHIP.search(layout) is not None


def computations(text: str) -> dict[str, list[str]]:
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


def runs(computations: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
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
      callees, often = called(line, computations)
      waiting += [(callee, times * often) for callee in callees]


def called(line: str, computations: dict[str, list[str]]) -> tuple[list[str], int]:
  """(computations that a line calls, how often): the body of a loop, all branches of a
  choice, what a fusion or a reduction is made of."""
  if (loop := _WHILE.search(line)) is not None:
    return [loop[2]], _trips(line, computations.get(loop[1], []))
  callees = _CALLS.findall(line)
  for branches in _BRANCHES.findall(line):
    callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
  return callees, 1


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
