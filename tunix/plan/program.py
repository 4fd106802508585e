"""What one compiled program needs of each device, and how fast it can be at most."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax

from tunix.perf import hlo_flops, hlo_text, programs
from tunix.perf.chips import Chip
from tunix.perf.programs import Noted
from tunix.plan import collectives, exposed, residents
from tunix.plan.collectives import Collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramPlan:
  """One program of a run, for one device unless it says otherwise.

  Attributes:
    name: of the program.
    argument_bytes, output_bytes, temporary_bytes: as the compiler lays them out; of
      outputs what is not written over arguments.
    peak_bytes: most that is alive at once.
    host_bytes: of the host's memory, for each device: what is offloaded to it.
    flops: of all devices together; matrix products, convolutions and splash attention,
      what is computed twice (rematerialised) counted twice.
    moved_bytes: that it writes to its memory or reads from it at the least: arguments
      once and outputs once; of a pass through a loop of unknown length its arguments.
    runs: how often a step runs it, or passes through its loop.
    beside_bytes: that the run holds on a device besides the program's arguments.
    collectives: what devices send each other.
    compute_seconds, memory_seconds, link_seconds: what these take at the rates of the
      chip, each by itself; None: the chip's rates are not known.
    alone_memory_seconds, alone_link_seconds: what they take of it while nothing is
      computed, because the compiler has ordered it so; None: not known, of programs
      that are not a TPU's and of loops of unknown length.
  """

  name: str
  argument_bytes: int
  output_bytes: int
  temporary_bytes: int
  peak_bytes: int
  flops: float
  moved_bytes: float
  collectives: tuple[Collective, ...]
  runs: int = 1
  beside_bytes: int = 0
  host_bytes: int = 0
  compute_seconds: float | None = None
  memory_seconds: float | None = None
  link_seconds: float | None = None
  alone_memory_seconds: float | None = None
  alone_link_seconds: float | None = None

  @property
  def held_bytes(self) -> int:
    """Of a device at the peak, with what the run holds besides."""
    return self.peak_bytes + self.beside_bytes

  @property
  def seconds(self) -> float | None:
    """No run of the program takes less: its slowest part, all else hidden behind it but
    what is known to run alone."""
    if self.compute_seconds is None:
      return None
    in_order = math.fsum(self._in_order().values())
    return max(in_order, self.memory_seconds or 0.0, self.link_seconds or 0.0)

  @property
  def limited_by(self) -> str | None:
    """What takes most of that time: "compute", "memory" or "links"."""
    if self.seconds is None:
      return None
    parts = self._in_order()
    if math.fsum(parts.values()) < self.seconds:
      parts = {"memory": self.memory_seconds, "links": self.link_seconds}
    return max(parts, key=lambda name: parts[name] or 0.0)

  def _in_order(self) -> dict[str, float]:
    """Seconds of what runs one after the other."""
    return {
      "compute": self.compute_seconds or 0.0,
      "memory": self.alone_memory_seconds or 0.0,
      "links": self.alone_link_seconds or 0.0,
    }

  def to_json(self) -> dict[str, Any]:
    """Everything, for `--json`."""
    out = dataclasses.asdict(self)
    out["collectives"] = [
      {**dataclasses.asdict(one), "received_bytes": one.received}
      for one in sorted(self.collectives, key=lambda one: -one.received)
    ]
    derived = ("held_bytes", "seconds", "limited_by")
    return {**out, **{name: getattr(self, name) for name in derived}}


def plan(
  name: str,
  noted: Noted,
  devices: int,
  chip: Chip | None,
  *,
  passes: int | None = None,
  beside_bytes: int = 0,
) -> ProgramPlan:
  """Compiles a program and reads what it needs.

  Args:
    name: of the program.
    noted: for the mesh it is to run on.
    devices: of that mesh.
    chip: each of them; None: not known.
    passes: the program is a loop whose length is not in its text, that many passes
      long: what is read of it is one pass.
    beside_bytes: see ProgramPlan.
  """
  flops = hlo_flops.count_flops(noted.lowered).flops
  try:
    compiled = noted.compiled
  except jax.errors.JaxRuntimeError as error:
    return _too_large(name, noted, flops, beside_bytes, error)
  memory: Any = compiled.memory_analysis()
  text = hlo_text.Program(compiled.as_text() or "", is_compiled=True)
  sent = collectives.read(text, devices)
  received = math.fsum(one.received for one in sent)
  written = memory.output_size_in_bytes
  moved = float(memory.argument_size_in_bytes + (0 if passes else written))
  seconds: dict[str, float | None] = {}
  if chip is not None:
    seconds = {
      "compute_seconds": flops / devices / chip.flops,
      "memory_seconds": _over(moved, chip.memory_rate),
      "link_seconds": _over(received, chip.link_rate),
    }
    if chip.kind.startswith("TPU") and not passes:
      waited = math.fsum(one.received for one in sent if one.waits)
      seconds["alone_memory_seconds"] = _over(exposed.read(text), chip.memory_rate)
      seconds["alone_link_seconds"] = _over(waited, chip.link_rate)
  return ProgramPlan(
    name=name,
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=written - memory.alias_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    peak_bytes=peak_bytes(compiled),
    flops=flops,
    moved_bytes=moved,
    collectives=tuple(sent),
    runs=noted.calls * (passes or 1),
    beside_bytes=beside_bytes,
    host_bytes=memory.host_argument_size_in_bytes
    + memory.host_output_size_in_bytes
    - memory.host_alias_size_in_bytes
    + memory.host_temp_size_in_bytes,
    **seconds,
  )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Most that is alive at once on a device: the compiler's figure. XLA for CPUs gives
  that of arguments and results alone, to which all temporaries are added then; and for
  TPUs it counts what lies in the host's memory too, so that all it allocates may be
  less."""
  memory: Any = compiled.memory_analysis()
  live = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
  )
  allocated = live + memory.temp_size_in_bytes
  if memory.peak_memory_in_bytes > live + 1024 or not memory.temp_size_in_bytes:
    return min(memory.peak_memory_in_bytes, allocated)
  return allocated


def peak_of(noted: Noted) -> int:
  """The same of a program that may be too large to be compiled."""
  try:
    return peak_bytes(noted.compiled)
  except jax.errors.JaxRuntimeError as error:
    return _too_large("", noted, 0.0, 0, error).peak_bytes


# What the TPU compiler says of a program for which memory is short.
_NEEDS = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _too_large(
  name: str, noted: Noted, flops: float, beside_bytes: int, error: Exception
) -> ProgramPlan:
  """A program that the compiler has given up for want of memory: what it says it needs.
  Of its collectives and its time nothing is known."""
  needs = _NEEDS.search(str(error))
  if "RESOURCE_EXHAUSTED" not in str(error) or needs is None:
    raise error
  given = sum(map(residents.shard_bytes, programs.shapes_in(noted.args)))
  size, unit = (needs[1], needs[2]) if needs[1] else (needs[3], needs[4])
  temporary = int(float(size) * _UNITS[unit]) - (0 if needs[1] else given)
  return ProgramPlan(
    name=name,
    argument_bytes=given,
    output_bytes=0,
    temporary_bytes=temporary,
    peak_bytes=given + temporary,
    flops=flops,
    moved_bytes=float(given),
    collectives=(),
    runs=noted.calls,
    beside_bytes=beside_bytes,
  )


def _over(amount: float, rate: float | None) -> float | None:
  return None if rate is None else amount / rate
