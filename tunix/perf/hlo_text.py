"""Reader of HLO text: operations, computations, and how often each of them runs.

Two kinds of text are read: that of a lowered program (`lowered.as_text("hlo")`, names
without a percent sign, no bodies fused) and that of a compiled one
(`compiled.as_text()`, scheduled, fused, with the compiler's notes on loops).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

ENTRY = ""  # name of the computation that a program starts with
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)

# "%body.1 (p: f32[8]) -> f32[8] {" when compiled, "body.1 {" when lowered.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .* )?\{$")
_OPERATION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_OPERANDS = re.compile(r"%?([\w.-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")  # "/*index=5*/" in long lists
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_BITS = re.compile(r"\D(\d+)")
# The memory space of a layout: 0 is the device's main memory and is not written.
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")

_WHILE = re.compile(r"condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = re.compile(
  r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_FUSED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONSTANT = re.compile(r" constant\((-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of an operation's result.

  Attributes:
    dtype: name of the element type, such as "bf16".
    sizes: size of each dimension.
    layout: layout as it is written, or "".
  """

  dtype: str
  sizes: tuple[int, ...]
  layout: str

  @property
  def bytes(self) -> int:
    """Bytes of the array, without padding."""
    bits = _BITS.search(self.dtype)  # of f32, bf16, s8; a pred takes a byte
    return math.prod(self.sizes) * (int(bits[1]) if bits else 8) // 8

  @property
  def bytes_in_memory(self) -> int:
    """Bytes of the array; 0 if it lies in a memory on the chip."""
    return 0 if _ON_CHIP.search(self.layout) else self.bytes

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """One operation of a computation.

  Attributes:
    name: name of its result, such as "fusion.7".
    opcode: kind of operation, such as "fusion".
    shape: shape of the result as it is written, with layouts.
    operands: names of the operands.
    text: the whole operation. A kernel's metadata makes it several lines long.
    is_root: True if its result is the result of the computation.
  """

  name: str
  opcode: str
  shape: str
  operands: tuple[str, ...]
  text: str
  is_root: bool

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """Arrays of the result; several if it is a tuple."""
    return tuple(
      Array(dtype, tuple(int(size) for size in sizes.split(",") if size), layout)
      for dtype, sizes, layout in _ARRAY.findall(self.shape)
    )

  @property
  def sizes(self) -> tuple[int, ...]:
    """Sizes of the first array of the result."""
    return self.arrays[0].sizes

  @functools.cached_property
  def bytes(self) -> int:
    """Bytes of the result."""
    return sum(array.bytes for array in self.arrays)

  @functools.cached_property
  def bytes_in_memory(self) -> int:
    """Bytes of the result, without arrays that lie in a memory on the chip."""
    return sum(array.bytes_in_memory for array in self.arrays)

  @functools.cached_property
  def index(self) -> int | None:
    """The index of a get-tuple-element; None for other operations."""
    match = _INDEX.search(self.text) if self.opcode == "get-tuple-element" else None
    return int(match[1]) if match else None

  @property
  def parameter(self) -> int | None:
    """The number of a parameter; None for other operations."""
    if self.opcode != "parameter":
      return None
    return int(self.text.partition(" parameter(")[2].partition(")")[0])

  @functools.cached_property
  def fused(self) -> str | None:
    """The computation of a fusion; None for other operations."""
    match = _FUSED.search(self.text) if self.opcode == "fusion" else None
    return match[1] if match else None

  @property
  def is_split(self) -> bool:
    """True if it begins in one place and ends in another: others run meanwhile."""
    return self.opcode.endswith(("-start", "-update", "-done"))

  @property
  def is_collective(self) -> bool:
    """True for a collective, and for the start or end of one."""
    return self.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES

  @functools.cached_property
  def callees(self) -> list[str]:
    """Computations that the operation runs or applies, without a loop's condition."""
    if (loop := _WHILE.search(self.text)) is not None:
      return [loop[2]]
    callees = _CALLS.findall(self.text)
    for branches in _BRANCHES.findall(self.text):
      callees += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return callees


