"""Turns of tenants, and requests that end the process, without a model."""

import functools
import shutil
import threading
import time
import types
from concurrent.futures import wait

import numpy as np
from hypothesis import given, strategies as st

from tests.serve.fake_engine import FakeDriver, FakeEngine
from tunix.tinker.errors import TinkerError
from tunix.tinker.learning.learner import RowOutputs
from tunix.tinker.protocol.results import Result
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state.runs import Op
from tunix.tinker.state.turns import Room, Turns
from tunix.tinker.work.executor import Executor
from tunix.tinker.work.sampling import Sampler
from tunix.tinker.work.worker import Worker

MOST = 100


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, MOST), min_size=2))
def test_turns_share_tokens_and_not_requests(sizes):
  turns = Turns()
  for newcomer in ({}, {"idle": 7}):  # it was idle, and has saved nothing
    ready = sizes | newcomer
    got = dict.fromkeys(ready, 0)
    for _ in range(200):
      key = turns.next(ready)
      turns.charge(key, ready[key])
      got[key] += ready[key]
      assert max(got.values()) - min(got.values()) <= 2 * MOST


def test_a_large_wait_for_room_is_not_overtaken():
  room, order, go = Room(4), [], threading.Event()
  first = room.submit("a", 3, 1, go.wait)
  others = [("b", 4), ("a", 1), ("a", 2)]
  calls = [room.submit(*x, 1, functools.partial(order.append, x)) for x in others]
  gone = room.submit("b", 4, 10**6, list)
  assert gone.cancel() and order == []  # there is room for one, but the turn is b's
  go.set()
  wait([first, *calls], 10)
  assert order[0] == ("b", 4) and sorted(order) == sorted(others)
  room.close()


def test_a_cancelled_wait_gives_way_and_pays_nothing():
  room, go = Room(2), threading.Event()
  first = room.submit("a", 1, 1, go.wait)
  large = room.submit("b", 2, 10**6, list)
  small = room.submit("b", 1, 1, list)
  assert not small.done()
  large.cancel()
  room.start_next()
  assert small.result(10) == []
  go.set()
  assert first.result(10) and room._turns._got["b"] < 10
  room.close()


def until(condition, seconds=30):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.001)


class Computer:
  """An executor that writes down what it computes, and stops at requests "long"."""

  def __init__(self):
    self.order, self.begun, self.go = [], threading.Event(), threading.Event()

  def execute(self, run, op, known):
    if known is not None:
      return known, True
    self.order.append((run.owner, run.id))
    if op.kind == "unload_model":
      run.is_unloaded = True
      return Result(values={"type": op.kind}), True
    if op.kind == "long":
      self.begun.set()
      self.go.wait(30)
    return Result(), True

  def arrays_of(self, run):
    return {}


def worker_of(folder, *runs, **settings):
  made = Worker(folder, TinkerSettings(**settings))
  for id in runs:
    spec = {"rank": 1, "train_attn": True, "train_mlp": True}
    made.create({"id": id, "owner": id[0], "spec": spec})
  return made


def request(kind, tokens):
  return Op(kind=kind, arrays={"tokens": np.zeros(tokens, np.int32)})


def test_a_tenant_with_many_models_and_large_requests_has_one_share(tmp_path):
  made = worker_of(tmp_path, "a0", "a1", "a2", "b0")
  for run in ("a0", "a1", "a2"):
    for number in range(8):
      made.accept("a", run, number, request("x", 2000))
  for number in range(30):
    made.accept("b", "b0", number, request("x", 100))
  computer = Computer()
  made.start(computer)
  until(lambda: made.run("b", "b0").done == 29)
  made.close()
  made.close_files()
  # 356 of b's tokens to 2256 of a's: a has a sixth of the turns, on all its models.
  before = computer.order[
    : len(computer.order) - computer.order[::-1].index(("b", "b0"))
  ]
  of_a = [run for owner, run in before if owner == "a"]
  assert 4 <= len(of_a) <= 6 and set(of_a) == {"a0", "a1", "a2"}


def begin_and_kill(folder, copy, stops=False):
  """Begins the requests of a folder, and ends the process.

  Returns True if the request "long" was begun, and the results.
  """
  made, computer = worker_of(folder, max_starts=2), Computer()
  made.start(computer)
  run = made.run("a", "a0")
  until(lambda: computer.begun.is_set() or run.done == 2)
  closing = threading.Thread(target=made.close)
  if stops:
    closing.start()
    until(lambda: made.stops)
    with made.changed:
      pass
  shutil.copytree(folder, copy)  # what a kill at this instant leaves
  computer.go.set()
  made.close()
  made.close_files()
  return computer.begun.is_set(), run.results


def test_a_request_that_ends_the_process_is_not_begun_for_ever(tmp_path):
  made = worker_of(tmp_path / "0", "a0")
  for number, kind in enumerate(("x", "long", "x")):
    made.accept("a", "a0", number, request(kind, 1))
  made.close_files()
  for number in range(4):
    # The second one is SIGTERM, which is no fault of the request.
    is_begun, found = begin_and_kill(
      tmp_path / str(number), tmp_path / str(number + 1), stops=number == 1
    )
    assert is_begun == (number < 3)
  assert "ended 2 times while it computed this request" in found.get(1).error
  assert (found.get(1).category, found.get(2).error) == ("server", None)


