"""Slots, queue and pages, simulated on the host: nothing is lost and nobody starves."""

import numpy as np
import pytest

from tests import toys
from tests.generate.engine import host_device
from tests.generate.engine.host_device import HostEngine
from tunix.generate.engine.request import EngineDead, EngineRequest, RequestError
from tunix.generate.engine.scheduling import layer_groups


@pytest.fixture(scope="module")
def model():
  return toys.model(num_layers=1)


@pytest.fixture
def make(model, monkeypatch):
  def make(windows=(None,), **sizes):
    monkeypatch.setattr(layer_groups, "windows_of", lambda model, config: windows)
    engine = HostEngine(model, monkeypatch, **sizes)
    for window in filter(None, windows):  # a window that saves nothing has no group
      assert layer_groups.pages_of(engine.config, window) < engine.config.pages
    return engine

  return make


class Even:
  """A constraint: only tokens of even number, and no end before the third."""

  def matcher(self):
    return EvenMatcher()


class EvenMatcher:
  def __init__(self):
    self.accepted = []

  def mask(self):
    bits = np.arange(host_device.VOCAB) % 2 == 0
    bits[host_device.END] = len(self.accepted) >= 3
    return np.packbits(bits, bitorder="little").view(np.uint32)

  def accept(self, token):
    assert token % 2 == 0 and token != host_device.END
    self.accepted.append(token)


def request(rng, longest=48, **fields):
  """A random request; prompts begin alike, so that they share pages."""
  length = int(rng.integers(1, longest - 1))
  prompt = (
    np.arange(1, length + 1) if rng.random() < 0.6 else rng.integers(1, 9, length)
  )
  most = int(rng.integers(1, longest - length + 1))
  defaults = {
    "prompt": prompt,
    "max_tokens": most,
    "num_samples": int(rng.integers(1, 5)),
    "seed": int(rng.integers(0, 9)),
    "first_row": int(rng.integers(0, 3)),
    "stop_ids": [(host_device.END,), (host_device.END, 14, 23), ()][rng.integers(3)],
    "stop_strings": ("dab", "ccc") if rng.random() < 0.3 else (),
    "priority": int(rng.integers(0, 3)),
    "logprobs": bool(rng.random() < 0.5),
    "prompt_logprobs": bool(rng.random() < 0.2),
    "constraint": Even() if rng.random() < 0.1 else None,
  }
  if defaults["constraint"]:
    defaults["stop_ids"] = (host_device.END,)  # all that a constraint may end with
  return EngineRequest(**{**defaults, **fields})


def check(ticket, completions):
  r = ticket.request
  for sample, c in enumerate(completions):
    tokens, reason = host_device.expected(r, sample)
    assert (c.tokens.tolist(), c.finish_reason) == (tokens, reason)
    assert c.text == host_device.expected_text(r, tokens, reason)
    if r.logprobs:
      start = len(r.prompt) + 1
      np.testing.assert_array_equal(
        c.logprobs, -np.arange(start, start + len(tokens), dtype=np.float32)
      )
  if r.prompt_logprobs:
    np.testing.assert_array_equal(
      ticket.prompt_scores.logprobs, -np.arange(1, len(r.prompt), dtype=np.float32)
    )


def check_empty(engine):
  stats = engine.stats()
  assert stats.running == stats.waiting == 0
  assert stats.pages_free == stats.pages_total
  assert not len(engine._requests) and not len(engine._scheduler.waiting)
  assert engine._scheduler.running == [None] * engine.config.slots


