"""A progress bar that is silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.sft.metrics_logger import MetricsLogger, Mode


class ProgressBar:
  """Steps done, and the newest value of what is worth watching.

  Drawn by tqdm on standard error when that is a terminal, or in a notebook; otherwise
  nothing is drawn and tqdm is not imported.

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
    if _watched():
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

  def update(self, n: int = 1, values: Mapping[str, float] | None = None) -> None:
    """Moves on by `n` steps; `values` replace those of the same name."""
    for name, value in (values or {}).items():
      self._shown[name] = f"{float(value):.4g}"
    if self._bar is not None:
      text = ", ".join(f"{name}={value}" for name, value in self._shown.items())
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


def _watched() -> bool:
  # In a notebook standard error is no terminal, yet somebody looks at it.
  return sys.stderr.isatty() or "ipykernel" in sys.modules
