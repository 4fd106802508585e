"""Engines on their own devices behind one driver, on eight simulated devices."""

import contextlib
import threading
import time

import jax
import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.engine import replicas as replicas_lib
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.replicas import Replicas
from tunix.generate.engine.request import EngineDead, EngineRequest

SOON = 60.0  # seconds; a compilation on a busy machine is the longest part
CONFIG = EngineConfig(
  max_tokens=64, slots=2, prefill_tokens=32, page_tokens=8, rounds=4, adapter_ranks=4
)
VOCAB = 600


@pytest.fixture(scope="module")
def model():
  return toys.model(vocab_size=VOCAB, num_layers=1)


@pytest.fixture(scope="module")
def alone(model):
  return Engine(model, toys_text.chat_tokenizer(), CONFIG)


@contextlib.contextmanager
def running(model, count=2, tp=2):
  meshes = replicas_lib.groups(count, tp)
  made = Replicas.of_model(model, toys_text.chat_tokenizer(), CONFIG, meshes)
  made.start()
  try:
    yield made
  finally:
    made.stop(SOON)


@pytest.fixture(scope="module")
def two(model):
  with running(model) as made:
    yield made


def request(first, tokens=5, **rules):
  prompt = np.arange(first, first + 20)
  return EngineRequest(prompt=prompt, max_tokens=tokens, stop_ids=(), **rules)


def ask(replicas, *requests):
  tickets = [replicas.engine.submit(r) for r in requests]
  return [replicas.drivers[0].engine.collect(t, SOON) for t in tickets], tickets


def counts(replicas, name="prompt_tokens"):
  return [getattr(d.engine.stats(), name) for d in replicas.drivers]


def test_each_replica_has_its_devices_and_draws_the_same_tokens(two, alone):
  requests = [
    request(20 * n, temperature=n % 2, seed=n, num_samples=2) for n in range(6)
  ]
  got, _ = ask(two, *requests)
  for ours, theirs in zip(got, alone.run(requests), strict=True):
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_array_equal(a.tokens, b.tokens)
  assert all(counts(two))  # both had requests
  for number, driver in enumerate(two.drivers):
    own = set(jax.devices()[2 * number : 2 * number + 2])
    store = driver.engine._device._keeper.store
    arrays = [*store.rows_k, *store.pages_v, *jax.tree.leaves(driver.engine._model)]
    assert all(x.devices() == own for x in arrays if isinstance(x, jax.Array))
  total = two.engine.stats()
  assert total.generated_tokens == 6 * 2 * 5 and total.pages_free == total.pages_total


def test_a_request_goes_where_its_prefix_is(two):
  first = [request(100), request(300)]
  ask(two, *first)  # at the same time, so one for each
  before = counts(two, "prefix_hit_tokens")
  for _ in range(3):
    for r in first:
      longer = np.concatenate([r.prompt, [5, 6]])
      _, [ticket] = ask(two, EngineRequest(prompt=longer, max_tokens=2))
      assert ticket.cached_tokens == 16
  assert np.subtract(counts(two, "prefix_hit_tokens"), before).tolist() == [48, 48]


def test_a_full_replica_is_passed_over(two):
  two.pause("keep")
  before = counts(two)
  tickets = [two.engine.submit(request(200)) for _ in range(6)]
  two.resume()
  for ticket in tickets:
    two.drivers[0].engine.collect(ticket, SOON)
  # Two take the slots of one replica and two those of the other; then in turn.
  assert np.subtract(counts(two), before).tolist() == [60, 60]


def test_a_cancelled_request_ends_on_its_replica(two):
  two.pause("keep")
  tickets = [two.engine.submit(request(20 * n, 40)) for n in range(4)]
  for ticket in tickets:
    two.engine.cancel(ticket)
  assert two.is_paused
  two.resume()
  for ticket in tickets:
    [done] = two.drivers[0].engine.collect(ticket, SOON)
    assert done.finish_reason == "cancelled"
  assert not two.is_paused
  with pytest.raises(ValueError, match="max_tokens"):
    two.engine.submit(request(0, 100))


def test_calls_reach_all_replicas_or_take_the_others_out(two, model):
  other = toys.model(seed=1, vocab_size=VOCAB, num_layers=1)
  two.call(lambda engine: engine.update_weights(other, version=3), SOON)
  assert [d.engine.version for d in two.drivers] == [3, 3] and two.engine.version == 3
  want = Engine(other, toys_text.chat_tokenizer(), CONFIG).run([request(0)])
  got, _ = ask(two, request(0), request(0))
  for [completion] in got:
    np.testing.assert_array_equal(completion.tokens, want[0][0].tokens)
    assert set(completion.versions) == {3}

  def fails_on_the_second(engine):
    if engine is two.drivers[1].engine:
      raise MemoryError("no room")
    engine.update_weights(model, version=4)

  with pytest.raises(MemoryError, match="no room"):
    two.call(fails_on_the_second, SOON)
  assert "replica 1 of 2: other weights" in two.degraded and two.engine.version == 4
  before = counts(two)[1]
  ask(two, *[request(20 * n) for n in range(4)])
  assert counts(two)[1] == before
  two.call(lambda engine: engine.update_weights(model, version=4), SOON)
  assert two.degraded is None
  with pytest.raises(TimeoutError):
    two.call(lambda engine: time.sleep(1), 0.1)


def test_a_replica_that_dies_ends_its_requests_only(model):
  with running(model, tp=1) as made:
    ask(made, request(0), request(100))
    made.pause("keep")
    tickets = [made.engine.submit(request(20 * n, 20)) for n in range(4)]

    def fail(*args):
      raise RuntimeError("the chip is gone")

    made.drivers[1].engine._device.launch = fail
    made.resume()
    outcomes = []
    for ticket in tickets:
      try:
        outcomes.append(len(made.drivers[0].engine.collect(ticket, SOON)[0].tokens))
      except EngineDead as error:
        outcomes.append("the chip is gone" in str(error))
    assert sorted(map(int, outcomes)) == [1, 1, 20, 20]
    made.drivers[1]._thread.join(SOON)
    assert made.degraded == "replica 1 of 2: the engine failed: the chip is gone"
    assert made.alive and made.failure is None
    got, _ = ask(made, *[request(20 * n) for n in range(4)])
    assert all(len(c.tokens) == 5 for [c] in got)
    assert made.call(lambda engine: engine.version, SOON) == 0
    made.drivers[0].engine._device.launch = fail
    with pytest.raises(EngineDead):
      ask(made, request(0))
    made.drivers[0]._thread.join(SOON)
    assert not made.alive and made.failure is not None
    with pytest.raises(EngineDead, match="no replica runs"):
      made.engine.submit(request(0))


def test_threads_submit_to_both(two):
  done = []

  def work(number):
    [[completion]], _ = ask(two, request(10 * number, 6))
    done.append(len(completion.tokens))

  threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(SOON)
  assert done == [6] * 8
  for driver in two.drivers:
    driver.call(lambda engine: engine.audit(), SOON)


def test_too_few_devices_are_refused():
  for count, tp, message in ((5, 2, "need 10 devices"), (0, 1, "at least 1")):
    with pytest.raises(ValueError, match=message):
      replicas_lib.groups(count, tp)