class Program:
  """The computations of a program.

  Args:
    text: HLO text, lowered or compiled.
    is_compiled: the text is a compiled program's. A loop whose counter is hidden in a
      fusion is taken to count from 0 by 1 then, as JAX's loops do.

  Attributes:
    computations: {name: {name of an operation: operation}}; the entry is `ENTRY`.
  """

  def __init__(self, text: str, *, is_compiled: bool):
    self._is_compiled = is_compiled
    self.computations = {
      name: {one.name: one for one in map(_operation, texts) if one is not None}
      for name, texts in _computations(text).items()
    }

  def runs(self) -> Iterator[tuple[str, int]]:
    """Yields (computation, times that it runs), callers before their callees.

    A computation that is called from several places comes once for each number of
    times. A loop of unknown length counts as one pass.
    """
    waiting, done = [(ENTRY, 1)], set()
    while waiting:
      name, times = waiting.pop()
      if (name, times) in done or name not in self.computations:
        continue
      done.add((name, times))
      yield name, times
      for one in self.computations[name].values():
        if callees := one.callees:
          often = self.passes(name, one)
          waiting += [(callee, times * often) for callee in callees]

  def passes(self, computation: str, operation: Operation) -> int:
    """Returns how often an operation runs its callees: trips of a loop, else 1."""
    trips = self.trip_count(computation, operation)
    return 1 if trips is None else trips

  def trip_count(self, computation: str, loop: Operation) -> int | None:
    """Returns how often the body of a `while` runs; None: not known.

    The compiler's note is used if there is one. Otherwise the loop must have the form
    `i = first; while i < last: i += step`, to which `lax.scan` and `lax.fori_loop` are
    lowered. `i` is one element of the tuple that the loop carries.

    Args:
      computation: name of the computation that contains the loop.
      loop: the operation; None is returned for any but a `while`.
    """
    if (known := _TRIPS.search(loop.text)) is not None:
      return int(known[1])
    if (names := _WHILE.search(loop.text)) is None:
      return None
    condition = self.computations.get(names[1], {})
    body = self.computations.get(names[2], {})
    outside = self.computations[computation]
    start = outside.get(loop.operands[0])
    compare = _root(condition)
    if compare is None or compare.opcode != "compare":
      return None
    if "direction=LT" not in compare.text:
      return None

    def constant(operation: Operation | None) -> int | None:
      """A constant, or an element that carries a constant into the loop."""
      if operation is not None and operation.index is not None:
        operation = _element(start, operation.index, outside)
      match = operation and _CONSTANT.search(operation.text)
      return int(match[1]) if match else None

    first = step = None
    counter = condition.get(compare.operands[0])
    if counter is not None and (index := counter.index) is not None:
      first = constant(counter)
      advanced = _element(_root(body), index, body)
      if advanced is not None and advanced.opcode == "add":
        before, increment = map(body.get, advanced.operands)
        if before is not None and before.index == index:
          step = constant(increment)
    last = constant(condition.get(compare.operands[1]))
    if self._is_compiled:
      first, step = first or 0, step or 1
    if first is None or last is None or step is None or step < 1:
      return None
    return max(0, -(-(last - first) // step))


def _root(computation: dict[str, Operation]) -> Operation | None:
  return next((one for one in computation.values() if one.is_root), None)


def _element(
  result: Operation | None, index: int, computation: dict[str, Operation]
) -> Operation | None:
  """Returns the operation behind one element of a tuple; None: not known."""
  if result is None or result.opcode != "tuple":
    return None
  return computation.get(result.operands[index])


def _operation(text: str) -> Operation | None:
  head = _OPERATION.match(text)
  if head is None:
    return None
  operands = _COMMENT.sub("", text[head.end() :].split(")", 1)[0])
  return Operation(
    name=head[2],
    opcode=head[4],
    shape=head[3],
    operands=tuple(_OPERANDS.findall(operands)),
    text=text,
    is_root=head[1] is not None,
  )


def _computations(text: str) -> dict[str, list[str]]:
  """Returns {name: texts of the operations}."""
  out: dict[str, list[str]] = {}
  texts: list[str] | None = None
  for line in text.splitlines():
    header = _COMPUTATION.match(line)
    # Within a computation a kernel's metadata may have a line like a short header.
    if header is not None and (texts is None or ") -> " in line):
      texts = out.setdefault(ENTRY if header[1] else header[2], [])
    elif line.rstrip() == "}":  # a kernel's metadata may end in a line "}}, ..."
      texts = None
    elif texts is not None:
      if _OPERATION.match(line) or not texts:
        texts.append(line)
      else:
        texts[-1] += "\n" + line
  return out
