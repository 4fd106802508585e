"""Curves of training as an image; the only file that imports matplotlib."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

# Optimizer steps and values, in order.
Series = Sequence[tuple[int, float]]

# Curves of single batches jump about; the line is a running mean over this share.
_SMOOTHED = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """One panel.

  Attributes:
    title: above it.
    train: value of every step's batch.
    held_out: value on held-out data.
    value: what is shown, with its unit.
  """

  title: str
  train: Series
  held_out: Series
  value: str = "loss, nats per token"


def save_curves(path: str | os.PathLike[str], curves: Sequence[Curve]) -> None:
  """Draws the curves side by side into a PNG.

  Raises:
    ValueError: there is no curve, or one without points.
    OSError: the file cannot be written.
  """
  for curve in curves:
    if not curve.train or not curve.held_out:
      raise ValueError(f"the curve {curve.title!r} has no points: log values first")
  if not curves:
    raise ValueError("there are no curves to draw: give at least one")
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # A figure of its own, not pyplot: no window system, and no state left behind.
  figure = Figure(figsize=(5.2 * len(curves), 4.1), dpi=120, layout="constrained")
  FigureCanvasAgg(figure)
  for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves):
    steps, values = zip(*curve.train)
    axes.plot(steps, values, color="#9dbcd8", linewidth=0.8, label="training batches")
    axes.plot(steps, _running_mean(values), color="#1f5f99", label="running mean")
    axes.plot(*zip(*curve.held_out), "o-", color="#d1582b", label="held out")
    axes.set_title(curve.title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(curve.value)
    axes.grid(alpha=0.3)
    # Below: no corner of the axes is sure to be free.
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
  figure.savefig(path, format="png")


def _running_mean(values: Sequence[float]) -> list[float]:
  window = max(1, round(len(values) * _SMOOTHED))
  parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
  return [sum(part) / len(part) for part in parts]
