"""A progress bar; lines of text where nobody watches (a pipe, a log file, CI)."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tunix.sft.metrics_logger import MetricsLogger, Mode


class ProgressBar:
  """Steps done, and the newest value of what is worth watching.

  Drawn by tqdm on standard error when that is a terminal, or in a notebook. Elsewhere
  the first process writes a line there for the first step, for the last one and at most
  every ten seconds between them.

  Args:
    metrics_logger: where `update_metrics` looks values up.
    initial_steps: steps already done.
    max_steps: steps in all; None shows a counter without an end.
    description: text in front of the bar.
    metrics_prefix: prefix under which the metrics are logged.
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
    self._bar: Any = None
    if not _watched():
      self._bar = _Lines(initial_steps, max_steps, description or "step")
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
    """What stands behind the bar, by name."""
    return dict(self._shown)

  def say(self, text: str) -> None:
    """A line where lines are written; a bar shows that it stands."""
    if isinstance(self._bar, _Lines):
      self._bar.say(text)

  def update(
    self,
    n: int = 1,
    values: Mapping[str, float] | None = None,
    details: Mapping[str, float] | None = None,
  ) -> None:
    """Moves on by `n` steps.

    Args:
      n: steps.
      values: shown from now on; they replace those of the same name.
      details: told in lines alone.
    """
    for name, value in (values or {}).items():
      self._shown[name] = f"{float(value):.4g}"
    if self._bar is None:
      return
    text = ", ".join(f"{name}={value}" for name, value in self._shown.items())
    if isinstance(self._bar, _Lines):
      more = [f"{name}={value:.4g}" for name, value in (details or {}).items()]
      self._bar.update(n, ", ".join(filter(None, [text, *more])))
    else:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(n)

  def update_metrics(
    self, metric_names: Sequence[str], mode: Mode | str, ndigits: int = 3
  ) -> None:
    """Shows the newest logged values, rounded to `ndigits` after the point.

    Names that were not logged yet are left out.

    Raises:
      ValueError: the bar was made without a metrics logger.
    """
    if self._logger is None:
      raise ValueError(
        "this ProgressBar has no metrics_logger to look values up in: give it one, or "
        "hand the values to update(n, values)"
      )
    for name in metric_names:
      if self._logger.metric_exists(self._prefix, name, mode):
        value = self._logger.get_last_metric(self._prefix, name, mode)
        parts = (self._prefix, str(mode), name)
        self._shown["_".join(filter(None, parts))] = f"{value:.{ndigits}f}"

  def close(self) -> None:
    """Leaves the bar as it stands."""
    bar, self._bar = self._bar, None
    if bar is not None:
      bar.close()


class _Lines:
  """Progress as lines on standard error."""

  SECONDS = 10.0

  def __init__(self, initial: int, total: int | None, description: str):
    self._done, self._total, self._description = initial, total, description
    self._first, self._begin = initial, time.monotonic()
    self._told = -1.0
    self._newest: tuple[int, str] | None = None  # not told yet

  def say(self, text: str) -> None:
    if jax.process_index() == 0:
      print(f"{self._description}: {text}", file=sys.stderr, flush=True)

  def update(self, n: int, text: str) -> None:
    now = time.monotonic()
    self._done += n
    self._newest = self._done, text
    is_last = self._total is not None and self._done >= self._total
    if self._told < 0:
      # Compiling was most of the first step: what is left is reckoned without it.
      self._first, self._begin = self._done, now
    if self._told < 0 or is_last or now - self._told >= self.SECONDS:
      self._tell(now)

  def _tell(self, now: float) -> None:
    if self._newest is None:
      return
    (done, text), self._newest, self._told = self._newest, None, now
    of = "" if self._total is None else f" of {self._total}"
    parts = [f"step {done}{of}", text]
    since = done - self._first
    if self._total is not None and since and done < self._total:
      seconds = (self._total - done) * (now - self._begin) / since
      parts.append(f"{datetime.timedelta(seconds=round(seconds))} left")
    self.say(", ".join(filter(None, parts)))

  def close(self) -> None:
    self._tell(time.monotonic())


def _watched() -> bool:
  # In a notebook standard error is no terminal, yet somebody looks at it.
  return sys.stderr.isatty() or "ipykernel" in sys.modules