class Numbers:
  """A learner whose adapter is a number. It refuses updates by more than 5."""

  def init(self, spec, seed):
    return types.SimpleNamespace(weight=0, gradient=None)

  def forward_backward(self, spec, state, rows, loss, config, *, backward):
    state.gradient = (state.gradient or 0) + loss
    return [RowOutputs(np.zeros(1), np.zeros(1))]

  def update(self, state, params):
    gradient, state.gradient = state.gradient, None
    if gradient is None or gradient > 5:
      raise TinkerError("refused")
    state.weight -= gradient
    return {}


@given(st.lists(st.sampled_from([None, 1, 10]), max_size=9))
def test_a_restart_repeats_refused_updates_with_the_same_weights(gradients):
  executor, weights = Executor(Numbers(), None, 1, None), []
  arrays = {x: np.zeros(0, np.int32) for x in ("lengths", "tokens")}
  ops = [Op(kind="create_model")] + [
    Op(kind="optim_step", args={"learning_rate": 1.0})
    if loss is None
    else Op(
      kind="forward_backward", args={"loss_fn": loss, "config": {}}, arrays=arrays
    )
    for loss in gradients
  ]
  results = [None] * len(ops)
  for _ in range(2):
    run = types.SimpleNamespace(
      id="a0", is_unloaded=False, state=None, spec=None, info={"seed": 0}, steps=0
    )
    results = [executor.execute(run, op, x)[0] for op, x in zip(ops, results)]
    weights.append((run.state.weight, run.state.gradient))
  assert weights[0] == weights[1]


def test_unloaded_models_keep_few_results(tmp_path):
  ids = ("a0", "a1", "a2")
  made = worker_of(tmp_path, *ids, max_models=1)
  made.start(Computer())
  for id in ids:
    made.accept("a", id, 0, request("x", 1))
    made.accept("a", id, 1, Op(kind="unload_model"))
    until(lambda id=id: made.run("a", id).done == 1)
  made.close()
  again = worker_of(tmp_path, max_models=1)
  for found in (made, again):
    assert [list(found.run("a", id).results) for id in ids] == [[1], [1], [0, 1]]
    assert [found.run("a", id).unload for id in ids] == [1, 1, 1]
    found.close_files()


class Engine(FakeEngine):
  """An engine that holds some requests up."""

  def __init__(self, *held):
    super().__init__()
    self.held = held

  def _advance(self, row):
    if row.ticket.id in self.held:
      time.sleep(0.001)
    else:
      super()._advance(row)


def sampler_of(folder, engine, max_starts=3):
  driver = FakeDriver(engine).start()
  return Sampler(driver, folder, dict, lambda: None, lambda id: id[0], max_starts)


def samples(count):
  args = {"num_samples": count, "max_tokens": 4, "path": None, "seed": 0}
  args |= {"temperature": 0.0, "top_k": None, "top_p": None, "stop_ids": ()}
  args |= {"stop_strings": (), "prompt_logprobs": False, "last_n": None}
  args |= {"topk_prompt": 0, "topk_sample": 0}
  return Op(kind="sample", args=args, arrays={"prompt": np.array([1, 2], np.int32)})


def result_of(made, id):
  until(lambda: made.result(id) is not None)
  return made.result(id)


def running(engine):
  return sorted(row.ticket.id for row in list(engine.rows))


def test_a_large_sampling_request_leaves_turns_to_others(tmp_path):
  engine = Engine("a:1")
  made = sampler_of(tmp_path, engine)
  made.accept("a:1", samples(1024))
  until(lambda: len(engine.rows) == 32)  # four for each slot, and no more
  made.accept("b:1", samples(16))
  for tenant in "cdef":
    made.accept(f"{tenant}:1", samples(64))
  names = [x.name for x in threading.enumerate()]
  assert sum(x.startswith("tinker samples") for x in names) <= 32
  engine.held = ()
  result_of(made, "b:1")
  assert [x.id for x in engine.submitted].index("b:1") <= 3
  assert result_of(made, "a:1").arrays["lengths"].tolist() == [4] * 1024
  firsts = [x.first_row for x in engine.submitted if x.id == "a:1"]
  assert sorted(firsts) == list(range(0, 1024, 16))
  made.close()


def test_only_the_sampling_request_that_ends_the_process_fails(tmp_path):
  """The last start of a request is made alone, so its neighbors get their results."""
  ids = ("a:1", "a:bad", "b:1")
  for number, held in enumerate((ids, ids, ("a:bad",), ())):
    engine = Engine(*held)
    made = sampler_of(tmp_path / str(number), engine)
    if number == 0:
      for id in ids:
        made.accept(id, samples(1))
    if number == 3:
      assert "ended 3 times" in result_of(made, "a:bad").error
      assert [result_of(made, id).error for id in ("a:1", "b:1")] == [None, None]
    else:
      alone = ["a:bad"] if number == 2 else list(ids)
      until(lambda engine=engine, alone=alone: running(engine) == alone)
      shutil.copytree(tmp_path / str(number), tmp_path / str(number + 1))
    made.close()


def test_a_stop_is_no_start_and_a_cancelled_request_ends(tmp_path):
  for number in range(4):
    engine = Engine("a:1")
    made = sampler_of(tmp_path, engine, max_starts=2)
    if number == 0:
      made.accept("a:1", samples(100))
    until(lambda engine=engine: len(engine.rows) >= 16)
    if number == 3:
      made.cancel("a:1")
      assert "was cancelled" in result_of(made, "a:1").error
      assert len(engine.submitted) < 7
    made.close()
