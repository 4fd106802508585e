"""A full disk, and what was acknowledged before."""

import contextlib
import resource
import types
from unittest import mock

import numpy as np
import pytest

from tests.serve.fake_engine import FakeDriver
from tests.tinker.app_test import Client
from tests.tinker.serving import base
from tests.tinker.state.turns_test import (
  Computer,
  Engine,
  request,
  result_of,
  sampler_of,
  samples,
  until,
  worker_of,
)
from tunix.serve.app import make_app
from tunix.serve.settings import ServeSettings
from tunix.tinker import app as tinker_app
from tunix.tinker.protocol.results import Result
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.work.executor import Executor


@contextlib.contextmanager
def full(size=0):
  """No file can grow beyond a size."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("part", [0, 30])  # bytes of the record that fit
def test_a_run_outlives_a_full_disk(tmp_path, part, caplog):
  made, computer = worker_of(tmp_path, "a0", snapshot_steps=1), Computer()
  computer.arrays_of = lambda run: {"a": np.zeros(4096)}
  made.start(computer)
  run = made.run("a", "a0")
  made.accept("a", "a0", 0, request("x", 9))
  until(lambda: run.done == 0)
  (file,) = tmp_path.rglob("journal-0")
  with full(file.stat().st_size + part), pytest.raises(OSError):
    made.accept("a", "a0", 1, request("long", 9))
  made.accept("a", "a0", 1, request("long", 9))
  made.accept("a", "a0", 2, request("x", 9))
  assert computer.begun.wait(30)
  run.state, run.steps = types.SimpleNamespace(gradient=None), 1  # a state is due
  with full(file.stat().st_size + part):
    computer.go.set()
    until(lambda: run.done == 2)
    assert run.result(1).error is None  # though it cannot be written
    until(lambda: "the state of a0 cannot be written" in caplog.text)
  made.accept("a", "a0", 3, request("x", 9))
  until(lambda: run.done == 3 and (run.folder / "current").exists())
  made.close()
  made.close_files()
  again = worker_of(tmp_path)
  found = again.run("a", "a0")
  assert found.last == 3 and sorted(found.results) == [0, 1, 2, 3]
  again.close_files()


def test_samples_outlive_a_full_disk(tmp_path):
  engine = Engine("a:1")
  made = sampler_of(tmp_path, engine)
  made.accept("a:1", samples(1))
  until(lambda: engine.rows)
  with full((tmp_path / "requests").stat().st_size + 20):
    with pytest.raises(OSError):
      made.accept("a:2", samples(1))
    engine.held = ()
    found = result_of(made, "a:1")
  made.accept("a:2", samples(1))
  result_of(made, "a:2")
  made.close()
  again = sampler_of(tmp_path, Engine())
  for id in ("a:1", "a:2"):  # the first one is computed again
    same = result_of(again, id).arrays["tokens"] == found.arrays["tokens"]
    assert same.all()
  again.close()


@pytest.mark.parametrize("failing", ["RecordFile", "io.write_atomic"])
def test_requests_outlive_a_state_that_is_not_taken_into_use(
  tmp_path, monkeypatch, failing
):
  made = worker_of(tmp_path, "a0")
  made.accept("a", "a0", 0, request("x", 1))
  run = made.run("a", "a0")
  run.finish(0, Result())
  run.write_state({})
  with monkeypatch.context() as patch:
    patch.setattr(
      f"tunix.tinker.state.runs.{failing}", mock.Mock(side_effect=OSError("no"))
    )
    with pytest.raises(OSError, match="no"):
      run.switch()
  made.accept("a", "a0", 1, request("x", 1))
  run.close()
  assert worker_of(tmp_path).run("a", "a0").pending == 1


def test_a_result_that_cannot_be_written_costs_no_start(tmp_path):
  made = worker_of(tmp_path, "a0")
  made.accept("a", "a0", 0, request("x", 1))
  made.close_files()
  (file,) = tmp_path.rglob("journal-0")
  for _ in range(3):
    run = worker_of(tmp_path).run("a", "a0")
    assert run.begin(0) == 0
    with full(file.stat().st_size + 1000):
      run.finish(0, Result(arrays={"logprobs": np.zeros(4096)}))
    run.close()


def test_samples_that_cannot_be_written_cost_no_start(tmp_path):
  for number in range(3):
    engine = Engine("a:1")
    made = sampler_of(tmp_path, engine, max_starts=2)
    if number == 0:
      made.accept("a:1", samples(100))
    until(lambda engine=engine: engine.rows)
    with full((tmp_path / "requests").stat().st_size + 1000):
      engine.held = ()
      assert result_of(made, "a:1").error is None
    made.close()


def test_a_request_on_a_full_disk_is_refused_by_name(tmp_path, monkeypatch):
  monkeypatch.setattr(Executor, "execute", lambda *_: (Result(), True))
  service = Service(base(), TinkerSettings(root=tmp_path), name="toy")
  driver = FakeDriver(Engine()).start()
  app = make_app(driver, ServeSettings(), more=tinker_app.routes(service))
  ann = Client(app, "tml-key")
  session = ann.post("create_session").json()["session_id"]
  more = {"base_model": "toy", "lora_config": {"rank": 1}, "model_seq_id": 0}
  for path, body in (
    ("create_session", {}),
    ("create_model", {"session_id": session, **more}),
  ):
    with full():
      answer = ann.post(path, **body)
    assert answer.status_code == 503 and "cannot write" in answer.text
    assert ann.post(path, **body).status_code == 200
  service.close()
  driver.stop(10)
