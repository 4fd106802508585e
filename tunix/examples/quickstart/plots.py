"""Curves of training as an image; the only file that imports matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

# Optimizer steps and values, in order.
Series = Sequence[tuple[int, float]]

# Curves of single batches jump about; the line is a running mean over this share.
_SMOOTHED = 0.05


def save_curves(
  path: pathlib.Path,
  curves: Mapping[str, Mapping[str, Series]],
  labels: Mapping[str, tuple[str, str]],
) -> None:
  """Draws the curves side by side into a PNG.

  Args:
    path: of the image.
    curves: {stage: {"train": of every step's batch, "eval": on held-out data}}.
    labels: {stage: (title, what is shown, with its unit)}.

  Raises:
    OSError: the file cannot be written.
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # A figure of its own, not pyplot: no window system, and no state left behind.
  figure = Figure(figsize=(5.2 * len(curves), 4.1), dpi=120, layout="constrained")
  FigureCanvasAgg(figure)
  panels = figure.subplots(1, len(curves), squeeze=False)[0]
  for axes, (stage, curve) in zip(panels, curves.items()):
    title, unit = labels[stage]
    steps, values = zip(*curve["train"])
    axes.plot(steps, values, color="#9dbcd8", linewidth=0.8, label="training batches")
    axes.plot(steps, _running_mean(values), color="#1f5f99", label="running mean")
    axes.plot(*zip(*curve["eval"]), "o-", color="#d1582b", label="held out")
    axes.set_title(title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    # Below: no corner of the axes is sure to be free.
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
  figure.savefig(path, format="png")


def _running_mean(values: Sequence[float]) -> list[float]:
  window = max(1, round(len(values) * _SMOOTHED))
  parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
  return [sum(part) / len(part) for part in parts]
