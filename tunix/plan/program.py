"""The estimate of one compiled program: memory, FLOPs, traffic and time per device."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax

from tunix.perf import hlo_flops, hlo_text, programs
from tunix.perf.chips import Chip
from tunix.perf.programs import ProgramRecord
from tunix.plan import collectives, exposed, kernels as kernels_lib, residents
from tunix.plan.collectives import Collective
from tunix.utils.setting import named_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramEstimate:
  """Memory and time of one program. Figures are per device unless record.

  Attributes:
    name: name of the program.
    argument_bytes: memory of the arguments.
    output_bytes: memory of the results that do not reuse the memory of arguments.
    temporary_bytes: memory of temporaries.
    peak_bytes: most memory that is in use at once.
    host_bytes: memory of the host, for each device, that offloading takes.
    flops: FLOPs on all devices together: matrix products, convolutions and splash
      attention. Rematerialized work counts twice.
    moved_bytes: lower bound of the memory traffic: arguments are read once and results
      written once. For one pass of a loop of unknown length: only its arguments.
    devices: number of devices that run it.
    only_samples: True if they do nothing but sample, see `handover.Handover`.
    runs: how often a step runs the program, or passes through its loop.
    beside_bytes: memory that the run holds on a device besides the arguments.
    collectives: communication between the devices.
    compute_seconds, memory_seconds, link_seconds: duration of the FLOPs, the memory
      traffic and the communication, each alone at the chip's peak rate; None: the rate
      is not known.
    kernels, branches: what one run launches, or one pass of a loop of unknown length,
      see `kernels.Launches`; None: it is no program for GPUs.
    alone_memory_seconds, alone_link_seconds: the part of memory traffic and
      communication that the compiler has scheduled while nothing is computed; None:
      not known, for programs of other chips than TPUs and loops of unknown length.
  """

  name: str
  argument_bytes: int
  output_bytes: int
  temporary_bytes: int
  peak_bytes: int
  flops: float
  moved_bytes: float
  collectives: tuple[Collective, ...]
  devices: int
  only_samples: bool = False
  runs: int = 1
  beside_bytes: int = 0
  host_bytes: int = 0
  compute_seconds: float | None = None
  memory_seconds: float | None = None
  link_seconds: float | None = None
  kernels: int | None = None
  branches: int | None = None
  alone_memory_seconds: float | None = None
  alone_link_seconds: float | None = None

  @property
  def held_bytes(self) -> int:
    """Memory of a device at the peak, with all that the run holds beside."""
    return self.peak_bytes + self.beside_bytes

  @property
  def seconds(self) -> float | None:
    """Lower bound of the duration of one run; None: not known.

    The slowest part decides, because all else may be hidden behind it. Only traffic
    that is known to run alone is added to the computation.
    """
    if self.compute_seconds is None:
      return None
    in_order = math.fsum(self._in_order().values())
    return max(in_order, self.memory_seconds or 0.0, self.link_seconds or 0.0)

  @property
  def limited_by(self) -> str | None:
    """The part that takes most of that time: "compute", "memory" or "links"."""
    if self.seconds is None:
      return None
    parts = self._in_order()
    if math.fsum(parts.values()) < self.seconds:
      parts = {"memory": self.memory_seconds, "links": self.link_seconds}
    return max(parts, key=lambda name: parts[name] or 0.0)

  def _in_order(self) -> dict[str, float]:
    """Returns seconds of the parts that run one after the other."""
    return {
      "compute": self.compute_seconds or 0.0,
      "memory": self.alone_memory_seconds or 0.0,
      "links": self.alone_link_seconds or 0.0,
    }

  def to_json(self) -> dict[str, Any]:
    """Returns all figures, for `--json`."""
    out = dataclasses.asdict(self)
    out["collectives"] = [
      {**dataclasses.asdict(one), "received_bytes": one.received}
      for one in sorted(self.collectives, key=lambda one: -one.received)
    ]
    derived = ("held_bytes", "seconds", "limited_by")
    return {**out, **named_values(self, derived)}


def estimate(
  name: str,
  record: ProgramRecord,
  devices: int,
  chip: Chip | None,
  *,
  passes: int | None = None,
  moved_bytes: float | None = None,
  beside_bytes: int = 0,
  only_samples: bool = False,
) -> ProgramEstimate:
  """Compiles a program and estimates its memory and time.

  Args:
    name: name of the program.
    record: the program, lowered for the mesh it is to run on.
    devices: number of devices of that mesh.
    chip: rates of a device; None: not known.
    passes: number of passes through the program's loop, if its length is not in the
      text. The figures are of one pass then. None: the program runs once.
    moved_bytes: see ProgramEstimate; None: from the arguments and results.
    beside_bytes, only_samples: see ProgramEstimate.
  """
  flops = hlo_flops.count_flops(record.lowered).flops
  try:
    compiled = record.compiled
  except jax.errors.JaxRuntimeError as error:
    failed = _too_large(name, record, flops, beside_bytes, error)
    return dataclasses.replace(failed, devices=devices, only_samples=only_samples)
  memory: Any = compiled.memory_analysis()
  text = _text(compiled)
  kernels = kernel_bytes(text)
  sent = collectives.read(text, devices)
  received = math.fsum(one.received for one in sent)
  written = memory.output_size_in_bytes
  moved = float(memory.argument_size_in_bytes + (0 if passes else written))
  moved = moved if moved_bytes is None else moved_bytes
  seconds: dict[str, Any] = {}
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
    if chip.kind.startswith("NVIDIA"):
      launched = kernels_lib.count(text)
      seconds |= {"kernels": launched.kernels, "branches": launched.branches}
  return ProgramEstimate(
    name=name,
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=written - memory.alias_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes + kernels,
    peak_bytes=peak_bytes(compiled) + kernels,
    flops=flops,
    moved_bytes=moved,
    collectives=tuple(sent),
    runs=record.calls * (passes or 1),
    beside_bytes=beside_bytes,
    host_bytes=memory.host_argument_size_in_bytes
    + memory.host_output_size_in_bytes
    - memory.host_alias_size_in_bytes
    + memory.host_temp_size_in_bytes,
    devices=devices,
    only_samples=only_samples,
    **seconds,
  )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the peak memory of a device, in bytes, from the compiler's figures.

  XLA for CPUs reports the peak of arguments and results alone; all temporaries are
  added to it. XLA for TPUs also counts arrays in the host's memory, so the sum of what
  it allocates on the device may be smaller, and is the bound.
  """
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


