"""The data of the charts on a page: which curves a chart draws, and in which color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunix.report.measures import Measure
from tunix.report.series import Curves, Point

COLOURS = 8  # classes c0 ... c7 of the page's style


def data(measure: Measure, runs: Mapping[str, Curves]) -> dict[str, Any]:
  """Returns one chart as JSON; `report_page.html` draws it.

  Args:
    measure: the metric that is drawn as a line, its title and its band.
    runs: the curves of each run, by the run's name. At least one has the metric.

  Returns: `title`, `rounding` (a magnitude that no value exceeds, if all of them are
  rounding errors; else None) and `lines`, ordered by run, training before evaluation. A
  line has `label`, `colour`, `dashed` (an evaluation), `count`, `not_finite`, `points`
  and `band` (points of its lower and its upper bound; None: no band).
  """
  lines, is_alone = [], len(runs) == 1
  for number, (run, curves) in enumerate(runs.items()):
    modes = curves.by_name.get(measure.name, {})
    for mode in sorted(modes, reverse=True):
      curve, is_eval = modes[mode], mode == "eval"
      if not curve.count:
        continue
      label = "evaluation" if is_eval else mode
      bounds = [curves.by_name.get(name, {}).get(mode) for name in measure.spread or ()]
      bands = [_pairs(bound.points()) for bound in bounds if bound and bound.count]
      lines.append(
        {
          "label": label if is_alone else f"{run}, {label}",
          "colour": (int(is_eval) if is_alone else number) % COLOURS,
          "dashed": is_eval,
          "count": curve.count,
          "not_finite": curve.not_finite,
          "points": _pairs(curve.points()),
          "band": bands if len(bands) == 2 else None,
        }
      )
  limit = measure.rounding
  values = [abs(value) for line in lines for _, value in line["points"]]
  # A metric that is 0 throughout is not computed with an error.
  at_rounding = limit is not None and 0 < max(values, default=0) <= limit
  rounding = limit if at_rounding else None
  return {"title": measure.title, "rounding": rounding, "lines": lines}


def constant(data: Mapping[str, Any]) -> float | None:
  """Returns the only value of a chart's curves.

  None if they move, are one point, or have values that are not finite, because only a
  chart shows how many.
  """
  lines = data["lines"]
  if any(line["not_finite"] for line in lines):
    return None
  curves = [line["points"] for line in lines]
  curves += [bound for line in lines for bound in line["band"] or ()]
  values = {value for points in curves for _, value in points}
  is_still = len(values) == 1 and any(line["count"] > 1 for line in lines)
  return values.pop() if is_still else None


def _pairs(points: Sequence[Point]) -> list[tuple[int, float]]:
  # Six digits are finer than a pixel, and a third of the bytes of a float's repr.
  return [(step, float(f"{value:.6g}")) for step, value in points]
