"""ProgressBar: a bar in a terminal or notebook, lines of text elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tunix.sft.metrics_logger import MetricsLogger, Mode


class ProgressBar:
  """Shows the number of steps and the newest values of some metrics.

  In a terminal, or in a notebook, tqdm draws a bar on standard error, with the phase
  of the run before it. Elsewhere (a pipe, a log file) the first process writes lines to
  standard error: for each phase before the first step, for the first step, for the last
  one, and between them at most one every ten seconds.

  Args:
    metrics_logger: the logger that `update_metrics` reads.
    initial_steps: number of steps before this run.
    max_steps: last step of the run; None: unknown.
    description: text before the bar.
    metrics_prefix: prefix of the logged metrics.
  """

  def __init__(
    self,
    metrics_logger: MetricsLogger | None = None,
    initial_steps: int = 0,
    max_steps: int | None = None,
    description: str | None = "Training",
    metrics_prefix: str = "",
  ):
    self._logger = metrics_logger
    self._prefix = metrics_prefix
    self._shown: dict[str, str] = {}
    self._description = description or "step"
    self._bar: Any = None
    if not _can_draw():
      self._bar = _Lines(initial_steps, max_steps, self._description)
      return
    from tqdm import auto

    self._bar = auto.tqdm(
      initial=initial_steps,
      total=max_steps,
      desc=description,
      unit="step",
      dynamic_ncols=True,
    )

  @property
  def shown(self) -> dict[str, str]:
    """The values after the bar, by name."""
    return dict(self._shown)

  def phase(self, name: str, done: int = 0, total: int = 0) -> None:
    """Shows what the run does until the next step.

    Args:
      name: the phase, such as "compiling"; "" shows nothing new.
      done: number of parts of the phase that are complete.
      total: number of all parts; 0 if it is unknown.
    """
    if not name:
      return
    if done or total:
      name += f" {done} of {total}" if total else f" {done}"
    if isinstance(self._bar, _Lines):
      self._bar.phase(f"{name} ...", is_new=not done)
    elif self._bar is not None:
      self._bar.set_description(f"{self._description}, {name}")

  def update(
    self,
    n: int = 1,
    values: Mapping[str, float] | None = None,
    details: Mapping[str, float] | None = None,
  ) -> None:
    """Advances by `n` steps.

    Args:
      n: number of steps.
      values: values to show from now on, by name.
      details: further values for lines of text; a bar does not show them.
    """
    for name, value in (values or {}).items():
      self._shown[name] = f"{float(value):.4g}"
    if self._bar is None:
      return
    text = ", ".join(f"{name}={value}" for name, value in self._shown.items())
    if isinstance(self._bar, _Lines):
      further = [f"{name}={value:.4g}" for name, value in (details or {}).items()]
      self._bar.update(n, ", ".join(filter(None, [text, *further])))
    else:
      self._bar.set_description(self._description, refresh=False)
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(n)

  def update_metrics(
    self, metric_names: Sequence[str], mode: Mode | str, ndigits: int = 3
  ) -> None:
    """Shows the newest logged values of some metrics.

    Args:
      metric_names: names of metrics; those that were not logged yet are skipped.
      mode: train or eval.
      ndigits: digits after the decimal point.

    Raises:
      ValueError: The bar has no metrics logger.
    """
    if self._logger is None:
      raise ValueError(
        "metrics_logger is None; expected a MetricsLogger. Pass it to ProgressBar, or "
        "pass values to update(n, values)."
      )
    for name in metric_names:
      if self._logger.metric_exists(self._prefix, name, mode):
        value = self._logger.get_last_metric(self._prefix, name, mode)
        parts = (self._prefix, str(mode), name)
        self._shown["_".join(filter(None, parts))] = f"{value:.{ndigits}f}"

  def close(self) -> None:
    """Ends the bar at its current step."""
    bar, self._bar = self._bar, None
    if bar is None:
      return
    if not isinstance(bar, _Lines):
      bar.set_description(self._description, refresh=False)
    bar.close()


class _Lines:
  """Writes progress as lines to standard error."""

  SECONDS = 10.0

  def __init__(self, initial: int, total: int | None, description: str):
    self._done, self._total, self._description = initial, total, description
    self._first, self._begin = initial, time.monotonic()
    self._written_at = -1.0  # time of the last line; negative before the first
    self._phase_at = self._begin  # time of the last line of a phase or a step
    self._newest: tuple[int, str] | None = None  # a step without a line so far

  def phase(self, text: str, *, is_new: bool) -> None:
    now = time.monotonic()
    # After the first step only a phase that lasts is worth a line.
    is_due = self._written_at < 0 if is_new else now - self._phase_at >= self.SECONDS
    if is_due:
      self._phase_at = now
      self._say(text)

  def _say(self, text: str) -> None:
    if jax.process_index() == 0:
      print(f"{self._description}: {text}", file=sys.stderr, flush=True)

  def update(self, n: int, text: str) -> None:
    now = time.monotonic()
    self._done += n
    self._newest = self._done, text
    is_last = self._total is not None and self._done >= self._total
    if self._written_at < 0:
      # The first step compiles. The remaining time is estimated from the later steps.
      self._first, self._begin = self._done, now
    if self._written_at < 0 or is_last or now - self._written_at >= self.SECONDS:
      self._write(now)

  def _write(self, now: float, is_end: bool = False) -> None:
    if self._newest is None:
      return
    (done, text), self._newest, self._written_at = self._newest, None, now
    total = "" if self._total is None else f" of {self._total}"
    parts = [f"step {done}{total}", text]
    since = done - self._first
    if not is_end and self._total is not None and since and done < self._total:
      seconds = (self._total - done) * (now - self._begin) / since
      parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
    self._phase_at = now
    self._say(", ".join(filter(None, parts)))

  def close(self) -> None:
    self._write(time.monotonic(), is_end=True)


def _can_draw() -> bool:
  # In a notebook standard error is no terminal, but tqdm draws a widget there.
  return sys.stderr.isatty() or "ipykernel" in sys.modules
