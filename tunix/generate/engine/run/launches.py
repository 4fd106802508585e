"""Launches of an engine: choosing their work, running them, reading their tokens."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device.state import LaunchOutput
from tunix.generate.engine.request import RequestError
from tunix.generate.engine.run import results
from tunix.generate.engine.run.device import Device
from tunix.generate.engine.scheduling import matchers
from tunix.generate.engine.scheduling.draft_policy import DraftPolicy, Source
from tunix.generate.engine.scheduling.plan import Plan
from tunix.generate.engine.scheduling.scheduler import Scheduler
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.engine.stats import COUNTED


class Launches:
  """Plans launches, runs them, and hands out the drawn tokens.

  Args:
    config: sizes of the engine.
    device: runs a launch, see `device.Device`.
    scheduler: queue, slots and pages.
    drafts: chooses the source of drafts.
    vocab_size: V.
    end: called with each completion that has ended and the reason.

  Attributes:
    counts: counts since the engine was made, see `EngineStats`.
  """

  def __init__(
    self,
    config: EngineConfig,
    device: Device,
    scheduler: Scheduler,
    drafts: DraftPolicy,
    vocab_size: int,
    end: Callable[[Sequence, str], None],
  ):
    self._config, self._device, self._scheduler = config, device, scheduler
    self._drafts, self._vocab_size, self._end = drafts, vocab_size, end
    # All keys are there from the start, because other threads read the counts.
    self.counts = collections.Counter(dict.fromkeys(COUNTED, 0))

  def reset_counts(self) -> None:
    """Sets all counts to 0, in place: other threads read them."""
    self.counts.update({name: -n for name, n in self.counts.items()})

  def run(self, version: int) -> bool:
    """Runs one launch; returns False if there was nothing to do.

    Args:
      version: number of the weights.
    """
    scheduler = self._scheduler
    rounds = self._config.rounds
    if any(s.matcher for s in scheduler.active()) or self._next_is_constrained():
      rounds = 1  # the host computes the allowed tokens after each token
    drawn = self._drawn_alone()
    plan = scheduler.plan(min(rounds, drawn or rounds))
    if drawn == 0 and plan.rounds:
      plan.decode_rounds = 0
    running = list(scheduler.running)
    if not any(running):
      return False
    masks = None
    if any(s is not None and s.matcher for s in running):
      masks = functools.partial(self._allowed, running)
    idle = self._config.slots - sum(s is not None for s in running)
    self._device.look_at(idle + 1 if scheduler.waiting.first else 2**30)
    source = "none" if masks is not None else self._drafts.choose()
    start = time.perf_counter()
    out, scored = self._device.launch(plan, running, masks, source)
    self._watch(plan, source, out, time.perf_counter() - start)
    self._count(plan, source, out)
    for rounds_run, scores in scored:
      size = self._config.page_tokens
      results.score_prompts(rounds_run, scores, size)
      if scores.routes is not None:
        results.record_prompts(rounds_run, scores, size)
    self._read(plan, running, out, source, version)
    return True

  def _count(self, plan: Plan, source: Source, out: LaunchOutput) -> None:
    proposed, accepted = int(out.proposed), int(out.accepted)
    self.counts.update(
      launches=1,
      rounds=int(out.rounds),
      draft_tokens=proposed,
      accepted_tokens=accepted,
      prefilled_tokens=sum(b.count for r in plan.rounds for b in r),
    )
    if source == "model":
      self.counts.update(model_draft_tokens=proposed, model_accepted_tokens=accepted)

  def _watch(
    self, plan: Plan, source: Source, out: LaunchOutput, seconds: float
  ) -> None:
    turns, drawn = int(out.turns), int(out.decoded)
    hits, seen = int(out.predicted), int(out.watched)
    self._drafts.record(source, turns, drawn, hits, seen)
    if not plan.rounds and turns:
      self._drafts.record_time(source, self._device.width, seconds / int(out.rounds))

  def _read(
    self,
    plan: Plan,
    running: list[Sequence | None],
    out: LaunchOutput,
    source: Source,
    version: int,
  ) -> None:
    """Reads the tokens that a launch drew, and hands them out."""
    size = self._config.page_tokens
    before = [0 if s is None else s.computed for s in running]
    ends = {b.sequence: b.start + b.count for r in plan.rounds for b in r}
    for fork in plan.forks:
      self._scheduler.forked(fork)
      if (routes := fork.leader.routes) is not None:
        fork.follower.record(0, routes[: len(fork.leader.request.prompt)])
    # A follower has its leader's pages, and the next launch copies the last, partial
    # one. So nothing is written for it here.
    followers = {fork.follower for fork in plan.forks}
    leaders = {fork.leader for fork in plan.forks}
    written, over = [], []
    for slot, s in enumerate(running):
      if s is None:
        continue
      count, reason = results.take(s, out)
      self.counts["generated_tokens"] += count
      computed = s.length - 1 if count else ends.get(s, s.computed)
      self._scheduler.computed(s, computed)
      # Full pages are written. A partial page stays in its row, unless followers
      # copy it.
      end = -(-computed // size) if s in leaders else computed // size
      if s not in followers:
        pages = range(before[slot] // size, end)
        written += [(slot, page, *s.pages_at(page)) for page in pages]
      # With a reason, the completion ended before the token with such logits.
      if out.is_not_finite[slot] and reason is None:
        s.failure = _not_finite(s)
      results.hand_out(s, out, slot, count, None if s.failure else reason, version)
      if s.failure is not None:
        over.append((s, "error"))
      elif reason is not None:
        over.append((s, reason))
    self._device.write(written)
    if source == "model":
      assert self._device.draft is not None
      self._device.draft.after(plan, running)
    for s, reason in over:
      self._end(s, reason)

  def _drawn_alone(self) -> int | None:
    """Returns the number of tokens of a stream that runs alone; None otherwise.

    Its launches draw 1, 1, 2, 4 and 8 tokens, so that a short text arrives in parts
    too. This costs up to four more launches, and delays no other completion.
    """
    match [*self._scheduler.active(), *self._scheduler.waiting]:
      case [alone] if alone.reader.streams:
        return alone.drawn
    return None

  def _next_is_constrained(self) -> bool:
    return any(s.matcher is not None for s in self._scheduler.waiting)

  def _allowed(self, running: list[Sequence | None]) -> np.ndarray:
    """Returns the allowed tokens of each slot, see `token_sampling.choose`."""
    words = -(-self._vocab_size // 32)
    allowed = np.full((self._config.slots, words), 2**32 - 1, np.uint32)
    for slot, s in enumerate(running):
      if s is not None and (mask := matchers.mask(s, words)) is not None:
        allowed[slot] = mask
    return allowed


def _not_finite(s: Sequence) -> RequestError:
  start = (
    f"{s.ticket.id}: the logits after token {s.length - 1} (completion {s.sample})"
  )
  if s.request.logit_bias or s.matcher is not None:
    return RequestError(
      f"{start} are not finite. Either no token is allowed by both logit_bias and the "
      "constraint, or the weights of the model are not finite: check both"
    )
  return RequestError(f"{start} are not finite: check the weights of the model")
