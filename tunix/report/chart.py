"""One chart as SVG, with its numbers as a table; it is read without a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from tunix.report.measures import Measure
from tunix.report.series import Curve, Curves, Point

# In units of the drawing, which is as wide as the page lets it be.
_WIDTH, _HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 28
COLOURS = 8  # classes c0 ... c7 of the page's style


class Line(NamedTuple):
  """What is drawn of one run and mode.

  Attributes:
    label: for legends and tables.
    colour: number of its colour.
    dashed: an evaluation.
    curve: its values.
    band: (lowest, highest) around it; None: none.
  """

  label: str
  colour: int
  dashed: bool
  curve: Curve
  band: tuple[Curve, Curve] | None


class _Scale(NamedTuple):
  low: float
  high: float
  begin: float
  end: float

  def __call__(self, value: float) -> float:
    share = (value - self.low) / (self.high - self.low)
    return self.begin + share * (self.end - self.begin)


def lines_of(measure: Measure, runs: Mapping[str, Curves]) -> list[Line]:
  """The lines of a chart: by run, training before evaluation."""
  lines = []
  for number, (run, curves) in enumerate(runs.items()):
    modes = curves.by_name.get(measure.name, {})
    for mode in sorted(modes, reverse=True):
      if not modes[mode].count:
        continue
      name = {"eval": "evaluation"}.get(mode, mode)
      alone = len(runs) == 1
      ends = [curves.by_name.get(end, {}).get(mode) for end in measure.spread or ()]
      low, high = ends if ends else (None, None)
      has_band = low is not None and high is not None and low.count and high.count
      lines.append(
        Line(
          name if alone else f"{run}, {name}",
          (int(mode == "eval") if alone else number) % COLOURS,
          mode == "eval",
          modes[mode],
          (low, high) if has_band else None,  # pyright: ignore
        )
      )
  return lines


def figure(measure: Measure, lines: Sequence[Line], number: int) -> str:
  """The chart as a <figure>.

  Args:
    measure: what is drawn.
    lines: at least one, each with at least one value.
    number: of the figure on its page.
  """
  points = {id(line): line.curve.points() for line in lines}
  drawn = [p for line in lines for p in points[id(line)]]
  drawn += [p for line in lines for c in line.band or () for p in c.points()]
  steps = _range([p.step for p in drawn], 0.0)
  values = _range([p.value for p in drawn], 0.05)
  x = _Scale(*steps, _LEFT, _WIDTH - _RIGHT)
  y = _Scale(*values, _HEIGHT - _BOTTOM, _TOP)
  parts = [_axes(x, y)]
  parts += [_band(line, x, y) for line in lines if line.band is not None]
  parts += [_line(line, points[id(line)], x, y) for line in lines]
  title = escape(measure.title)
  desc = escape("; ".join(f"{line.label}: {_in_words(line.curve)}" for line in lines))
  scale = " ".join(f"{v:.9g}" for v in (*x, *y))
  return (
    f'<figure><figcaption>{title}<span class="ends">{_ends(lines)}</span></figcaption>'
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" data-scale="{scale}" '
    f'aria-labelledby="t{number} d{number}"><title id="t{number}">{title}</title>'
    f'<desc id="d{number}">{desc}</desc>{"".join(parts)}</svg>'
    f'<p class="readout" aria-hidden="true"></p>{_table(lines)}</figure>'
  )


def _axes(x: _Scale, y: _Scale) -> str:
  out = []
  for tick in ticks(y.low, y.high, 4):
    at = f"{y(tick):.1f}"
    out.append(f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/>')
    out.append(
      f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" class="y">{told(tick)}</text>'
    )
  for tick in ticks(x.low, x.high, 4):
    if tick == int(tick):  # half a step is none
      at = f"{x(tick):.1f}"
      out.append(f'<text x="{at}" y="{_HEIGHT - 9}" class="x">{int(tick):,}</text>')
  return "".join(out)


def _band(line: Line, x: _Scale, y: _Scale) -> str:
  assert line.band is not None
  low, high = (curve.points() for curve in line.band)
  around = [*_steps(high, max), *reversed(_steps(low, min))]
  return f'<polygon class="b{line.colour}" points="{_place(around, x, y)}"/>'


def _steps(
  points: Sequence[Point], chosen: Callable[[float, float], float]
) -> list[Point]:
  """One point a step: a bound has no two."""
  by_step: dict[int, float] = {}
  for step, value in points:
    by_step[step] = chosen(value, by_step.get(step, value))
  return [Point(step, value) for step, value in by_step.items()]


def _line(line: Line, points: Sequence[Point], x: _Scale, y: _Scale) -> str:
  kind = f"c{line.colour}" + (" dashed" if line.dashed else "")
  label = escape(line.label, quote=True)
  if len(points) == 1:
    at = points[0]
    return (
      f'<circle class="dot {kind}" r="3.5" cx="{x(at.step):.1f}" '
      f'cy="{y(at.value):.2f}"/>'
    )
  return (
    f'<polyline class="line {kind}" data-label="{label}" '
    f'points="{_place(points, x, y)}"/>'
  )


def _place(points: Sequence[Point], x: _Scale, y: _Scale) -> str:
  return " ".join(f"{x(step):.1f},{y(value):.2f}" for step, value in points)


def _ends(lines: Sequence[Line]) -> str:
  """The newest value, where there is one run."""
  if len(lines) > 2:
    return ""
  return escape(", ".join(f"{_last(line.curve)} {line.label}" for line in lines))


def _table(lines: Sequence[Line]) -> str:
  head = "".join(
    f'<th scope="col">{name}</th>'
    for name in ("", "values", "first", "last", "lowest", "highest")
  )
  rows = []
  for line in lines:
    curve = line.curve
    count = f"{curve.count:,}"
    if curve.not_finite:
      count += f" and {curve.not_finite:,} not finite"
    cells = [count, _at(curve.first), _at(curve.last), _at(curve.low), _at(curve.high)]
    data = "".join(f"<td>{cell}</td>" for cell in cells)
    rows.append(f'<tr><th scope="row">{escape(line.label)}</th>{data}</tr>')
  return (
    '<details><summary>values</summary><div class="wide"><table><thead><tr>'
    f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
  )


def _at(point: Point | None) -> str:
  return "" if point is None else f"{told(point.value)} (step {point.step:,})"


def _last(curve: Curve) -> str:
  return "" if curve.last is None else told(curve.last.value)


def _in_words(curve: Curve) -> str:
  return (
    f"from {_at(curve.first)} to {_at(curve.last)}, lowest {_at(curve.low)}, highest "
    f"{_at(curve.high)}"
  )


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
  """What an axis goes over; never empty."""
  low, high = min(values), max(values)
  # A constant has room above and below, and so has what rounding alone moves.
  if high - low <= 1e-9 * max(abs(low), abs(high)):
    room = abs(low) / 10
    return (low - room, high + room) if room else (-0.05, 1.0)
  return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, most: int) -> list[float]:
  """Round numbers from `low` to `high`, about `most` of them."""
  raw = (high - low) / most
  if not math.isfinite(raw) or raw <= 0:
    return [low]
  size = 10.0 ** math.floor(math.log10(raw))
  step = next(size * n for n in (1, 2, 5, 10) if size * n >= raw * 0.999)
  first = math.ceil(low / step)
  return [n * step for n in range(first, math.floor(high / step) + 1)]


def told(value: float) -> str:
  """A number in few characters: 0.0312, 12,345, 1.2e-05, 3.4M."""
  size = abs(value)
  for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
    if unit <= size < 1e15:
      return f"{value / unit:.4g}{name}"
  if size >= 1000:
    return f"{value:,.0f}" if size < 1e6 else f"{value:.3g}"
  return f"{value:.4g}"
