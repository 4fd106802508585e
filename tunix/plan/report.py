"""The estimate of a run: memory, time and communication, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tunix.perf.chips import Chip
from tunix.plan import collectives
from tunix.plan.engine import EngineEstimate
from tunix.plan.handover import Handover
from tunix.plan.program import ProgramEstimate
from tunix.plan.residents import gib
from tunix.plan.rollout import Rollouts
from tunix.utils import terminal
from tunix.utils.setting import field_values, named_values

SERVE = "serve"  # the name of a server among the jobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEstimate:
  """Memory that a run needs, and upper bounds of its speed.

  Attributes:
    job: name of the job.
    model: description of the model.
    topology: name of the topology, as the user gave it.
    mesh: {axis: size}.
    devices: number of devices, those that only sample included.
    chip: rates of a device; None: not known.
    memory_bytes: memory of a device that programs may use; None: not known.
    programs: estimates of the job's programs, the step first.
    tokens: tokens of a step, padding included; 0 for a server, which has no steps.
    model_flops: FLOPs of a step by formula, on all devices together. Work that is
      computed twice counts once.
    steps: number of steps of the run; None: not known. In RL a step is a batch of
      rollouts with all updates on it.
    rollouts: estimate of sampling by the padded sampler; None: it samples nothing.
    engine: estimate of sampling by the engine; None: it samples nothing.
    handover: devices that only sample, and the weights they receive; None: none.
    advice: settings that fill the chips or make the run fit; None: not searched.
    shipped: message about the compiled programs that were written; None: none were.
  """

  job: str
  model: str
  topology: str
  mesh: dict[str, int]
  devices: int
  chip: Chip | None
  memory_bytes: float | None
  programs: Sequence[ProgramEstimate]
  tokens: int
  model_flops: float
  steps: int | None = None
  rollouts: Rollouts | None = None
  engine: EngineEstimate | None = None
  handover: Handover | None = None
  advice: str | None = None
  shipped: str | None = None

  @property
  def peak_bytes(self) -> int:
    """Peak memory of a device: the program that needs most, with all it runs beside."""
    return max(program.held_bytes for program in self.programs)

  @property
  def largest(self) -> str:
    """Name of the program that needs most."""
    return max(self.programs, key=lambda program: program.held_bytes).name

  @property
  def fits(self) -> bool | None:
    """True if every program fits into a device's memory; None: not known."""
    return None if self.memory_bytes is None else self.peak_bytes <= self.memory_bytes

  @property
  def step_seconds(self) -> float | None:
    """Lower bound of a step's duration: the sum over its programs and their runs.

    If devices sample ahead of the updates, the slower side decides.
    """
    if not self.tokens:
      return None
    sides = {True: 0.0, False: 0.0}
    for p in self.programs:
      if p.name == "evaluation":
        continue
      if p.seconds is None:
        return None
      sides[p.only_samples] += p.seconds * p.runs
    if self.handover is None:
      return sum(sides.values())
    if self.handover.seconds is None:
      return None
    sides[True] += self.handover.seconds
    return max(sides.values()) if self.handover.lag else sum(sides.values())

  @property
  def mfu(self) -> float | None:
    """Upper bound of the model FLOPs utilization."""
    if self.chip is None or not self.step_seconds:
      return None
    return self.model_flops / (self.step_seconds * self.devices * self.chip.flops)

  @property
  def tokens_per_second(self) -> float | None:
    """Upper bound of the tokens per second of a device."""
    if not self.step_seconds:
      return None
    return self.tokens / self.step_seconds / self.devices

  @property
  def chip_hours(self) -> float | None:
    """Lower bound of the chip-hours of all steps."""
    if self.steps is None or not self.step_seconds:
      return None
    return self.steps * self.step_seconds * self.devices / 3600

  def to_json(self) -> dict[str, Any]:
    """Returns all figures, for `--json`."""
    derived = (
      *("peak_bytes", "fits", "step_seconds", "mfu", "tokens_per_second"),
      "chip_hours",
    )
    return {
      **field_values(self),
      "chip": None if self.chip is None else dataclasses.asdict(self.chip),
      "programs": [program.to_json() for program in self.programs],
      "rollouts": None if self.rollouts is None else dataclasses.asdict(self.rollouts),
      "engine": None if self.engine is None else dataclasses.asdict(self.engine),
      "handover": self.handover and dataclasses.asdict(self.handover),
      **named_values(self, derived),
    }

  def __str__(self) -> str:
    rows = self._rows()
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = [_joined(row, widths).rstrip() for row in rows]
    sent = self._sent()
    parts = (*table, *([""] if sent else []), *sent)
    return "\n".join([*self._head(), "", *parts, "", *self._tail()])

  def to_markdown(self) -> str:
    """Returns the text of `str()` with a Markdown table and lists."""
    title, where = self._head()
    head, *rows = (f"| {' | '.join(row)} |" for row in self._rows())
    line = "| --- |" + " ---: |" * (len(self._rows()[0]) - 1)
    lists = [f"- {text}" for text in (*self._sent(), *self._tail())]
    return "\n".join([f"# {title}", "", where, "", head, line, *rows, "", *lists])

  def _head(self) -> list[str]:
    mesh = _axes(self.mesh)
    if self.handover is not None:
      mesh += f" trains, {_axes(self.handover.mesh)} samples"
    kind = "" if self.chip is None else f"{self.chip.kind} "
    devices = terminal.counted(self.devices, f"{kind}device")
    return [
      f"{self.job}: {self.model}",
      f"on {self.topology}: {devices}, {mesh}; of each:",
    ]

  def _rows(self) -> list[list[str]]:
    """Returns the rows of the table, the heading first."""
    head = ["program", "runs", "arguments", "temporary", "peak", "beside"]
    head += ["TFLOP", "links", "least"]
    rows = [head]
    for p in self.programs:
      received = sum(one.received for one in p.collectives)
      rows.append(
        [
          p.name,
          f"{p.runs:,}",
          gib(p.argument_bytes),
          gib(p.temporary_bytes),
          gib(p.peak_bytes),
          gib(p.beside_bytes),
          f"{p.flops / p.devices / 1e12:,.2f}",
          gib(received),
          "?" if p.seconds is None else f"{p.seconds * 1e3:,.1f} ms, {p.limited_by}",
        ]
      )
    return rows

  def _sent(self) -> list[str]:
    """Returns one line of collectives for each program that has some."""
    return [
      f"{p.name} sends: "
      + ", ".join(
        f"{n} {kind}" for kind, n in collectives.counts(p.collectives).items()
      )
      for p in self.programs
      if p.collectives
    ]

  def _remedy(self) -> str:
    """Returns what to try first if the run does not fit."""
    if self.job == SERVE:
      return "lower --slots, --max_tokens or --cache_tokens, or take more chips"
    return f"{self.largest} takes most; --fit looks for settings that do"

  def _tail(self) -> list[str]:
    lines = []
    if self.fits is None:
      lines.append(f"peak {gib(self.peak_bytes)}; the memory of a device is not known")
    else:
      assert self.memory_bytes is not None
      verdict = "fits" if self.fits else "does NOT fit"
      lines.append(
        f"{verdict}: {gib(self.peak_bytes)} of {gib(int(self.memory_bytes))} a device"
        + ("" if self.fits or self.advice is not None else f"; {self._remedy()}")
      )
    host = max(program.host_bytes for program in self.programs)
    if host:
      lines.append(f"and {gib(host)} of its host's memory for each device")
    if self.tokens and self.step_seconds and self.mfu is not None:
      lines.append(
        f"a step of {self.tokens:,} tokens takes at least {self.step_seconds:,.3f} s: "
        f"at most {self.tokens_per_second:,.0f} tokens/s a device, MFU {self.mfu:.1%}"
      )
    if self.rollouts is not None:
      lines.append(str(self.rollouts))
    if self.engine is not None:
      lines += self.engine.lines()
    if self.handover is not None:
      lines.append(str(self.handover))
    if self.chip_hours is not None and self.step_seconds and self.steps:
      hours = self.steps * self.step_seconds / 3600
      lines.append(
        f"{self.steps:,} steps: at least {hours:,.1f} hours, {self.chip_hours:,.1f} "
        "chip-hours, without evaluations and checkpoints"
      )
    return [*lines, *filter(None, (self.advice, self.shipped))]


def _axes(mesh: dict[str, int]) -> str:
  return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def _joined(row: list[str], widths: list[int]) -> str:
  """Returns a row as text: the name aligned left, figures aligned right."""
  name, *figures = (
    cell.rjust(width) if i else cell.ljust(width)
    for i, (cell, width) in enumerate(zip(row, widths))
  )
  return "  ".join([name, *figures])
