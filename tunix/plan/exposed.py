"""Bytes that a compiled program moves while no product is computed.

A TPU's core runs one operation after the other, in the order of the text: an
operation without a product takes at least its memory traffic, and the products wait.
What was copied ahead beside other work (copy-start) lies on the chip, `S(1)`, and is
no traffic of the operation that reads it.
"""

from __future__ import annotations

import functools
import math

from tunix.plan import hlo_text

_PRODUCTS = ("convolution", "dot")
# Views, what runs beside others, and what has its own account: collectives, kernels.
_NO_TRAFFIC = frozenset(
  (
    *("after-all", "bitcast", "constant", "custom-call", "get-tuple-element", "iota"),
    *("parameter", "partition-id", "replica-id", "tuple"),
  )
)
_CALLS = ("call", "conditional", "while")
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_SAME = frozenset(("bitcast", "copy", "reshape", "transpose"))


def read(text: str) -> float:
  """Bytes of device memory that operations without a product read and write at the
  least, loops counted as often as they run.

  Args:
    text: `compiled.as_text()` of a TPU's program.
  """
  return _Program(text).traffic("")


class _Program:
  """The computations of a text, parsed when they are asked for."""

  def __init__(self, text: str):
    self._lines = hlo_text.computations(text)
    self.operations = functools.cache(self._operations)
    self.has_product = functools.cache(self._has_product)
    self.traffic = functools.cache(self._traffic)

  def _operations(self, name: str) -> dict[str, hlo_text.Operation]:
    found = map(hlo_text.operation, self._lines.get(name, ()))
    return {one.name: one for one in found if one is not None}

  def _traffic(self, name: str) -> float:
    """Bytes of one run of a computation, and of what it calls: of the branches of a
    choice the cheapest."""
    known = self.operations(name)
    total = math.fsum(self._of(one, known) for one in known.values())
    for line in self._lines.get(name, ()):
      one = hlo_text.operation(line)
      if one is not None and one.opcode in _CALLS:
        callees, often = hlo_text.called(line, self._lines)
        total += often * min(map(self.traffic, callees), default=0.0)
    return total

  def _of(self, one: hlo_text.Operation, known: dict[str, hlo_text.Operation]) -> float:
    """Bytes of one operation, without those of computations that it runs."""
    if one.opcode in _NO_TRAFFIC or one.opcode in _CALLS:
      return 0.0
    if one.is_collective or one.is_split:
      return 0.0
    if one.opcode in _PRODUCTS or (one.callee and self.has_product(one.callee)):
      return 0.0
    return self._written(one, known) + math.fsum(
      self._read(one, index, known)
      for index, operand in enumerate(one.operands)
      if operand in known and known[operand].bytes_in_memory
    )

  def _has_product(self, name: str) -> bool:
    return any(
      one.opcode in _PRODUCTS
      or (one.callee is not None and self.has_product(one.callee))
      for one in self.operations(name).values()
    )

  def _written(
    self, one: hlo_text.Operation, known: dict[str, hlo_text.Operation]
  ) -> float:
    """Of an update in place only what is new."""
    if not one.bytes_in_memory:
      return 0.0
    inside = self.operations(one.callee) if one.callee else {one.name: one}
    updates = [x for x in inside.values() if x.opcode == "dynamic-update-slice"]
    if not updates:
      return one.bytes_in_memory
    values = inside if one.callee else known
    return sum(values[x.operands[1]].bytes for x in updates if x.operands[1] in values)

  def _read(
    self,
    one: hlo_text.Operation,
    index: int,
    known: dict[str, hlo_text.Operation],
  ) -> float:
    """Of one operand: all of it, or the slices that are taken of it."""
    whole = known[one.operands[index]].bytes
    if one.callee is not None:
      inside = self.operations(one.callee)
      parameter = next((x for x in inside.values() if x.parameter == index), None)
      return (
        0.0 if parameter is None else min(whole, self._uses(parameter.name, inside))
      )
    if one.opcode in _SLICES:
      return min(whole, one.bytes) if index == 0 else whole
    if one.opcode == "dynamic-update-slice" and index == 0:
      return 0.0
    return whole

  def _uses(self, name: str, inside: dict[str, hlo_text.Operation]) -> float:
    """Bytes that a fusion reads of what is called `name` in it."""
    total = 0.0
    for one in inside.values():
      for index, operand in enumerate(one.operands):
        if operand != name:
          continue
        if one.opcode in _SAME:
          total += self._uses(one.name, inside)
        else:
          total += self._read(one, index, inside)
    return total
