"""The engine's thread: calls, pauses, and its end."""

import contextlib
import threading
import time

import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineDead, EngineRequest

SOON = 60.0  # seconds; a compilation on a busy machine is the longest part


@pytest.fixture(scope="module")
def model():
  return toys.model(vocab_size=600, num_layers=1)


@pytest.fixture
def driver(model):
  config = EngineConfig(max_tokens=64, slots=4, prefill_tokens=32)
  made = Driver(Engine(model, toys_text.chat_tokenizer(), config))
  made.start()
  yield made
  made.stop(SOON)


def request(tokens, **rules):
  return EngineRequest(prompt=np.arange(1, 20), max_tokens=tokens, stop_ids=(), **rules)


def finished(driver, ticket):
  return driver.engine.collect(ticket, SOON)


def test_requests_of_several_threads_are_answered(driver):
  done = []

  def ask(number):
    ticket = driver.engine.submit(request(5 + number, num_samples=2))
    done.append([len(c.tokens) for c in finished(driver, ticket)] == [5 + number] * 2)

  threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(SOON)
  assert done == [True] * 6


def test_an_idle_driver_does_not_spin(driver):
  finished(driver, driver.engine.submit(request(3)))
  launches = driver.engine.stats().launches
  start = time.process_time()
  time.sleep(0.5)
  assert time.process_time() - start < 0.25
  assert driver.engine.stats().launches == launches


def test_a_call_runs_between_launches_and_returns_or_raises(driver):
  assert driver.call(lambda engine: engine.config.slots, SOON) == 4
  with pytest.raises(ZeroDivisionError):
    driver.call(lambda engine: 1 / 0, SOON)
  assert driver.alive


@contextlib.contextmanager
def occupied(driver):
  """The engine's thread does not go on until the end of the block."""
  begun, over = threading.Event(), threading.Event()
  slow = lambda engine: (begun.set(), over.wait(SOON))
  waiting = threading.Thread(target=lambda: driver.call(slow, SOON))
  waiting.start()
  assert begun.wait(SOON)
  yield
  over.set()
  waiting.join(SOON)


def test_a_call_that_waits_too_long_is_dropped(driver):
  ran = []
  with occupied(driver):
    with pytest.raises(TimeoutError, match=r"not come to the call within 0\.05 s"):
      driver.call(ran.append, 0.05)
    with pytest.raises(TimeoutError, match="not come to the call"):
      driver.pause("keep", timeout=0.05)
    with pytest.raises(TimeoutError, match="not come to the call"):
      driver.pause("wait", timeout=0.05)
  assert driver.call(lambda engine: not ran and not driver.is_paused, SOON)
  with pytest.raises(TimeoutError, match=r"did not end within 0\.05 s. It runs on"):
    driver.call(lambda engine: time.sleep(0.5), 0.05)


def test_the_engines_thread_does_not_wait_for_itself(driver):
  with pytest.raises(RuntimeError, match="this is that thread"):
    driver.call(lambda engine: driver.call(lambda _: None, SOON), SOON)
  assert driver.alive


def test_keep_freezes_running_completions(driver):
  ticket = driver.engine.submit(request(40))
  driver.pause("keep")
  assert driver.is_paused
  drawn = driver.engine.stats().generated_tokens
  late = driver.engine.submit(request(3))
  time.sleep(0.2)
  assert driver.engine.stats().generated_tokens == drawn
  driver.resume()
  assert not driver.is_paused
  assert len(finished(driver, ticket)[0].tokens) == 40
  assert len(finished(driver, late)[0].tokens) == 3


def test_wait_ends_running_completions_and_starts_none(driver):
  ticket = driver.engine.submit(request(40))
  first = ticket.get(SOON)
  assert first.finish_reason is None  # it runs
  driver.pause("wait")
  assert driver.engine.stats().running == 0
  assert len(first.tokens) + len(rest_of(ticket)) == 40
  late = driver.engine.submit(request(3))
  time.sleep(0.2)
  assert driver.engine.stats().waiting == 1
  driver.resume()
  assert len(finished(driver, late)[0].tokens) == 3


