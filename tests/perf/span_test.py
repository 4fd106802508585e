import pytest

from tunix.perf.span import Span, SpanGroup, busy_seconds


def tree() -> Span:
  """step 0..10: rollout 1..4 with two parts, update 5..9."""
  parts = [Span("part", 1.0, 2.0), Span("part", 2.0, 3.5)]
  inner = [Span("rollout", 1.0, 4.0, parts), Span("update", 5.0, 9.0)]
  return SpanGroup("step", 0.0, 10.0, inner)


def test_a_span_knows_its_seconds():
  step = tree()
  assert step.duration == 10.0 and step.ended
  assert [s.duration for s in step.find_all("part")] == [1.0, 1.5]
  assert [s.name for s in step.below()] == ["rollout", "part", "part", "update"]
  assert step.find_all("step") == [], "it is not inside itself"


def test_an_open_span_has_no_duration():
  span = Span("rollout", 1.0)
  assert not span.ended
  with pytest.raises(ValueError, match="'rollout' is open"):
    _ = span.duration


def test_a_tree_prints_as_lines():
  lines = str(tree()).splitlines()
  assert lines[:3] == [
    "step: 10000.000 ms",
    "  rollout: 3000.000 ms",
    "    part: 1000.000 ms",
  ]
  assert str(Span("x", 0.0)) == "x: open"


def test_time_that_overlaps_counts_once():
  # [0, 2] and [1, 3] and [1, 1.5] cover 3 s, [5, 6] one more.
  spans = [(5.0, 6.0), (1.0, 3.0), (0.0, 2.0), (1.0, 1.5)]
  assert busy_seconds([Span("x", *ends) for ends in spans]) == 4.0
  assert busy_seconds([]) == 0.0
