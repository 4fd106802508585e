import pytest

from tunix.perf.metrics import PerfMetricsOptions, PerfSpanQuery
from tunix.perf.span import Span


def query() -> PerfSpanQuery:
  """Two steps of the host, with updates of 2 s, and 1 s and 3 s; 4 s of the actor."""
  first = Span("step", 0.0, 4.0, [Span("update", 1.0, 3.0)])
  second = Span("step", 4.0, 9.0, [Span("update", 4.0, 5.0), Span("update", 5.0, 8.0)])
  return PerfSpanQuery(
    {
      "host": Span("host", 0.0, inner=[first, second]),
      "actor": Span("actor", 0.0, inner=[Span("train_step", 1.0, 5.0)]),
    }
  )


def seconds(found: PerfSpanQuery) -> list[float]:
  return [span.duration for span in found.get()]


def test_questions_to_the_spans():
  main = query()().main()
  assert seconds(main.all_groups("step")) == [4.0, 5.0]
  assert seconds(main.all_groups("step").last_group("update")) == [2.0, 3.0]
  assert seconds(main.all_groups("step").first_group("update")) == [2.0, 1.0]
  assert seconds(main.all_groups("step").nth_group("update", 1)) == [3.0]
  assert seconds(main.last_group("step").all_groups("update")) == [1.0, 3.0]
  assert main.first_group("step").all_groups("update").total() == 2.0
  assert main.first_group("nothing").get() == []


def test_timelines_are_asked_by_name():
  q = query()
  assert q.get_timeline_ids() == ["host", "actor"] and q.get_main_thread_id() == "host"
  assert seconds(q.timeline("actor").all_groups("train_step")) == [4.0]
  assert q.timeline("critic").all_groups("train_step").get() == []
  assert q.main()().get() == [], "a call forgets what was chosen"


def test_a_function_by_its_path():
  assert PerfMetricsOptions().export_fn() is None
  for path in ("tunix.perf.export:seconds", "tunix.perf.export.seconds"):
    named = PerfMetricsOptions(custom_export_fn_path=path).export_fn()
    assert named is not None and named(query())["perf/step_sec"] == 9.0


@pytest.mark.parametrize(
  "path",
  ["no_such_module:fn", "tunix.perf.export:nothing", "alone", "tunix.perf:__doc__"],
)
def test_a_path_without_a_function_is_refused(path):
  with pytest.raises(ValueError, match="custom_export_fn_path"):
    PerfMetricsOptions(custom_export_fn_path=path).export_fn()