def test_a_wait_that_is_too_short_goes_on(driver, monkeypatch):
  monkeypatch.setattr(driver.engine, "step", lambda: time.sleep(0.01) or True)
  waiting = driver.engine.submit(request(40))
  monkeypatch.setattr(type(driver.engine), "has_work", True)
  with pytest.raises(TimeoutError, match=r"still running after 0\.2 s"):
    driver.pause("wait", timeout=0.2)
  assert not driver.is_paused
  paused = threading.Thread(target=lambda: driver.pause("wait", timeout=SOON))
  paused.start()
  while not driver.is_paused:
    time.sleep(0.01)
  driver.resume()  # ends the wait for completions, which would last for ever
  paused.join(SOON / 6)
  assert not paused.is_alive() and not driver.is_paused
  monkeypatch.undo()
  assert len(finished(driver, waiting)[0].tokens) == 40


def rest_of(ticket):
  """Tokens of the deltas that were not taken yet."""
  tokens = []
  while True:
    delta = ticket.get(SOON)
    tokens += list(delta.tokens)
    if delta.finish_reason:
      return tokens


def test_abort_ends_all_requests(driver):
  tickets = [driver.engine.submit(request(40)) for _ in range(6)]
  driver.pause("abort")
  for ticket in tickets:
    assert finished(driver, ticket)[0].finish_reason in ("cancelled", "length")
  assert driver.engine.stats().pages_free == driver.engine.stats().pages_total
  driver.resume()
  assert len(finished(driver, driver.engine.submit(request(3)))[0].tokens) == 3


def test_an_unknown_pause_is_refused(driver):
  with pytest.raises(ValueError, match="expected keep, abort or wait"):
    driver.pause("stop")


def test_a_failed_launch_ends_every_wait(driver, monkeypatch):
  def fail(*args):
    raise RuntimeError("the chip is gone")

  monkeypatch.setattr(driver.engine._device, "launch", fail)
  driver.pause("keep")  # so that all three arrive before the launch
  tickets = [driver.engine.submit(request(5)) for _ in range(3)]
  driver.resume()
  for ticket in tickets:
    with pytest.raises(EngineDead, match="the chip is gone"):
      ticket.get(SOON)
  driver._thread.join(SOON)
  assert not driver.alive and "the chip is gone" in str(driver.failure)
  with pytest.raises(EngineDead, match="the chip is gone"):
    driver.engine.submit(request(5))
  with pytest.raises(EngineDead, match="the chip is gone"):
    driver.call(lambda engine: None, SOON)


def test_an_engine_that_fails_in_a_pause_is_reported(driver, monkeypatch):
  def fail(*args):
    raise RuntimeError("the chip is gone")

  monkeypatch.setattr(driver.engine._device, "launch", fail)
  driver.pause("keep")
  ticket = driver.engine.submit(request(5))
  with pytest.raises(EngineDead, match="the chip is gone"):
    driver.call(lambda engine: engine.step(), SOON)
  driver._thread.join(SOON)
  assert not driver.alive and "the chip is gone" in str(driver.failure)
  with pytest.raises(EngineDead, match="the chip is gone"):
    ticket.get(SOON)


def test_stop_ends_open_requests(model):
  config = EngineConfig(max_tokens=64, slots=4, prefill_tokens=32)
  driver = Driver(Engine(model, toys_text.chat_tokenizer(), config))
  driver.start()
  driver.pause("keep")
  ticket = driver.engine.submit(request(5))
  driver.stop(SOON)
  with pytest.raises(EngineDead, match="the engine was closed"):
    ticket.get(SOON)
  with pytest.raises(EngineDead, match="was stopped"):
    driver.call(lambda engine: None, SOON)
  with pytest.raises(RuntimeError, match="started already"):
    driver.start()
