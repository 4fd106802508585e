"""The scheduler: which completions run, on which pages, and what a launch does.

A launch is a few rounds on the device. Each round draws one token for every completion
that decodes, and may also prefill blocks of prompts. Between two launches, `plan`
takes three steps:

1. It admits waiting completions to free slots in the order of their rank, as long as
   there are pages for their tokens. Pages of a known prefix are shared.
2. It cuts the tokens that are not computed yet into blocks, and puts the blocks into
   rounds.
3. It takes the pages that the rounds will fill. If there are too few, the completion
   with the last rank is preempted: it gives its pages up and waits. Its tokens are
   kept, and they are prefilled again later.

If a completion is admitted while another one of its request prefills the prompt, it
becomes a follower: it waits in its slot, shares the full pages of its leader, and draws
its first token when the leader has prefilled the prompt (a fork).

The scheduler runs on the host only, and its decisions do not depend on time.
"""

from __future__ import annotations

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling import pages as pages_lib
from tunix.generate.engine.scheduling.layer_groups import Windows
from tunix.generate.engine.scheduling.page_groups import PageGroups
from tunix.generate.engine.scheduling.plan import Fork, Plan, rounds_of
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.engine.scheduling.waiting import Waiting


class Scheduler:
  """Queue, slots and pages.

  Args:
    config: sizes of the engine.
    windows: the windows of the groups of layers, see `layer_groups.windows_of`.

  Attributes:
    running: the completion in each slot, or None.
    pages: the pages of all groups of layers.
    waiting: the queue.
    preemptions: number of times that a completion was preempted.
    hit_tokens: number of prompt tokens that were not prefilled again, because they were
      in the cache or a leader prefilled them.
  """

  def __init__(self, config: EngineConfig, windows: Windows = (None,)):
    self._config, self._size = config, config.page_tokens
    self.pages = PageGroups(config, windows)
    self.running: list[Sequence | None] = [None] * config.slots
    self.waiting = Waiting()
    self.preemptions = 0
    self.hit_tokens = 0
    # Completions that are new in their slots, with the pages to copy for each of them.
    self._new: list[tuple[Sequence, tuple[int, ...]]] = []

  @property
  def is_busy(self) -> bool:
    """True if a completion runs, or may be admitted."""
    return self.waiting.first is not None or any(self.running)

  def active(self) -> list[Sequence]:
    """Returns the completions that have a slot, earliest rank first."""
    return sorted((s for s in self.running if s), key=lambda s: s.rank)

  def remove(self, sequence: Sequence) -> None:
    """Removes a completion from the queue, or from its slot, and frees its pages."""
    if sequence.slot is None:
      self.waiting.remove(sequence)
      return
    for follower in self._followers(sequence):
      self._requeue(follower)
    self._leave(sequence)

  def computed(self, sequence: Sequence, tokens: int) -> None:
    """Records that the first `tokens` tokens of a completion have keys and values."""
    first, end = sequence.computed // self._size, tokens // self._size
    sequence.computed = tokens
    if self._config.prefix_cache:
      sequence.name_pages(tokens, self._size)
      self.pages.name(sequence, range(first, end))

  def preempt(self, sequence: Sequence) -> None:
    """Takes slot and pages from a completion, and puts it back into the queue."""
    self.preemptions += 1
    for one in (*self._followers(sequence), sequence):
      self._requeue(one)

  def forget(self, version: int | str, recompute: bool) -> None:
    """Forgets all cached prefixes, before new weights are used.

    Args:
      version: version of the weights that the next launch uses.
      recompute: if True, running completions are preempted, and their tokens are
        computed again; if False, they continue with their old keys and values.
    """
    for s in self.active():
      if not recompute:
        # The pages of this completion mix two versions of the weights. A root digest
        # that no other completion has keeps them from being shared.
        s.digests = [pages_lib.root_digest(f"{version} in {s.order}", s.adapter)]
      # Without a slot, `s` is a follower that was preempted with its leader above.
      elif s.slot is not None:
        self.preempt(s)
    for s in self.waiting:
      s.digests = [pages_lib.root_digest(version, s.adapter)]
    self.pages.forget_all()

  def plan(self, rounds: int) -> Plan:
    """Returns the next launch, of at most `rounds` rounds."""
    for sequence in self.active():
      self.pages.release(sequence)
    self._admit()
    active, tokens = self.active(), self._config.launch_tokens(rounds)
    most = self.pages.most_blocks(active, tokens)
    plan = Plan(rounds=rounds_of(active, self._config, rounds, most))
    self._reserve(plan, tokens)
    # A round that is full of prompt blocks takes long. A launch with such a round gets
    # no further rounds, so that it ends sooner and the host can return first tokens.
    if not plan.fills_a_round(self._config):
      plan.decode_rounds = rounds - len(plan.rounds)
    self._fork(plan)
    for sequence, copied in self._new:
      if sequence.slot is not None and sequence.computed:
        plan.loads.append(sequence)
        if copied:
          target = sequence.pages_at(sequence.computed // self._size)
          plan.copies.append(tuple(zip(copied, target)))
    self._new = []
    return plan

  def forked(self, fork: Fork) -> None:
    """Records that a follower drew its first token. The next launch loads its slot."""
    fork.follower.leader = None
    self._new.append((fork.follower, fork.copied))

  def _admit(self) -> None:
    while (sequence := self.waiting.first) and None in self.running:
      leader = self._leader_of(sequence)
      if leader is None and not self._find_pages(sequence):
        return  # Later ones wait too: small ones would overtake and starve this one.
      self.waiting.pop()
      sequence.leader, sequence.is_started = leader, True
      sequence.slot = self.running.index(None)
      self.running[sequence.slot] = sequence
      if leader is None:
        self._new.append((sequence, ()))

  def _leader_of(self, sequence: Sequence) -> Sequence | None:
    """Returns the running completion of the same request that prefills its prompt."""
    if sequence.drawn:
      return None
    same = (s for s in self.running if s is not None and s.ticket is sequence.ticket)
    return next((s for s in same if s.leader is None and not s.drawn), None)

  def _find_pages(self, sequence: Sequence) -> bool:
    """Gives a completion pages, shared ones first; returns False if it cannot."""
    shares = self._config.prefix_cache and not sequence.needs_scores
    if shares:
      sequence.name_pages(sequence.length, self._size)
    if not self.pages.admit(sequence, shares):
      return False
    if not sequence.drawn:
      self.hit_tokens += sequence.hit(sequence.computed)
    return True

  def _reserve(self, plan: Plan, tokens: int) -> None:
    """Takes the pages that the launch fills, and preempts completions if it must.

    Args:
      plan: has the blocks of the launch. Blocks of preempted completions are removed.
      tokens: largest number of tokens that a completion draws in the launch.
    """
    ends = {b.sequence: b.start + b.count for blocks in plan.rounds for b in blocks}
    for sequence in self.active():
      end = ends.get(sequence, sequence.length if sequence.is_decoding else 0)
      if end == sequence.length:  # the completion draws tokens in this launch
        end = min(end + tokens, sequence.limit)
      while sequence.slot is not None and not self.pages.grow(sequence, end):
        self.preempt(max((s for s in self.active() if s.pages), key=lambda s: s.rank))

    def placed(blocks):
      return [b for b in blocks if b.sequence.slot is not None]

    plan.rounds = [left for blocks in plan.rounds if (left := placed(blocks))]

  def _fork(self, plan: Plan) -> None:
    """Gives the followers of a prefilled leader its full pages."""
    for leader in [b.sequence for r in plan.rounds for b in r if b.is_last]:
      for follower in self._followers(leader):
        copied = self.pages.fork(leader, follower)
        if copied is None:
          self._requeue(follower)
          continue
        self.hit_tokens += follower.hit(leader.length)
        plan.forks.append(Fork(leader, follower, copied))
    if plan.forks:
      # The leader's pages are complete only at the end of this launch, so the next
      # launch loads the slots of the followers. In further rounds of this launch, these
      # slots would be idle.
      plan.decode_rounds = 0

  def _followers(self, leader: Sequence) -> list[Sequence]:
    return [s for s in self.running if s is not None and s.leader is leader]

  def _requeue(self, sequence: Sequence) -> None:
    self._leave(sequence)
    self.waiting.add(sequence)

  def _leave(self, sequence: Sequence) -> None:
    assert sequence.slot is not None
    self.running[sequence.slot] = None
    self.pages.drop(sequence)
    sequence.slot, sequence.leader = None, None
    sequence.computed = sequence.drafted = 0
