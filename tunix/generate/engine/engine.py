"""The engine: continuous batching over a paged key-value cache.

A fixed number of completions run at the same time, each in a slot. One `step` is a
launch of a few rounds on the device (launch.py); before it the scheduler fills free
slots and pages (scheduler.py), after it the host hands out what was drawn. The engine
runs the weights and the decoder of the trainer.

The tokens of a completion depend on its request only: not on other requests, slots,
the order of arrival, the size of a launch, preemption, shared pages or drafts. Their
log-probs can differ in the last bits, as sums are rounded differently.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import secrets
import threading
from collections.abc import Sequence as Seq
from typing import Any, Literal

import jax
import numpy as np

from tunix.generate import batching, decoders, requests as requests_lib
from tunix.generate.engine import arrays, pages as pages_lib
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device import Device
from tunix.generate.engine.launch import Out, PromptOut
from tunix.generate.engine.request import (
  Completion,
  Delta,
  EngineDead,
  EngineRequest,
  PromptScores,
  RequestError,
  Ticket,
  TopLogprobs,
)
from tunix.generate.engine.scheduler import Block, Plan, Scheduler
from tunix.generate.engine.sequence import Sequence
from tunix.generate.engine.text import TextReader
from tunix.generate.layout import GatherWeights
from tunix.generate.tokenizer_adapter import adapted
from tunix.models.transformer.model import Transformer

UpdateMode = Literal["keep", "recompute", "drain"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
  """Counts since the engine was made, and its state now.

  Attributes:
    waiting, running: completions without and with a slot, now.
    pages_total, pages_free, pages_cached: pages; those that nobody holds; and of these
      the ones that keep a prefix.
    prompt_tokens: tokens of admitted prompts.
    prefix_hit_tokens: of these, tokens that were found in the cache.
    prefilled_tokens: tokens that were prefilled, those of preempted completions again.
    generated_tokens: tokens that were drawn.
    preemptions: completions that gave their pages up and were prefilled again.
    launches, rounds: launches, and their rounds.
    draft_tokens, accepted_tokens: proposed drafts, and accepted ones.
  """

  waiting: int
  running: int
  pages_total: int
  pages_free: int
  pages_cached: int
  prompt_tokens: int = 0
  prefix_hit_tokens: int = 0
  prefilled_tokens: int = 0
  generated_tokens: int = 0
  preemptions: int = 0
  launches: int = 0
  rounds: int = 0
  draft_tokens: int = 0
  accepted_tokens: int = 0


class Engine:
  """Completes requests by a model in this process.

  `submit` and `cancel` may be called in any thread; all other methods in the thread
  that steps the engine (`Driver` has such a thread).

  Args:
    model: a `Transformer`; other modules are for the padded `Sampler`.
    tokenizer: any object that TokenizerAdapter wraps.
    config: sizes of the engine.
    gather_weights: layout of sharded weights, see `Sampler`.

  Attributes:
    tokenizer: the adapter.
    config: the sizes.
    version: number of the weights, see `update_weights`.

  Raises:
    TypeError: the model is not a `Transformer`.
  """

  def __init__(
    self,
    model: Any,
    tokenizer: Any,
    config: EngineConfig | None = None,
    gather_weights: GatherWeights = None,
  ):
    if not isinstance(model, Transformer):
      raise TypeError(
        f"model is {type(model).__name__}, expected a tunix Transformer: the engine "
        "writes the pages of its cache. Use the padded sampler for other modules "
        "(engine='padded')"
      )
    self.tokenizer = adapted(tokenizer)
    self.config = EngineConfig() if config is None else config
    self.version = 0
    self._model = model
    self._device = Device(model, self.config, gather_weights)
    self._scheduler = Scheduler(self.config)
    self._orders = itertools.count()
    self._lock = threading.Lock()
    self._arrived: collections.deque[Sequence] = collections.deque()
    self._cancelled: list[Ticket] = []
    self._open: dict[Ticket, list[Sequence]] = {}
    self._counts: collections.Counter[str] = collections.Counter()
    self._dead: BaseException | None = None

  # Requests.

  def submit(self, request: EngineRequest, streams: bool = True) -> Ticket:
    """Puts a request into the queue.

    Args:
      request: the request.
      streams: return text while a completion grows; else all of it at its end.

    Raises:
      ValueError: the request can never run: too many tokens, ids outside the
        vocabulary, an unknown adapter.
      EngineDead: the engine failed.
    """
    self._check_alive()
    number = next(self._orders)
    name = f"request {number}" if request.id is None else request.id
    ticket = Ticket(name, request)
    sequences = self._sequences(ticket, streams)
    with self._lock:
      self._open[ticket] = sequences
      self._arrived.extend(sequences)
    return ticket

  def cancel(self, ticket: Ticket) -> None:
    """Ends a request at the next launch; its open completions end as "cancelled"."""
    with self._lock:
      self._cancelled.append(ticket)

  def run(self, requests: Seq[EngineRequest]) -> list[list[Completion]]:
    """Completes requests in this thread; one list of completions for each."""
    tickets = [self.submit(request, streams=False) for request in requests]
    while any(ticket in self._open for ticket in tickets):
      self.step()
    return [self.collect(ticket) for ticket in tickets]

  @staticmethod
  def collect(ticket: Ticket, timeout: float | None = None) -> list[Completion]:
    """Waits for all completions of a request.

    Args:
      ticket: the request.
      timeout: seconds between two deltas, see `Ticket.get`.
    """
    parts: list[list[Delta]] = [[] for _ in range(ticket.request.num_samples)]
    left = len(parts)
    while left:
      delta = ticket.get(timeout)
      parts[delta.sample].append(delta)
      left -= delta.finish_reason is not None
    return [_joined(deltas) for deltas in parts]

  # Launches.

  def step(self) -> bool:
    """Runs one launch; returns False if there was nothing to do.

    Raises:
      EngineDead: the launch failed; every open request has received the error.
    """
    self._check_alive()
    try:
      self._take_arrivals()
      return self._step()
    except Exception as error:  # whatever it is, nobody may wait for ever
      self._die(error)
      raise EngineDead(f"the engine failed: {error}") from error

  def _step(self) -> bool:
    scheduler = self._scheduler
    rounds, allowed = self.config.rounds, None
    if any(s.matcher for s in scheduler.active()) or self._next_is_constrained():
      rounds = 1  # the host computes which tokens may follow after each token
    plan = scheduler.plan(rounds)
    running = list(scheduler.running)
    if not any(running):
      return False
    allowed = self._allowed(running)
    idle = self.config.slots - sum(s is not None for s in running)
    self._device.look_at(idle + 1 if scheduler.waiting else 2**30)
    out, scored = self._device.launch(plan, running, allowed)
    self._counts.update(
      launches=1,
      rounds=int(out.rounds),
      draft_tokens=int(out.proposed),
      accepted_tokens=int(out.accepted),
      prefilled_tokens=sum(b.count for r in plan.rounds for b in r),
    )
    self._score_prompts(scored)
    self._read(plan, running, out)
    return True

  def _read(self, plan: Plan, running: list[Sequence | None], out: Out) -> None:
    """Takes what a launch drew, and hands it out."""
    size = self.config.page_tokens
    before = [0 if s is None else s.computed for s in running]
    ends = {b.sequence: b.start + b.count for r in plan.rounds for b in r}
    for fork in plan.forks:
      self._scheduler.forked(fork)
    # The pages of a follower are its leader's, and a copy that the next launch makes.
    forked = {fork.follower for fork in plan.forks}
    written, over = [], []
    for slot, s in enumerate(running):
      if s is None:
        continue
      count, reason = self._drawn(s, out, slot)
      computed = s.length - 1 if count else ends.get(s, s.computed)
      self._scheduler.computed(s, computed)
      if s not in forked:
        changed = range(before[slot] // size, -(-computed // size))
        written += [(slot, page, s.pages[page]) for page in changed]
      if out.bad[slot]:
        over.append((s, "error"))
      elif reason is not None:
        over.append((s, reason))
      self._hand_out(s, out, slot, count, reason if not out.bad[slot] else None)
    self._device.write(written)
    for s, reason in over:
      self._end(s, reason)

  def _drawn(self, s: Sequence, out: Out, slot: int) -> tuple[int, str | None]:
    """Appends the drawn tokens; returns their number and why the completion ended."""
    count = int(out.count[slot])
    if not count:
      return 0, None
    drawn = out.tokens[slot, :count]
    s.tokens[s.length : s.length + count] = drawn
    stopped = bool(out.stopped[slot])
    length = s.length + count
    body = s.tokens[len(s.request.prompt) : length - stopped]
    stop = s.reader.find_stop(body)
    reason = "eos" if stopped else "length" if length >= s.limit else None
    if stop is not None:
      count = len(s.request.prompt) + stop - s.length
      reason = "stop"
    if s.matcher is not None and reason != "eos":
      for token in drawn[:count]:
        s.matcher.accept(int(token))
    s.length += count
    s.versions += [self.version] * count
    self._counts["generated_tokens"] += count
    return count, reason

  def _hand_out(
    self, s: Sequence, out: Out, slot: int, count: int, reason: str | None
  ) -> None:
    request = s.request
    if not count and reason is None:
      return
    tokens = s.tokens[len(request.prompt) : s.length]
    text = s.reader.text(tokens, reason)
    cut = lambda x: x[slot, :count].copy()
    top = None
    if request.top_logprobs:
      top = TopLogprobs(
        ids=cut(out.top_ids)[:, : request.top_logprobs],
        logprobs=cut(out.top_logps)[:, : request.top_logprobs],
      )
    s.ticket.put(
      Delta(
        sample=s.sample,
        text=text,
        tokens=tokens[len(tokens) - count :].copy(),
        logprobs=cut(out.logps) if request.logprobs else None,
        sampling_logprobs=cut(out.sampling_logps) if request.logprobs else None,
        top=top,
        versions=np.array(s.versions[len(s.versions) - count :], np.int32),
        finish_reason=reason,
      )
    )

  def _score_prompts(self, scored: list[tuple[list[list[Block]], PromptOut]]) -> None:
    size = self.config.page_tokens
    for rounds, out in scored:
      for number, blocks in enumerate(rounds):
        for n, block in enumerate(blocks):
          if not block.sequence.request.prompt_logprobs or block.sequence.drawn:
            continue
          at = slice(n * size, n * size + block.count)
          part = [x[number, at].copy() for x in out]
          block.sequence.ticket.parts.append(part)
          if block.is_last:
            self._put_scores(block.sequence.ticket)

  @staticmethod
  def _put_scores(ticket: Ticket) -> None:
    logps, ids, values = (np.concatenate(x)[:-1] for x in zip(*ticket.parts))
    most = ticket.request.top_logprobs
    top = TopLogprobs(ids=ids[:, :most], logprobs=values[:, :most]) if most else None
    ticket.prompt_scores = PromptScores(logprobs=logps, top=top)

  def _end(self, s: Sequence, reason: str) -> None:
    self._scheduler.remove(s)
    s.finish_reason = reason
    if reason == "error":
      s.ticket.put(
        RequestError(
          f"{s.ticket.id}: the logits after token {s.length - 1} (completion "
          f"{s.sample}) are not finite: check the weights of the model"
        )
      )
    self._close_ticket(s)

  def _close_ticket(self, s: Sequence) -> None:
    with self._lock:
      left = self._open.get(s.ticket)
      if left is not None and s in left:
        left.remove(s)
        if not left:
          del self._open[s.ticket]

  def _take_arrivals(self) -> None:
    with self._lock:
      arrived, self._arrived = self._arrived, collections.deque()
      cancelled, self._cancelled = self._cancelled, []
      # An arrived completion of a cancelled request must be in the queue to be removed.
      ending = [s for ticket in cancelled for s in self._open.get(ticket, ())]
    for s in arrived:
      s.digests = [pages_lib.root_digest(self.version, s.request.adapter)]
      self._counts["prompt_tokens"] += len(s.request.prompt)
      self._scheduler.add(s)
    for s in ending:
      self._scheduler.remove(s)
      s.ticket.put(
        Delta(
          sample=s.sample,
          text="",
          tokens=np.zeros(0, np.int32),
          versions=np.zeros(0, np.int32),
          finish_reason="cancelled",
        )
      )
      self._close_ticket(s)

  # Weights and cache.

  def update_weights(
    self,
    model: Any = None,
    version: int | None = None,
    mode: UpdateMode = "recompute",
  ) -> None:
    """Takes new weights between two launches. Kept prefixes are forgotten.

    Args:
      model: the model with the new weights; None: they were written into the present
        model.
      version: number of the weights; None: the next one.
      mode: what becomes of running completions. "recompute": they keep their tokens,
        and keys and values are computed again. "keep": they go on with the keys and
        values of the old weights. "drain": they end before the weights change, and no
        waiting one starts before.

    Raises:
      ValueError: the mode is unknown, or the model has another configuration.
    """
    if mode not in ("keep", "recompute", "drain"):
      raise ValueError(f"mode is {mode!r}, expected keep, recompute or drain")
    model = self._model if model is None else model
    if model.config != self._model.config:
      raise ValueError(
        "the new model has another configuration than the engine's: make a new engine"
      )
    if mode == "drain":
      self._drain()
    self.version = self.version + 1 if version is None else version
    self._model = model
    self._device.set_model(model)
    self._forget(recompute=mode == "recompute")

  def sleep(self) -> None:
    """Frees the cache; `step` makes a new one. Running completions are recomputed."""
    self._forget(recompute=True)
    self._device.release()

  def wake(self) -> None:
    """Makes the cache again, which the next `step` would do."""

  def close(self) -> None:
    """Frees the device; open requests receive EngineDead."""
    self._die(EngineDead("the engine was closed"))

  def _drain(self) -> None:
    waiting = self._scheduler.hold_back()
    while any(self._scheduler.running):
      self._step()
    for s in waiting:
      self._scheduler.add(s)

  def _forget(self, recompute: bool) -> None:
    root = functools.partial(pages_lib.root_digest, self.version)
    for s in list(self._scheduler.active()):
      if recompute:
        self._scheduler.preempt(s)
      else:
        s.digests = []  # a mixture of versions, which no other completion may share
    for s in self._scheduler.queued():
      s.digests = [root(s.request.adapter)]
    self._scheduler.pool.forget_all()

  # State.

  def stats(self) -> EngineStats:
    """Returns counts and state."""
    scheduler, pool = self._scheduler, self._scheduler.pool
    with self._lock:
      arrived = len(self._arrived)
    return EngineStats(
      waiting=scheduler.waiting + arrived,
      running=sum(s is not None for s in scheduler.running),
      pages_total=pool.size,
      pages_free=pool.available,
      pages_cached=pool.kept,
      preemptions=scheduler.preemptions,
      prefix_hit_tokens=scheduler.hit_tokens,
      **self._counts,
    )

  def audit(self) -> None:
    """Checks that no page is lost; raises AssertionError."""
    self._scheduler.pool.audit(s.pages for s in self._scheduler.active())

  def _check_alive(self) -> None:
    if self._dead is not None:
      raise EngineDead(f"the engine does not run: {self._dead}") from self._dead

  def _die(self, error: BaseException) -> None:
    with self._lock:
      self._dead = error
      tickets, self._open = list(self._open), {}
      self._arrived.clear()
    for ticket in tickets:
      dead = EngineDead(f"{ticket.id}: the engine failed: {error}")
      dead.__cause__ = error
      ticket.put(dead)
    self._device.release()

  # Arrival of a request.

  def _sequences(self, ticket: Ticket, streams: bool) -> list[Sequence]:
    r, c = ticket.request, self.config
    size = self._model.config.vocab_size
    requests_lib.check_ids(r.prompt, "a prompt", size)
    requests_lib.check_ids(list(r.logit_bias), "logit_bias", size)
    limit = len(r.prompt) + r.max_tokens
    most = decoders.max_positions(self._model)
    most = c.max_tokens if most is None else min(most, c.max_tokens)
    if limit > most:
      raise ValueError(
        f"{ticket.id}: a prompt of {len(r.prompt)} tokens and max_tokens="
        f"{r.max_tokens} need {limit} tokens, and the engine has {most} for a "
        "completion. Raise EngineConfig.max_tokens (at most the positions of the "
        "model), or ask for fewer"
      )
    stop_ids = self.tokenizer.eos_ids() if r.stop_ids is None else r.stop_ids
    self._check_lists(ticket, stop_ids)
    key = _key_data(r.seed)
    tokens = lambda: np.concatenate([r.prompt, np.zeros(r.max_tokens, np.int32)])
    filters = r.sampling_options().filters
    return [
      Sequence(
        ticket=ticket,
        sample=sample,
        order=next(self._orders),
        tokens=tokens(),
        length=len(r.prompt),
        limit=limit,
        key=key,
        stop_ids=tuple(map(int, stop_ids)),
        filters=filters,
        reader=TextReader(self.tokenizer.decode, r.stop_strings, streams),
        matcher=None if r.constraint is None else r.constraint.matcher(),
      )
      for sample in range(r.num_samples)
    ]

  def _check_lists(self, ticket: Ticket, stop_ids: Seq[int]) -> None:
    r = ticket.request
    bounds = {
      "stop_ids": (len(stop_ids), arrays.STOP_IDS),
      "logit_bias": (len(r.logit_bias), arrays.BIASES),
      "top_logprobs": (r.top_logprobs, self.config.max_top_logprobs),
    }
    for name, (have, most) in bounds.items():
      if have > most:
        raise ValueError(
          f"{ticket.id}: {name} is {have}, expected at most {most}: ask for fewer"
        )

  # Constraints.

  def _next_is_constrained(self) -> bool:
    return any(s.matcher is not None for s in self._scheduler.queued())

  def _allowed(self, running: list[Sequence | None]) -> np.ndarray | None:
    """Returns the allowed tokens of each slot; None if no completion is constrained."""
    if not any(s is not None and s.matcher for s in running):
      return None
    words = -(-self._model.config.vocab_size // 32)
    allowed = np.full((self.config.slots, words), 2**32 - 1, np.uint32)
    for slot, s in enumerate(running):
      if s is not None and s.matcher is not None:
        allowed[slot] = s.matcher.mask()
    return allowed


def _key_data(seed: Any) -> np.ndarray:
  """Returns the data of a request's random key, uint32 [2]."""
  if isinstance(seed, int):
    return _int_key(seed)
  key = batching.random_key(secrets.randbits(32) if seed is None else seed)
  data = np.asarray(jax.random.key_data(key))
  if data.shape != (2,):  # another kind of key, from which a default one is drawn
    data = np.asarray(jax.random.bits(key, (2,), np.uint32))
  return data


@functools.lru_cache(maxsize=1024)
def _int_key(seed: int) -> np.ndarray:
  return np.asarray(jax.random.key_data(batching.random_key(seed)))


def _joined(deltas: list[Delta]) -> Completion:
  join = lambda name: (
    None
    if getattr(deltas[-1], name) is None and getattr(deltas[0], name) is None
    else np.concatenate(
      [getattr(d, name) for d in deltas if getattr(d, name) is not None]
    )
  )
  tops = [d.top for d in deltas if d.top is not None]
  top = None
  if tops:
    top = TopLogprobs(
      ids=np.concatenate([t.ids for t in tops]),
      logprobs=np.concatenate([t.logprobs for t in tops]),
    )
  reason = deltas[-1].finish_reason
  assert reason is not None
  return Completion(
    text="".join(d.text for d in deltas),
    tokens=np.concatenate([d.tokens for d in deltas]),
    logprobs=join("logprobs"),
    sampling_logprobs=join("sampling_logprobs"),
    top=top,
    versions=np.concatenate([d.versions for d in deltas]),
    finish_reason=reason,
  )
