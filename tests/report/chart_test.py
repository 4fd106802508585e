import itertools

import pytest

from tests.report import dom
from tunix.report import chart, document, measures
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
  "actor/grad_norm": ("Optimization", "actor: norm of the gradient"),
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
  names = [f"run/completions/{kind}_length" for kind in ("mean", "min", "max")]
  (measure,) = measures.arrange(names)["Completions"]
  assert measure.name == names[0] and measure.spread == (names[1], names[2])
  alone = measures.arrange(names[:2])["Completions"]
  assert {(m.name, m.spread) for m in alone} == {(names[0], None), (names[1], None)}


def test_the_band_of_the_reward_is_the_middle_half_of_the_prompts():
  names = [f"rewards/score/{kind}" for kind in ("mean", "prompt_p25", "prompt_p75")]
  (measure,) = measures.arrange(names)["Rewards"]
  assert measure.spread == (names[1], names[2])
  assert measure.title == "reward (band: middle half of the prompts)"
  (older,) = measures.arrange(names[:1])["Rewards"]  # of an earlier version's run
  assert older.spread is None and older.title == "reward"


@pytest.mark.parametrize(
  ("counts", "joined"),
  [
    ({"Rewards": 1}, {"Rewards": 1}),
    ({"Rewards": 2, "Loss": 3}, {"Rewards": 2, "Loss": 3}),
    ({"Rewards": 2, "Loss": 1, "Policy": 3}, {"Rewards": 2, "Loss and policy": 4}),
    ({"Loss": 3, "Policy": 1}, {"Loss and policy": 4}),
    ({"Loss": 1, "Speed and memory": 3}, {"Loss, speed and memory": 4}),
    ({"Loss": 1, "Policy": 1, "Speed": 1}, {"Loss, policy and speed": 3}),
  ],
)
def test_a_section_of_one_chart_shares_the_row_of_a_neighbour(counts, joined):
  sections = {
    label: [Measure(f"{label}{i}", "x") for i in range(count)]
    for label, count in counts.items()
  }
  found = measures.without_single_charts(sections)
  assert {label: len(charts) for label, charts in found.items()} == joined
  assert [*itertools.chain(*found.values())] == [*itertools.chain(*sections.values())]


@pytest.mark.parametrize(
  ("name", "values", "is_noise"),
  [
    ("actor/loss", (3e-8, -6e-8, 1e-7), True),
    ("kl", (0.0, 2e-7), True),
    ("kl", (0.0, 2e-6), False),
    ("kl", (0.0, 0.0), False),
    ("learning_rate", (0.0, 1e-7), False),
  ],
)
def test_rounding_errors_are_no_signal(name, values, is_noise):
  (measure,) = next(iter(measures.arrange([name]).values()))
  curves = Curves(by_name={name: {"train": curve(*values)}})
  (figure,) = draw(chart.data(measure, {"run": curves}))
  caption = dom.text(figure.find("figcaption"))
  assert ("at rounding: no value is further from 0 than 1e-6" in caption) == is_noise
  heights = [y for _, y in points(figure.find(".//polyline"))]
  if is_noise:  # all on one line, the zero in the middle of the axis
    assert max(heights) - min(heights) < 2 and abs(heights[0] - 96) < 2
  elif any(values):
    assert max(heights) - min(heights) > 100
  # The numbers are still there.
  assert any(cell.text.startswith("-6e-8") for cell in figure.iter("td")) == (
    -6e-8 in values
  )


@pytest.mark.parametrize(
  ("values", "constant"),
  [
    ((0.5, 0.5), 0.5),
    ((0.5, 0.25), None),
    ((0.5,), None),
    ((0.5, 0.5, float("nan")), None),  # a chart shows how many are not finite
  ],
)
def test_the_only_value_of_a_chart(values, constant):
  curves = Curves(by_name={"loss": {"train": curve(*values)}})
  assert (
    chart.constant(chart.data(Measure("loss", "Loss"), {"run": curves})) == constant
  )


def test_extremes_of_rewards_come_last_and_are_no_band():
  names = ["rewards/score/max", "rewards/score/min", "rewards/z", "rewards/score/mean"]
  charts = measures.arrange(names)["Rewards"]
  assert [m.title for m in charts] == [
    "reward",
    "rewards/z",
    "highest reward",
    "lowest reward",
  ]
  assert not any(m.spread for m in charts)


