import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.perf.clocks import Clock
from tunix.perf import trace
from tunix.perf.metrics import PerfMetricsOptions
from tunix.perf.trace import NoopTracer, PerfTracer, make_tracer


def spans(tracer: PerfTracer) -> dict[str, list[tuple]]:
  """By timeline (name, begin, end) of every span that has ended, without export."""
  tracer.synchronize()
  return {
    id: [(s.name, s.begin, s.end) for s in root.below()]
    for id, root in tracer._ended().items()
  }


def test_spans_nest_and_sum_up():
  clock = Clock()
  tracer = PerfTracer(clock=clock)
  with tracer.span_group("step"):
    clock.now += 1
    with tracer.span("rollout", "rollout"):
      clock.now += 3
    for _ in range(2):
      with tracer.span_group("update"):
        clock.now += 2
    clock.now += 0.5
  assert spans(tracer) == {
    "host": [
      ("step", 0, 8.5),
      ("rollout", 1, 4),
      ("update", 4, 6),
      ("update", 6, 8),
    ],
    "rollout": [("rollout", 1, 4)],
  }
  assert tracer.all_devices == ["rollout"]
  assert tracer.export() == {
    "perf/step_sec": 8.5,
    "perf/rollout_sec": 3,
    "perf/update_sec": 4,
    "perf/busy/rollout_sec": 3,
  }
  assert tracer.export() == {"perf/busy/rollout_sec": 0}, "each span is told once"


def test_devices_are_done_when_their_arrays_are_and_work_in_order(monkeypatch):
  clock, ready = Clock(), {"a": threading.Event(), "b": threading.Event()}
  monkeypatch.setattr(trace.jax, "block_until_ready", lambda x: ready[x[0]].wait())
  tracer = PerfTracer(clock=clock)
  for name in "ab":  # dispatched in 0..1 and 1..2; done at 5 and 9
    with tracer.span(name, "actor") as span:
      clock.now += 1
      span.device_end([name])
  first = tracer._last["actor"]
  clock.now = 5.0
  ready["a"].set()
  while len(tracer._open["actor"][-1].inner) < 1:
    assert not first.done()
  clock.now = 9.0
  ready["b"].set()
  assert spans(tracer) == {
    "host": [("a", 0, 1), ("b", 1, 2)],
    "actor": [("a", 0, 5), ("b", 5, 9)],
  }


def test_where_devices_are_named():
  def lanes(tracer, **options):
    with tracer.span("x", **options) as span:
      span.device_end(jnp.ones(2))
    return spans(tracer).keys() - {"host"}

  device = jax.devices()[:2]
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
  assert lanes(PerfTracer()) == {"devices"}
  assert lanes(PerfTracer("mine")) == lanes(PerfTracer(), devices="mine") == {"mine"}
  assert lanes(PerfTracer(), devices=device) == {"cpu:0,cpu:1"}
  assert lanes(PerfTracer(mesh)) == {"cpu:0,cpu:1"}
  tracer = PerfTracer()
  with tracer.span("host alone"):
    pass
  assert tracer.all_devices == []


def test_a_role_has_its_own_timeline_and_exports_nothing(capsys):
  whole = PerfTracer(clock=Clock())
  role = whole.on("critic")
  with role.span("train_step"), role.span_group("inner"):
    pass
  with role.on("actor").span("train_step"):
    pass
  role.synchronize()
  assert role.all_devices == whole.all_devices == ["critic", "actor"]
  assert role.export() == {}
  role.print()
  assert "critic: open\n  train_step: 0.000 ms" in capsys.readouterr().out
  assert "perf/busy/critic_sec" in whole.export()


def test_what_has_ended_is_exported_inside_of_what_is_open():
  clock = Clock()
  tracer = PerfTracer(clock=clock)
  with tracer.span_group("experiment"):
    for seconds in (1, 2):
      with tracer.span_group("step"):
        clock.now += seconds
      assert tracer.export() == {"perf/step_sec": seconds}
  assert tracer.export() == {"perf/experiment_sec": 3}


def test_a_phase_that_fails_is_noted_and_the_failure_goes_on():
  clock = Clock()
  tracer = PerfTracer(clock=clock)
  with pytest.raises(KeyError), tracer.span_group("step"):
    clock.now += 1
    raise KeyError
  assert tracer.export() == {"perf/step_sec": 1}


def test_threads_have_timelines_of_their_own():
  clock = Clock()
  tracer = PerfTracer(clock=clock)

  def work():
    with tracer.span_group("rewards"):
      clock.now += 2

  with tracer.span_group("step"):
    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
  assert spans(tracer) == {"host": [("step", 0, 2)], "host:worker": [("rewards", 0, 2)]}
  assert tracer.all_devices == []
  assert tracer.export() == {"perf/step_sec": 2, "perf/rewards_sec": 2}


def test_an_export_function_of_the_users():
  tracer = PerfTracer(
    export_fn=lambda query: {
      "perf/steps": len(query.main().all_groups("step").get()),
      "perf/pair": (1.5, np.mean),  # a metric and how to reduce it
    }
  )
  for _ in range(3):
    with tracer.span_group("step"):
      pass
  assert tracer.export() == {"perf/steps": 3, "perf/pair": 1.5}


def test_the_trace_file_holds_what_has_ended(tmp_path):
  tracer = PerfTracer(trace_dir=tmp_path)
  with tracer.span("train_step", "actor") as span:
    span.device_end(jnp.ones(2))
  tracer.synchronize()
  events = json.loads((tmp_path / "perf_trace.json").read_text())
  whole = [e for e in events if e["ph"] == "X"]
  assert [(e["name"], e["cat"]) for e in whole] == [
    ("train_step", "host"),
    ("train_step", "device"),
  ]
  assert whole[1]["args"] == {"devices": ["cpu:0"]}


def test_settings_choose_the_tracer(tmp_path, caplog):
  assert type(make_tracer(None, tmp_path)) is NoopTracer
  off = PerfMetricsOptions(enable_perf_v1=False, trace_dir=str(tmp_path))
  assert type(make_tracer(off, tmp_path)) is NoopTracer

  def written(options, log_dir):
    tracer = make_tracer(options, log_dir)
    with tracer.span_group("x"):
      pass
    metrics = tracer.export()
    return sorted(p.parent.name for p in tmp_path.rglob("*.json")), metrics

  assert written(PerfMetricsOptions(enable_trace_writer=False), tmp_path)[0] == []
  assert not caplog.text
  assert written(PerfMetricsOptions(), None)[0] == []
  assert "no trace file is written: set trace_dir" in caplog.text
  assert written(PerfMetricsOptions(), tmp_path / "logs")[0] == ["logs"]
  there = PerfMetricsOptions(
    trace_dir=str(tmp_path / "there"), custom_export_fn_path="tests.perf.trace_test:one"
  )
  assert written(there, tmp_path / "logs") == (["logs", "there"], {"perf/one": 1})
  with pytest.raises(ValueError, match="custom_export_fn"):
    make_tracer(there, None, one)


def one(query):
  del query
  return {"perf/one": 1}


def test_a_noop_tracer_notes_nothing(capsys):
  tracer = NoopTracer()
  assert tracer.on("actor") is tracer
  with tracer.span("x", "actor") as span, tracer.span_group("y") as other:
    span.device_end([1])
  assert span is other, "one object for all phases"
  tracer.synchronize()
  tracer.print()
  assert tracer.export() == {} and tracer.all_devices == []
  assert not capsys.readouterr().out
