"""What trace files of runs are checked for."""

import contextlib
import json
import pathlib
from typing import Any

import jax

from tunix.perf import span, trace


def events(
  folder: pathlib.Path, name: str = "perf_trace.json"
) -> dict[str, list[dict]]:
  """By timeline the complete events of a file whose form is right."""
  threads: dict[int, str] = {}
  out: dict[str, list[dict]] = {}
  for event in json.loads((folder / name).read_text()):
    assert event["pid"] == 0 and isinstance(event["tid"], int) and event["name"]
    if event["ph"] == "M":
      assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
      if event["name"] == "thread_name":
        threads[event["tid"]] = event["args"]["name"]
      continue
    assert event["ph"] == "X"
    assert isinstance(event["ts"], int) and isinstance(event["dur"], int)
    assert event["ts"] > 1.6e15 and event["dur"] >= 0, "microseconds since the epoch"
    out.setdefault(threads[event["tid"]], []).append(event)
  return out


def inside(event: dict, outer: list[dict]) -> list[dict]:
  """Those of `outer` that hold all of the event."""
  end = event["ts"] + event["dur"]
  return [o for o in outer if o["ts"] <= event["ts"] and end <= o["ts"] + o["dur"]]


def named(events: list[dict], name: str) -> list[dict]:
  return [event for event in events if event["name"] == name]


def check_nesting(events: list[dict]) -> None:
  """Two events of a timeline lie one in the other or beside each other, and what lies
  in another takes no longer than it, all together."""
  for a in events:
    for b in events:
      apart = a["ts"] + a["dur"] <= b["ts"] or b["ts"] + b["dur"] <= a["ts"]
      assert apart or inside(a, [b]) or inside(b, [a]), (a, b)


class Cost:
  """What tracing did in a block, counted."""

  def __init__(self):
    self.phases = self.spans = self.clock = self.waits = 0


@contextlib.contextmanager
def counted(monkeypatch: Any):
  """Counts phases and spans made, reads of a tracer's clock, and waits for a device by
  anybody."""
  cost = Cost()

  def counting(real: Any, what: str) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
      setattr(cost, what, getattr(cost, what) + 1)
      return real(*args, **kwargs)

    return wrapped

  with monkeypatch.context() as patch:
    for owner, name, what in (
      (trace._Phase, "__init__", "phases"),
      (span.Span, "__init__", "spans"),
      (jax, "block_until_ready", "waits"),
    ):
      patch.setattr(owner, name, counting(getattr(owner, name), what))
    clock = counting(trace.time.perf_counter, "clock")
    patch.setitem(trace.PerfTracer.__init__.__kwdefaults__, "clock", clock)
    yield cost