def draw(*charts):
  """The figures of a page with these charts."""
  part = {"kind": "charts", "charts": list(charts)}
  page = document.html("page", [document.section("charts", part)])
  return dom.draw(page).findall(".//figure")


def points(element):
  """The points of a polyline or polygon."""
  return [tuple(map(float, xy.split(","))) for xy in element.get("points").split()]


def test_a_line_goes_where_its_values_are():
  curves = Curves(by_name={"loss": {"train": curve(4.0, 2.0, 0.0), "eval": curve(3.0)}})
  data = chart.data(Measure("loss", "the loss"), {"run": curves})
  assert [(x["label"], x["colour"], x["dashed"]) for x in data["lines"]] == [
    ("train", 0, False),
    ("evaluation", 1, True),
  ]
  assert data["lines"][0]["points"] == [(0, 4.0), (1, 2.0), (2, 0.0)]
  (figure,) = draw(data)
  # The axis of steps goes from 64 to 408. Values from 0 to 4 get a margin of 5 %, 0.2
  # at each end, on an axis from 182 up to 10.
  scale = (182 - 10) / 4.4
  assert points(figure.find(".//polyline")) == [
    (64, pytest.approx(10 + 0.2 * scale, abs=0.01)),
    (236, pytest.approx(10 + 2.2 * scale, abs=0.01)),
    (408, pytest.approx(10 + 4.2 * scale, abs=0.01)),
  ]
  assert len(figure.findall(".//circle")) == 1  # one value is a dot
  label = figure.find("svg").get("aria-label")
  assert label.startswith("the loss; train: from 4 (step 0) to 0 (step 2)")
  cells = [cell.text for cell in figure.iter("td")][:5]
  assert cells == ["3", "4 (step 0)", "0 (step 2)", "0 (step 2)", "4 (step 0)"]
  assert dom.text(figure.find("figcaption")) == "the loss0 train, 3 evaluation"


def test_runs_have_colours_and_bands():
  names = ("r/mean", "r/min", "r/max")
  runs = {
    run: Curves(by_name={n: {"train": curve(i, i + 1)} for i, n in enumerate(names)})
    for run in ("a", "<b>")
  }
  data = chart.data(Measure("r/mean", "r", ("r/min", "r/max")), runs)
  assert [(x["label"], x["colour"]) for x in data["lines"]] == [
    ("a, train", 0),
    ("<b>, train", 1),
  ]
  assert data["lines"][0]["band"] == [[(0, 1.0), (1, 2.0)], [(0, 2.0), (1, 3.0)]]
  (figure,) = draw(data)
  assert len(figure.findall(".//polygon")) == 2
  # Along the upper bound, and back along the lower one.
  upper, lower = (
    points(figure.find(".//polygon"))[:2],
    points(figure.find(".//polygon"))[2:],
  )
  assert [x for x, _ in upper] == [64, 408] and [x for x, _ in lower] == [408, 64]


def test_any_range_has_an_axis():
  ranges = ((0.0,), (0.0, 0.0), (1e300, -1e300), (5, 5.0000001), (1e308, -1e308))
  charts = [
    chart.data(Measure("x", "x"), {"run": Curves(by_name={"x": {"train": curve(*r)}})})
    for r in ranges
  ]
  for figure in draw(*charts):
    attributes = [v for e in figure.iter() for v in e.attrib.values()]
    assert not any("NaN" in value or "Infinity" in value for value in attributes)


def test_ticks_are_round_and_numbers_short():
  for values, ticks in (
    ((0.0, 1.0), ["0", "0.5", "1"]),
    ((0.93, 3.1), ["1", "2", "3"]),
    ((0.0, 40_000.0), ["0", "20,000", "40,000"]),
    ((1.4e6, 3.4e6), ["2M", "3M"]),
    ((0.0, 1e-7), ["0", "5e-8", "1e-7"]),
    ((1.0, 1.0), ["1"]),
    ((0.0, 0.0), ["0"]),
  ):
    curves = Curves(by_name={"x": {"train": curve(*values)}})
    (figure,) = draw(chart.data(Measure("x", "x"), {"run": curves}))
    shown = [t.text for t in figure.iter("text") if t.get("class") == "y"]
    assert shown == ticks
