"""What is kept of results, and which adapters the engine holds."""

import threading
import types

import numpy as np
import pytest

from tests.tinker.service_test import SPEC, final, row, same, send_all, service
from tunix.tinker.errors import GoneError, TinkerError
from tunix.tinker.protocol.results import Result, Results
from tunix.tinker.state import runs
from tunix.tinker.state.checkpoints import Place
from tunix.tinker.work.loaded_adapters import LoadedAdapters


def test_the_oldest_results_are_dropped():
  result = Result(arrays={"x": np.zeros(256)})
  assert result.nbytes == 1024 + 8 * 256
  found = Results[int](3 * result.nbytes)
  for number in (0, 1, 2, 1, 3):
    found[number] = result
  assert [n for n, _ in found.items()] == [2, 1, 3]
  found[4] = Result(arrays={"x": np.zeros(4096)})
  assert list(found) == [4]
  found.pop(4)
  found.pop(4)
  assert len(found) == 0 and found.get(4) is None


def test_results_that_nobody_asks_for_do_not_stay(tmp_path):
  made = service(tmp_path, max_result_bytes=4096)
  session = made.create_session("a", {})
  _, model = made.create_model("a", session, 0, SPEC)
  send_all(made, "a", model)
  assert made.wait("a", f"{model}:8", 60).error is None
  assert len(made.run("a", model).results) <= 4
  with pytest.raises(GoneError, match="newer ones fill max_result_bytes"):
    made.result("a", f"{model}:1")
  made.close()


def test_a_large_journal_is_cut_with_an_open_gradient(tmp_path, monkeypatch):
  """The gradient is in the state, and the run ends with the same bytes."""
  ends = []
  for large in (2**40, 0):
    monkeypatch.setattr(runs, "_LARGE", large)
    folder = tmp_path / str(large)
    made = service(folder, snapshot_steps=1000)
    session = made.create_session("a", {})
    _, model = made.create_model("a", session, 0, SPEC, seed=5)
    made.training.forward_backward("a", model, 1, row(0), "cross_entropy")
    assert made.wait("a", f"{model}:1", 60).error is None
    made.close()
    stored = made.run("a", model).stored_state()
    assert (stored is None) == bool(large)
    if stored is not None:
      assert any(name.startswith("gradient.") for name in stored)
    again = service(folder, snapshot_steps=1000)
    send_all(again, "a", model)
    ends.append(final(again, "a", model))
    again.close()
  assert same(*ends)


class Bank:
  """An engine with room for one adapter, whose loads wait for `go`."""

  def __init__(self):
    self.held, self.log = {}, []
    self.engine = types.SimpleNamespace(adapters=self.held)
    self.go, self.begins = threading.Event(), threading.Event()

  def call(self, function, timeout):
    return function(self)

  def load_adapter(self, name, adapters):
    if self.held:
      raise ValueError("the bank is full")
    self.begins.set()
    assert self.go.wait(60)
    self.held[name] = adapters
    self.log.append((name, adapters))

  def unload_adapter(self, name):
    del self.held[name]


def test_a_load_holds_up_nobody_and_room_is_made():
  bank = Bank()
  adapters = LoadedAdapters(bank, lambda place: f"disk {place.name}")
  a, b = (Place("m", "sampler_weights", name) for name in "ab")
  thread = threading.Thread(target=adapters.use, args=(str(a),))
  thread.start()
  assert bank.begins.wait(60)
  adapters.hand_over(a, "newer")  # returns although the engine is busy
  bank.go.set()
  thread.join(60)
  assert not thread.is_alive()
  # The checkpoint was written anew during the load: the request has the newer one.
  assert bank.log == [(str(a), "disk a"), (str(a), "newer")]
  other = threading.Thread(target=adapters.use, args=(str(b),))
  other.start()
  other.join(0.1)
  assert other.is_alive() and str(a) in bank.held  # a is in use
  adapters.release(str(a))
  other.join(60)
  assert bank.held == {str(b): "disk b"}
  adapters.close()
  with pytest.raises(TinkerError, match="the service ends"):
    adapters.use(str(b))