def kernel_bytes(text: hlo_text.Program) -> int:
  """Returns memory of kernels that the compiler's figures lack.

  The backward kernel of cuDNN's attention keeps float32 sums for the gradients of
  queries, keys and values, each of the size of the queries (docs/performance.md has
  the measured peaks). XLA asks the GPU how much that is. Without a GPU it plans none.
  """
  return max(
    (
      3 * 4 * math.prod(one.sizes)
      for operations in text.computations.values()
      for one in operations.values()
      if (kernel := hlo_flops.CUDNN_KERNEL.search(one.text)) is not None
      and (kernel[1] and not one.arrays[-1].bytes)
    ),
    default=0,
  )


def _text(compiled: jax.stages.Compiled) -> hlo_text.Program:
  return hlo_text.Program(compiled.as_text() or "", is_compiled=True)


def peak_of(record: ProgramRecord) -> int:
  """Returns the peak memory of a program, also of one too large to be compiled."""
  try:
    return peak_bytes(record.compiled) + kernel_bytes(_text(record.compiled))
  except jax.errors.JaxRuntimeError as error:
    return _too_large("", record, 0.0, 0, error).peak_bytes


# Messages of the TPU compiler about a program that does not fit into memory.
_NEEDS = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _too_large(
  name: str, record: ProgramRecord, flops: float, beside_bytes: int, error: Exception
) -> ProgramEstimate:
  """Returns the estimate of a program that the compiler gave up for lack of memory.

  The memory comes from the compiler's message. Collectives and time are not known.
  """
  needs = _NEEDS.search(str(error))
  if "RESOURCE_EXHAUSTED" not in str(error) or needs is None:
    raise error
  arguments = sum(map(residents.shard_bytes, programs.shapes_in(record.args)))
  size, unit = (needs[1], needs[2]) if needs[1] else (needs[3], needs[4])
  temporary = int(float(size) * _UNITS[unit]) - (0 if needs[1] else arguments)
  return ProgramEstimate(
    name=name,
    argument_bytes=arguments,
    output_bytes=0,
    temporary_bytes=temporary,
    peak_bytes=arguments + temporary,
    flops=flops,
    moved_bytes=float(arguments),
    collectives=(),
    devices=1,
    runs=record.calls,
    beside_bytes=beside_bytes,
  )


def _over(amount: float, rate: float | None) -> float | None:
  return None if rate is None else amount / rate
