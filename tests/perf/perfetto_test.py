import json

import jax

from tunix.perf import perfetto
from tunix.perf.perfetto import PerfettoTraceWriter
from tunix.perf.span import Span
from tunix.perf.trace import PerfTracer


def events(path) -> list[dict]:
  return json.loads(path.read_text())


def test_spans_become_complete_events(tmp_path):
  writer = PerfettoTraceWriter(tmp_path / "logs", process=3, epoch=100.0)
  writer.add("host", Span("rollout", 1.0, 1.5))
  writer.add("actor", Span("train_step", 1.25, 2.0, devices=("cpu:0", "cpu:1")))
  writer.flush()
  path = tmp_path / "logs" / "perf_trace_process3.json"
  assert writer.path == path
  named, host, first, actor, second = events(path)
  assert named["args"] == {"name": "process 3"} and named["name"] == "process_name"
  assert [(e["ph"], e["name"], e["tid"]) for e in (host, actor)] == [
    ("M", "thread_name", 0),
    ("M", "thread_name", 1),
  ]
  assert host["args"] == {"name": "host"} and actor["args"] == {"name": "actor"}
  assert first == {
    "ph": "X",
    "cat": "host",
    "name": "rollout",
    "ts": 101_000_000,
    "dur": 500_000,
    "pid": 3,
    "tid": 0,
  }
  assert (second["ts"], second["dur"]) == (101_250_000, 750_000)
  assert second["args"] == {"devices": ["cpu:0", "cpu:1"]} and second["cat"] == "device"


def test_the_file_is_whole_after_every_flush(tmp_path):
  writer = PerfettoTraceWriter(tmp_path)
  for n in range(3):
    writer.add("host", Span(f"s{n}", n, n + 0.5))
    writer.flush()
    writer.flush()  # nothing new
    found = [e["name"] for e in events(tmp_path / "perf_trace.json") if e["ph"] == "X"]
    assert found == [f"s{i}" for i in range(n + 1)]


def test_another_runs_file_stays(tmp_path):
  for name in ("first", "second"):
    writer = PerfettoTraceWriter(tmp_path)
    assert writer.path is None, "nothing is made before there is a span"
    writer.add("host", Span(name, 0.0, 1.0))
    writer.flush()
  assert events(tmp_path / "perf_trace.json")[-1]["name"] == "first"
  assert events(tmp_path / "perf_trace_2.json")[-1]["name"] == "second"


def test_a_file_has_an_end(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(perfetto, "MOST_EVENTS", 4)
  writer = PerfettoTraceWriter(tmp_path)
  for _ in range(3):
    for n in range(3):
      writer.add("host", Span(f"s{n}", n, n + 0.5))
    writer.flush()
  assert len(events(tmp_path / "perf_trace.json")) == 4
  assert caplog.text.count("is full") == 1


def test_every_process_writes_its_own_file(tmp_path, monkeypatch):
  for process in range(2):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    tracer = PerfTracer(trace_dir=tmp_path)
    with tracer.span_group(f"phase {process}"):
      pass
    tracer.export()
  for process, name in enumerate(("perf_trace.json", "perf_trace_process1.json")):
    spans = [e for e in events(tmp_path / name) if e["ph"] == "X"]
    assert [(e["name"], e["pid"]) for e in spans] == [(f"phase {process}", process)]