CASES = {
  "roomy": {},
  "preempts": {"cache_tokens": 64, "slots": 4},
  "least": {"cache_tokens": 48, "slots": 6},
  "one slot": {"slots": 1, "rounds": 1},
  "one round": {"rounds": 1, "cache_tokens": 72},
  "drafts": {"draft_tokens": 3, "cache_tokens": 96, "rounds": 3},
  "no prefixes": {"prefix_cache": False, "cache_tokens": 80},
  "pages of 1": {"page_tokens": 1, "prefill_tokens": 3, "cache_tokens": 70},
  "pages of 5": {"page_tokens": 5, "prefill_tokens": 10, "cache_tokens": 80},
  "wide": {"slots": 8, "rounds": 9, "prefill_tokens": 24, "cache_tokens": 160},
  "window": {"windows": (None, 3)},
  "two windows, preempts": {
    "windows": (None, 5, 2), "cache_tokens": 100, "rounds": 1, "slots": 4
  },
  "windows and drafts": {"windows": (None, 5, 1), "draft_tokens": 1, "rounds": 2},
  "window and pages of 1": {
    "windows": (None, 7), "page_tokens": 1, "prefill_tokens": 3, "cache_tokens": 70
  },
  "windows only": {"windows": (6, 3), "slots": 4},
  "window without prefixes": {"windows": (None, 4), "prefix_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_random_arrivals_and_cancels(make, case):
  """Each completion is the one that is drawn alone, whatever runs beside it."""
  engine = make(**CASES[case])
  rng = np.random.default_rng(len(case))
  open_tickets, cancelled, done = [], [], 0
  for _ in range(120):
    for _ in range(rng.poisson(0.6)):
      r = request(rng)
      open_tickets.append(engine.submit(r, streams=bool(rng.random() < 0.5)))
    if open_tickets and rng.random() < 0.15:
      ticket = open_tickets.pop(rng.integers(len(open_tickets)))
      engine.cancel(ticket)
      cancelled.append(ticket)
    engine.step()
    for ticket in [t for t in open_tickets if t not in engine._requests]:
      open_tickets.remove(ticket)
      check(ticket, engine.collect(ticket, timeout=0))
      done += 1
  for _ in range(3000):
    if not engine.step():
      break
  for ticket in open_tickets:
    check(ticket, engine.collect(ticket, timeout=0))
  for ticket in cancelled:
    for sample, c in enumerate(engine.collect(ticket, timeout=0)):
      tokens, reason = host_device.expected(ticket.request, sample)
      assert c.finish_reason in ("cancelled", reason)
      assert c.tokens.tolist() == tokens[: len(c.tokens)]
  check_empty(engine)
  assert done and cancelled
  stats = engine.stats()
  assert bool(stats.preemptions) == (case in PREEMPTING)
  assert bool(stats.prefix_hit_tokens)
  assert stats.rounds <= stats.launches * engine.config.rounds


ROOMY = {"roomy", "one slot", "window", "windows and drafts", "windows only"}
PREEMPTING = set(CASES) - ROOMY - {"window without prefixes"}


def test_nobody_overtakes_a_large_request_for_ever(make):
  """A request that needs all pages is admitted while small ones keep arriving."""
  engine = make(slots=4, cache_tokens=48)
  rng = np.random.default_rng(0)
  small = lambda: request(rng, longest=6, num_samples=1, priority=0, stop_ids=())
  for _ in range(6):
    engine.submit(small())
  large = engine.submit(
    EngineRequest(prompt=np.arange(1, 40), max_tokens=9, stop_ids=(), seed=1)
  )
  launches = 0
  while large in engine._requests and launches < 30:
    launches += 1
    engine.submit(small())
    engine.submit(small())
    engine.step()
  assert launches < 30
  check(large, engine.collect(large, timeout=0))


@pytest.mark.parametrize(
  "streams, others, parts",
  [
    (True, 0, [1, 1, 2, 4, 8, 14]),
    (False, 0, [16, 14]),
    (True, 1, [32, 28]),
  ],
)
def test_a_stream_that_runs_alone_begins_in_short_parts(make, streams, others, parts):
  engine = make(rounds=16, prefill_tokens=16)
  for seed in range(1 + others):
    asked = EngineRequest(prompt=np.arange(3), max_tokens=30, seed=seed, stop_ids=())
    engine.submit(asked, streams=streams)
  drawn = [0]
  while engine.step():
    drawn.append(engine.stats().generated_tokens)
  assert np.diff(drawn).tolist() == parts


def test_priorities_are_admitted_first_and_then_the_eldest(make):
  engine = make(slots=1)
  ends = []
  for number, priority in enumerate((1, 0, 2, 0, 1)):
    ticket = engine.submit(
      EngineRequest(prompt=[5], max_tokens=2, stop_ids=(), priority=priority, seed=0)
    )
    ticket.listen(lambda number=number: ends.append(number))
  while engine.step():
    pass
  assert list(dict.fromkeys(ends)) == [1, 3, 0, 4, 2]


@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_a_group_is_prefilled_once(make, prompt_logprobs):
  engine = make(slots=8, prefill_tokens=8)
  prompt = np.arange(1, 31)
  fields = {"prompt_logprobs": prompt_logprobs, "seed": 3, "stop_ids": ()}
  ticket = engine.submit(
    EngineRequest(prompt=prompt, max_tokens=9, num_samples=8, **fields)
  )
  while engine.step():
    pass
  out = engine.collect(ticket, timeout=0)
  check(ticket, out)
  assert len({c.tokens.tobytes() for c in out}) == 8
  stats = engine.stats()
  assert stats.prefilled_tokens == 30
  assert stats.prefix_hit_tokens == 7 * 30
  # With fewer slots than samples, the later ones find whole pages: 28 tokens.
  engine = make(slots=3)
  ticket = engine.submit(
    EngineRequest(prompt=prompt, max_tokens=9, num_samples=8, **fields)
  )
  while engine.step():
    pass
  check(ticket, engine.collect(ticket, timeout=0))
  assert engine.stats().prefilled_tokens == 30 + 2 * 2  # in groups of three


@pytest.mark.parametrize("prompt,drawn", [(4, 6), (8, 1), (9, 1)])
def test_a_launch_with_a_full_round_hands_out_first_tokens(make, prompt, drawn):
  engine = make(prefill_tokens=8, page_tokens=4, rounds=6)
  request = EngineRequest(prompt=np.ones(prompt, int), max_tokens=9, stop_ids=())
  engine.submit(request, streams=False)
  engine.step()
  assert engine.stats().generated_tokens == drawn


def test_the_next_turn_prefills_what_is_new(make):
  engine = make(max_tokens=128)
  prompt, kept, wanted = [7, 8, 9], 0, 0
  for turn in range(8):
    # Whole pages of what is known are found, but for the last token of the prompt.
    wanted += len(prompt) - min(kept, len(prompt) - 1) // 4 * 4
    r = EngineRequest(prompt=prompt, max_tokens=6, seed=turn, stop_ids=())
    [[c]] = engine.run([r])
    kept = len(prompt) + 5  # the last drawn token was never run
    prompt = [*prompt, *c.tokens.tolist(), 10 + turn, 11, 12]
  assert engine.stats().prefilled_tokens == wanted < len(prompt)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_preempted_completion_is_recomputed_and_counted(make, prefix_cache):
  engine = make(slots=2, cache_tokens=48, prefix_cache=prefix_cache)
  rows = [
    EngineRequest(prompt=np.full(8, n), max_tokens=36, seed=n, stop_ids=())
    for n in (1, 2)
  ]
  tickets = [engine.submit(r) for r in rows]
  while engine.step():
    pass
  for ticket in tickets:
    check(ticket, engine.collect(ticket, timeout=0))
  stats = engine.stats()
  assert stats.preemptions == 1
  assert stats.prefilled_tokens > 16
  assert stats.prefix_hit_tokens == 0  # its own tokens are not those of a prompt
  # The elder of the two is never the one that waits.
  assert stats.generated_tokens == 72


@pytest.mark.parametrize("who", ["leader", "follower", "both"])
def test_cancel_in_a_group_before_its_prompt_is_computed(make, who):
  engine = make(slots=4, rounds=2, prefill_tokens=4)
  prompt = np.arange(1, 31)  # 8 blocks: 4 launches
  fields = {"prompt": prompt, "max_tokens": 5, "stop_ids": (), "num_samples": 2}
  first = engine.submit(EngineRequest(**fields, seed=1))
  second = engine.submit(EngineRequest(**fields, seed=2))
  engine.step()
  assert any(s.leader for s in engine._scheduler.active())
  leaving = {"leader": [first], "follower": [second], "both": [first, second]}[who]
  for ticket in leaving:
    engine.cancel(ticket)
  while engine.step():
    pass
  for ticket in (first, second):
    out = engine.collect(ticket, timeout=0)
    if ticket in leaving:
      assert [c.finish_reason for c in out] == ["cancelled"] * 2
    else:
      check(ticket, out)
  check_empty(engine)


def test_a_leader_that_fails_leaves_its_followers_to_themselves(make):
  """Only the leader is taken out; the others are prefilled by a new leader."""
  engine = make(slots=3, rounds=2, prefill_tokens=4)
  ticket = engine.submit(
    EngineRequest(prompt=np.arange(1, 31), max_tokens=5, num_samples=3, stop_ids=())
  )
  engine.step()
  leader = next(s for s in engine._scheduler.active() if s.leader is None)
  engine._scheduler.remove(leader)
  engine._requests.end(leader)
  while engine.step():
    pass
  found = {ticket.get(timeout=0).sample for _ in range(ticket._deltas.qsize())}
  assert found == {1, 2}
  check_empty(engine)


def test_a_ticket_that_is_cancelled_twice_ends_once(make):
  engine = make()
  asked = EngineRequest(prompt=[1], max_tokens=9, stop_ids=())
  ticket = engine.submit(asked, streams=False)
  engine.step()
  engine.cancel(ticket)
  engine.cancel(ticket)
  engine.step()
  engine.cancel(ticket)
  engine.step()
  out = engine.collect(ticket, timeout=0)
  assert [c.finish_reason for c in out] == ["cancelled"] and ticket._deltas.empty()
  assert len(out[0].tokens) == engine.config.rounds


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain"])
def test_new_weights(make, mode):
  """Tokens name the weights that drew them, and no prefix outlives its weights."""
  engine = make(slots=2, cache_tokens=64)
  engine._device.version = 0
  if mode == "keep":
    engine._device.entry = lambda tokens: np.asarray(tokens, np.int32).tobytes()
  rng = np.random.default_rng(0)
  fields = {"num_samples": 2, "stop_ids": (), "stop_strings": (), "constraint": None}
  tickets = [
    engine.submit(
      request(rng, **fields, prompt=np.arange(1, 7 * n + 3), max_tokens=20, priority=0)
    )
    for n in range(4)
  ]
  engine.step()
  engine.step()
  running = set(engine._scheduler.active())
  drawn = {s: s.drawn for s in running}
  assert any(drawn.values())
  engine.update_weights(mode=mode, version=7)
  assert engine.version == 7 and engine.stats().pages_cached == 0
  ended = [s for s in running if s.finish_reason]
  assert (len(ended) == len(running)) if mode == "drain" else not ended
  while engine.step():
    pass
  for ticket in tickets:
    out = engine.collect(ticket, timeout=0)
    check(ticket, out)
    for sample, c in enumerate(out):
      assert len(c.versions) == len(c.tokens)
      s = next((s for s in running if s.ticket is ticket and s.sample == sample), None)
      old = 0 if s is None else len(c.tokens) if mode == "drain" else drawn[s]
      assert c.versions.tolist() == [0] * old + [7] * (len(c.tokens) - old)
  check_empty(engine)


def test_requests_that_waited_for_new_weights_share_their_pages(make):
  engine = make()
  prompt = np.arange(1, 18)
  first = engine.submit(EngineRequest(prompt=prompt, max_tokens=2, stop_ids=(), seed=1))
  engine._take_arrivals()
  engine.update_weights()
  while engine.step():
    pass
  check(first, engine.collect(first, timeout=0))
  engine.run([EngineRequest(prompt=prompt, max_tokens=2, stop_ids=())])
  assert engine.stats().prefix_hit_tokens == 16


def test_logits_that_are_not_finite(make):
  """The end of a completion counts if it came before; else the request fails."""
  engine = make(rounds=16, prefill_tokens=64)
  fields = {"prompt": [1, 2], "max_tokens": 16, "stop_ids": (), "seed": 5}
  text = host_device.expected_text(
    EngineRequest(**fields), *host_device.expected(EngineRequest(**fields), 0)
  )
  stopped = engine.submit(EngineRequest(**fields, stop_strings=(text[4:9],)))
  failed = engine.submit(EngineRequest(**fields, id="chat 4"))
  good = engine.submit(EngineRequest(**{**fields, "seed": 6}))
  launch = engine._device.launch

  def broken(*args):
    out, scored = launch(*args)
    for s in engine._scheduler.active():
      if s.ticket in (stopped, failed):
        out.is_not_finite[s.slot], out.count[s.slot] = True, 12
    return out, scored

  engine._device.launch = broken
  while engine.step():
    pass
  for ticket in (stopped, good):
    check(ticket, engine.collect(ticket, timeout=0))
  with pytest.raises(RequestError, match=r"chat 4: the logits after token 13 \(compl"):
    engine.collect(failed, timeout=0)
  check_empty(engine)


def test_draining_waits_for_completions_that_were_preempted(make):
  engine = make(slots=2, cache_tokens=48, prefix_cache=False, rounds=8)
  rows = [
    EngineRequest(prompt=np.full(8, n), max_tokens=36, seed=n, stop_ids=())
    for n in (1, 2)
  ]
  tickets = [engine.submit(r) for r in rows]
  engine.step()
  waiting = engine.submit(EngineRequest(prompt=[3], max_tokens=2, stop_ids=()))
  engine._take_arrivals()
  # The elder ends in the launch in which the younger one gives its pages up.
  engine.update_weights(mode="drain")
  assert engine.stats().preemptions
  for ticket in tickets:
    assert set(engine.collect(ticket, timeout=0)[0].versions) == {0}
  while engine.step():
    pass
  assert set(engine.collect(waiting, timeout=0)[0].versions) == {1}


@pytest.mark.parametrize("mode", ["pause", "drain"])
def test_held_back_is_what_has_not_started(make, mode):
  """A completion that gave its pages up has started: it ends while others wait."""
  engine = make(slots=2, cache_tokens=48, prefix_cache=False, rounds=8)
  rows = [
    EngineRequest(prompt=np.full(8, n), max_tokens=36, seed=n, stop_ids=())
    for n in (1, 2)
  ]
  tickets = [engine.submit(r) for r in rows]
  engine.step()
  engine.hold_back(True)
  last = EngineRequest(prompt=[3], max_tokens=2, stop_ids=(), priority=-1, seed=0)
  later = engine.submit(last)
  if mode == "drain":
    engine.update_weights(mode="drain")
    assert engine.stats().waiting == 1 and not engine.has_work
  else:
    assert engine.has_work
    while engine.step():
      pass
    assert not engine.has_work
  assert engine.stats().preemptions
  for ticket in tickets:
    check(ticket, engine.collect(ticket, timeout=0))
  with pytest.raises(RuntimeError, match="held back"):
    engine.run([EngineRequest(prompt=[3], max_tokens=2, stop_ids=())])
  assert later in engine._requests
  engine.hold_back(False)
  while engine.step():
    pass
  check(later, engine.collect(later, timeout=0))
  check_empty(engine)


def test_a_held_request_may_be_cancelled(make):
  engine = make(slots=1)
  engine.hold_back(True)
  tickets = [engine.submit(EngineRequest(prompt=[3], max_tokens=2)) for _ in range(3)]
  assert not engine.step() and engine.stats().waiting == 3
  engine.cancel(tickets[1])
  assert not engine.step() and engine.stats().waiting == 2
  engine.hold_back(False)
  assert engine.step()
  assert engine.collect(tickets[1], 0)[0].finish_reason == "cancelled"
  while engine.step():
    pass
  check_empty(engine)


def test_sleep_and_go_on(make):
  engine = make(cache_tokens=96)
  rng = np.random.default_rng(1)
  tickets = [engine.submit(request(rng)) for _ in range(12)]
  for _ in range(5):
    engine.step()
    engine.sleep()
    engine.wake()
    assert engine.stats().pages_free == engine.stats().pages_total
  while engine.step():
    pass
  for ticket in tickets:
    check(ticket, engine.collect(ticket, timeout=0))
  check_empty(engine)


@pytest.mark.parametrize("where", ["step", "drain"])
def test_a_launch_that_fails_ends_everything(make, where):
  engine = make(slots=1)
  rng = np.random.default_rng(2)
  tickets = [engine.submit(request(rng, num_samples=2, stop_ids=())) for _ in range(3)]
  engine.step()
  engine._device.fails = True
  with pytest.raises((EngineDead, RuntimeError), match="the device is gone"):
    engine.step() if where == "step" else engine.update_weights(mode="drain")
  for ticket in tickets:
    with pytest.raises(EngineDead, match="the device is gone"):
      engine.collect(ticket, timeout=0)
  for call in (engine.step, lambda: engine.submit(request(rng))):
    with pytest.raises(EngineDead, match="the device is gone"):
      call()


def test_an_interrupt_leaves_no_broken_cache(make):
  """Ctrl-C inside a launch: what was on the device is lost, and nothing uses it."""
  engine = make()
  ticket = engine.submit(EngineRequest(prompt=[1, 2], max_tokens=9, stop_ids=()))
  engine.step()
  launch = engine._device.launch

  def interrupted(*args):
    launch(*args)
    raise KeyboardInterrupt

  engine._device.launch = interrupted
  with pytest.raises(KeyboardInterrupt):
    engine.step()
  with pytest.raises(EngineDead):
    engine.collect(ticket, timeout=0)
  with pytest.raises(EngineDead):
    engine.step()


def test_a_submit_that_meets_a_dying_engine_does_not_wait_for_ever(make):
  engine = make()
  arrived, sequences = [], engine_sequences(engine)

  def late(*args, **kwargs):
    out = sequences(*args, **kwargs)
    engine._die(RuntimeError("the device is gone"))  # in the engine's thread
    arrived.append(out)
    return out

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("tunix.generate.engine.run.arrival.sequences_of", late)
    with pytest.raises(EngineDead, match="the device is gone"):
      engine.submit(EngineRequest(prompt=[1], max_tokens=2))
  assert arrived and not len(engine._requests)


def engine_sequences(engine):
  del engine
  from tunix.generate.engine.run import arrival

  return arrival.sequences_of


def test_run_with_a_request_that_cannot_run_leaves_nothing_behind(make):
  engine = make()
  good = EngineRequest(prompt=[1], max_tokens=2)
  with pytest.raises(ValueError, match="need 90 tokens"):
    engine.run([good, EngineRequest(prompt=np.arange(1, 90), max_tokens=1)])
  while engine.step():
    pass
  check_empty(engine)
  assert engine.stats().generated_tokens == 0


def test_many_requests_leave_nothing_behind(make):
  """Flat: no host object, page or ticket is kept for what has ended."""
  import gc

  from tunix.generate.engine.scheduling.sequence import Sequence

  engine = make(slots=6, cache_tokens=144, rounds=8)
  rng = np.random.default_rng(3)
  counts = []
  for _ in range(4):
    engine.run([request(rng, num_samples=1) for _ in range(100)])
    check_empty(engine)
    gc.collect()
    counts.append(sum(isinstance(x, Sequence) for x in gc.get_objects()))
    [pool] = engine._scheduler.pages.pools
    assert len(pool._digests) == len(pool._pages) == pool.kept <= pool.size
  assert max(counts) <= 1
