"""Bytes that a compiled program moves while no product is computed.

A TPU core runs one operation after the other, in the order of the text. An operation
without a product takes at least the time of its memory traffic, and products wait for
it. An array that was copied ahead beside other work (copy-start) lies in the memory on
the chip, `S(1)`, and is no traffic of the operation that reads it.
"""

from __future__ import annotations

import functools
import math

from tunix.perf.hlo_text import ENTRY, Operation, Program

_PRODUCTS = ("convolution", "dot")
# Views, which move nothing, and operations with an account of their own: kernels.
_NO_TRAFFIC = frozenset(
  (
    *("after-all", "bitcast", "constant", "custom-call", "get-tuple-element", "iota"),
    *("parameter", "partition-id", "replica-id", "tuple"),
  )
)
_CALLS = ("call", "conditional", "while")
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_VIEWS = frozenset(("bitcast", "get-tuple-element", "reshape"))
# A fusion that only views or copies a parameter reads what its next operation takes.
_SAME = frozenset(("bitcast", "copy", "reshape", "transpose"))

_Operations = dict[str, Operation]


def read(program: Program) -> float:
  """Returns bytes of device memory that operations without a product must move.

  Bytes read and bytes written count, and loops count as often as they run. It is a
  lower bound: what an operation reads twice counts once.

  Args:
    program: a program compiled for TPUs.
  """
  return _Traffic(program).of_computation(ENTRY)


class _Traffic:
  """Traffic of computations; each is counted once."""

  def __init__(self, program: Program):
    self._program = program
    self.has_product = functools.cache(self._has_product)
    self.has_collective = functools.cache(self._has_collective)
    self.of_computation = functools.cache(self._of_computation)

  def _of_computation(self, name: str) -> float:
    """Returns bytes of one run, with callees; of a choice the cheapest branch."""
    operations = self._program.computations.get(name, {})
    total = math.fsum(
      self._of_operation(one, operations) for one in operations.values()
    )
    for one in operations.values():
      if one.opcode in _CALLS:
        cheapest = min(map(self.of_computation, one.callees), default=0.0)
        total += self._program.passes(name, one) * cheapest
    return total

  def _of_operation(self, one: Operation, beside: _Operations) -> float:
    """Returns bytes of one operation, without computations that it runs."""
    if one.opcode in _NO_TRAFFIC or one.opcode in _CALLS:
      return 0.0
    if one.is_collective or one.is_split:
      return 0.0
    if one.opcode in _PRODUCTS or (one.fused and self.has_product(one.fused)):
      return 0.0
    return self._written(one, beside) + math.fsum(
      self._read(one, index, beside)
      for index, operand in enumerate(one.operands)
      if operand in beside and beside[operand].bytes_in_memory
    )

  def _inside(self, name: str) -> _Operations:
    return self._program.computations.get(name, {})

  def _has_product(self, name: str) -> bool:
    return any(
      one.opcode in _PRODUCTS or (one.fused is not None and self.has_product(one.fused))
      for one in self._inside(name).values()
    )

  def _has_collective(self, name: str) -> bool:
    return any(
      one.is_collective or (one.fused is not None and self.has_collective(one.fused))
      for one in self._inside(name).values()
    )

  def _written(self, one: Operation, beside: _Operations) -> float:
    """Returns bytes of the result; of an update in place only the new part."""
    if not one.bytes_in_memory:
      return 0.0
    if one.fused and self.has_collective(one.fused):
      return self._beside_collective(one)
    inside = self._inside(one.fused) if one.fused else {one.name: one}
    updates = [x for x in inside.values() if x.opcode == "dynamic-update-slice"]
    if not updates:
      return one.bytes_in_memory
    values = inside if one.fused else beside
    return sum(values[x.operands[1]].bytes for x in updates if x.operands[1] in values)

  def _beside_collective(self, one: Operation) -> float:
    """Returns bytes that a fusion writes beside a collective that it drives on.

    The arrays of the collective are results of each such fusion, also in a loop that
    runs while the collective does. Links write them, and once only.
    """
    root, inside = self._root(one)
    names = root.operands if root.opcode == "tuple" else (root.name,) * len(one.arrays)
    if len(names) != len(one.arrays):  # tuples of tuples, of which nothing is known
      return 0.0
    total = 0.0
    for index, (name, array) in enumerate(zip(names, one.arrays)):
      source, beside = self._source(name, index, inside)
      if source.opcode == "dynamic-update-slice":
        new = beside.get(source.operands[1])
        total += min(array.bytes_in_memory, new.bytes if new else 0)
      elif not (source.is_collective or source.opcode in _NO_TRAFFIC):
        total += array.bytes_in_memory
    return total

  def _source(
    self, name: str, index: int, beside: _Operations
  ) -> tuple[Operation, _Operations]:
    """Returns what computes an array of a result, and the operations beside it.

    Args:
      name: operation whose result is looked at, which may be a view.
      index: number of the array in this result.
      beside: the operations beside it.
    """
    one = beside[name]
    if one.opcode in _VIEWS:
      return self._source(one.operands[0], one.index or 0, beside)
    if one.fused is None or not self.has_collective(one.fused):
      return one, beside
    root, inside = self._root(one)
    name = root.operands[index] if root.opcode == "tuple" else root.name
    return self._source(name, index, inside)

  def _root(self, fusion: Operation) -> tuple[Operation, _Operations]:
    """Returns the operation of a fusion's result, and all of its operations."""
    inside = self._inside(fusion.fused or "")
    return next(x for x in inside.values() if x.is_root), inside

  def _read(self, one: Operation, index: int, beside: _Operations) -> float:
    """Returns bytes read of one operand: all of it, or the slices that are taken."""
    whole = beside[one.operands[index]].bytes
    if one.fused is not None:
      inside = self._inside(one.fused)
      parameter = next((x for x in inside.values() if x.parameter == index), None)
      return (
        0.0 if parameter is None else min(whole, self._uses(parameter.name, inside))
      )
    if one.opcode in _SLICES:
      return min(whole, one.bytes) if index == 0 else whole
    # An update in place does not read the array that it updates.
    if one.opcode == "dynamic-update-slice" and index == 0:
      return 0.0
    return whole

  def _uses(self, name: str, inside: _Operations) -> float:
    """Returns bytes that a fusion reads of the value `name` inside it."""
    total = 0.0
    for one in inside.values():
      for index, operand in enumerate(one.operands):
        if operand != name:
          continue
        if one.opcode in _SAME:
          total += self._uses(one.name, inside)
        elif not (one.is_collective or one.opcode in _NO_TRAFFIC):
          total += self._read(one, index, inside)
    return total
