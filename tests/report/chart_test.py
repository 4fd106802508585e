import re
import xml.etree.ElementTree as ElementTree

import pytest

from tunix.report import chart, measures
from tunix.report.measures import Measure
from tunix.report.series import Curve, Curves


def curve(*values):
  made = Curve(200)
  for step, value in enumerate(values):
    made.add(step, value)
  return made


NAMES = {
  "loss": ("Loss", "loss"),
  "actor/loss": ("Loss", "actor: loss"),
  "mine/critic/vf_clipfrac": ("Policy", "mine/critic: clipped share of values"),
  "rewards/margin": ("Rewards", "margin of rewards, chosen - rejected"),
  "rewards/exact_match": ("Rewards", "rewards/exact_match"),
  "rewards/failed": ("Completions", "completions without a reward, share"),
  "actor/kl": ("Policy", "actor: KL to the reference, nats"),
  "entropy": ("Policy", "entropy, nats"),
  "distill/kl_div": ("Loss", "distill/kl_div"),
  "actor/grad_norm": ("Optimisation", "actor: norm of the gradient"),
  "device_memory_bytes": ("Speed and memory", "device memory, bytes"),
  "perf/rollout_sec": ("Speed and memory", "perf/rollout_sec"),
  "something": ("Further metrics", "something"),
}


def test_every_metric_has_its_section_and_chart():
  sections = measures.arrange(NAMES)
  placed = {m.name: (label, m.title) for label, ms in sections.items() for m in ms}
  assert placed == NAMES
  assert [*sections][:2] == ["Rewards", "Loss"]


def test_extremes_are_the_band_of_their_mean():
  names = [f"run/rewards/score/{kind}" for kind in ("mean", "min", "max")]
  (measure,) = measures.arrange(names)["Rewards"]
  assert measure.name == names[0] and measure.spread == (names[1], names[2])
  alone = measures.arrange(names[:2])["Rewards"]
  assert [(m.name, m.spread) for m in alone] == [(names[0], None), (names[1], None)]


def drawn(measure, runs):
  lines = chart.lines_of(measure, runs)
  text = chart.figure(measure, lines, 1)
  return lines, text, ElementTree.fromstring(text)


def test_a_line_goes_where_its_values_are():
  read = Curves(by_name={"loss": {"train": curve(4.0, 2.0, 0.0), "eval": curve(3.0)}})
  lines, text, figure = drawn(Measure("loss", "loss"), {"run": read})
  assert [(x.label, x.colour, x.dashed) for x in lines] == [
    ("train", 0, False),
    ("evaluation", 1, True),
  ]
  (points,) = re.findall(r'polyline[^>]*points="([^"]+)"', text)
  xy = [tuple(map(float, pair.split(","))) for pair in points.split()]
  x0, x1, left, right, y0, y1, low, high = map(
    float, figure.find("svg").get("data-scale").split()
  )
  back = [
    (
      x0 + (x - left) / (right - left) * (x1 - x0),
      y0 + (y - low) / (high - low) * (y1 - y0),
    )
    for x, y in xy
  ]
  for got, want in zip(back, [(0, 4), (1, 2), (2, 0)], strict=True):
    assert got == pytest.approx(want, abs=0.01)
  assert text.count("<circle") == 1  # one value is a dot
  assert "from 4 (step 0) to 0 (step 2)" in figure.find("svg/desc").text
  cells = [cell.text for cell in figure.iter("td")][:5]
  assert cells == ["3", "4 (step 0)", "0 (step 2)", "0 (step 2)", "4 (step 0)"]


def test_runs_have_colours_and_bands():
  names = ("r/mean", "r/min", "r/max")
  runs = {
    run: Curves(by_name={n: {"train": curve(i, i + 1)} for i, n in enumerate(names)})
    for run in ("a", "<b>")
  }
  lines, text, _ = drawn(Measure("r/mean", "r", ("r/min", "r/max")), runs)
  assert [(x.label, x.colour) for x in lines] == [("a, train", 0), ("<b>, train", 1)]
  assert text.count("<polygon") == 2 and "<b>" not in text


@pytest.mark.parametrize(
  "values", [(0.0,), (0.0, 0.0), (1e300, -1e300), (5, 5.0000001)]
)
def test_any_range_has_an_axis(values):
  read = Curves(by_name={"x": {"train": curve(*values)}})
  text = drawn(Measure("x", "x"), {"run": read})[1]
  assert "nan" not in text and "inf" not in text


def test_ticks_are_round():
  assert chart.ticks(0.0, 1.0, 4) == pytest.approx([0, 0.5, 1])
  assert chart.ticks(0.93, 3.1, 4) == [1.0, 2.0, 3.0]
  assert [chart.told(v) for v in (0.5, 12345, 3.4e6, 1.5e-5)] == [
    *("0.5", "12,345", "3.4M", "1.5e-05")
  ]
