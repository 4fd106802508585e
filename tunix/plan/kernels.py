"""Kernels that a compiled program for GPUs launches.

A launch takes a few microseconds, which decide the time of a decode round of a small
model. At a branch, and after each pass of a loop, XLA's runtime waits for the GPU and
reads on the host which way to go, unless a flag puts them into CUDA graphs.
"""

from __future__ import annotations

import dataclasses

from tunix.perf import hlo_text
from tunix.perf.hlo_text import Operation, Program

# Operations that launch nothing: names, parts and other views of arrays.
_FREE = {
  *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
  *("opt-barrier", "partition-id", "replica-id"),
}


@dataclasses.dataclass(frozen=True)
class Launches:
  """Counts of what one run of a program launches.

  Attributes:
    kernels: kernels, library calls, copies and collectives. A loop of unknown length
      counts as one pass, and a branch as the most that one of its ways launches.
    branches: branches that it passes.
  """

  kernels: int = 0
  branches: int = 0

  def __add__(self, other: Launches) -> Launches:
    return Launches(self.kernels + other.kernels, self.branches + other.branches)


def count(program: Program, computation: str = hlo_text.ENTRY) -> Launches:
  """Returns what one run of a computation launches."""
  total = Launches()
  for one in program.computations.get(computation, {}).values():
    total += _of(program, computation, one)
  return total


def _of(program: Program, computation: str, one: Operation) -> Launches:
  if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
    return Launches()
  if one.opcode == "conditional":
    ways = [count(program, x) for x in one.callees]
    kernels = max((x.kernels for x in ways), default=0)
    return Launches(kernels, 1 + max((x.branches for x in ways), default=0))
  if one.opcode in ("while", "call"):
    passed = [count(program, x) for x in one.callees]
    times = program.passes(computation, one)
    return Launches(
      times * sum(x.kernels for x in passed), times * sum(x.branches for x in passed)
    )
  return Launches(kernels=1)
