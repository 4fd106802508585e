"""The thread of a greedy engine: between two launches it takes what has arrived.

Threads of groups ask for actions and hand in ended groups, the learner offers weights.
All of this goes into one inbox, which only the engine's thread empties. A decider (see
deciders.py) chooses what of it takes effect before the next launch. What follows from
these decisions and from the seed is a function of them: the engine computes the same
bytes for the same sequence of requests, weights and launches.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from tunix.generate.engine.engine import Engine
from tunix.generate.tokens import Completion
from tunix.rl.common import Rollouts
from tunix.rl.env.policy import Draw
from tunix.rl.metrics import Phases
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.turns import EngineTurns
from tunix.rl.schedules.journal import Group
from tunix.rl.weights import placement
from tunix.rl.weights.placement import Weights
from tunix.utils import mesh as mesh_lib

_LOOK_S = 0.2  # between two looks of a waiting thread at what has changed


class Abandoned(RuntimeError):
  """Nobody waits for the completions of this group any more."""


class Start(NamedTuple):
  """A new engine with these weights."""

  weights: Weights


class Switch(NamedTuple):
  """Other weights for the running engine."""

  weights: Weights


class Asked(NamedTuple):
  """Actions that a group asks for."""

  policy: GroupPolicy
  draws: tuple[Draw, ...]


class Ended(NamedTuple):
  """A group with its rewards.

  Attributes:
    policy: drew its actions.
    rollouts: the completions.
    content: the same as JSON; None if there is no journal.
    offset: place of the content in the journal.
  """

  policy: GroupPolicy
  rollouts: Rollouts
  content: Any = None
  offset: int = 0


Decision = Start | Switch | Asked | Ended


@dataclasses.dataclass
class Inbox:
  """Requests, ended groups and weights that no decision has taken.

  Attributes:
    asked, ended: in the order of their arrival.
    offered: weights by the number of updates.
  """

  asked: list[Asked] = dataclasses.field(default_factory=list)
  ended: list[Ended] = dataclasses.field(default_factory=list)
  offered: dict[int, Weights] = dataclasses.field(default_factory=dict)


class Decider(Protocol):
  """Chooses what takes effect before a launch."""

  def take(
    self, inbox: Inbox, launches: int, version: int | None
  ) -> tuple[list[Decision], bool]:
    """Removes decisions from the inbox.

    Args:
      inbox: what has arrived.
      launches: launches of the present engine.
      version: its weights; None before the first `Start`.

    Returns: the decisions, and True if a launch may follow them.
    """
    ...

  def check(self, is_needed: bool) -> None:
    """Raises an error if the thread has waited for too long.

    Args:
      is_needed: True if the learner waits too. Else the decision may follow from what
        the learner does, and its time does not count.
    """
    ...


class GroupPolicy:
  """Draws the actions of one group; see `env.policy.Policy`.

  Args:
    loop: the engine's thread.
    group: number of the group.
    key: random key of its batch.
    first: number of its first episode in the batch.
  """

  def __init__(self, loop: EngineLoop, group: Group, key: jax.Array, first: int):
    self._loop, self.group, self.key, self.first = loop, group, key, first
    self.vocab_size: int | None = loop.vocab_size
    self.phases = Phases()  # only the group's thread uses it before `hand_in`
    self.turns: EngineTurns | None = None  # only the engine's thread uses it
    self.is_abandoned = False
    self._open = 0
    self._answers: queue.SimpleQueue[Completion] = queue.SimpleQueue()

  @property
  def open(self) -> int:
    self._check()
    return self._open

  def submit(self, draws: Sequence[Draw]) -> None:
    self._check()
    self._open += len(draws)
    self._loop.put(Asked(self, tuple(draws)))

  def poll(self) -> list[Completion]:
    self._check()
    try:
      drawn = [self._answers.get(timeout=_LOOK_S)]
    except queue.Empty:
      return []
    self._open -= 1
    return drawn

  def hand_in(self, rollouts: Rollouts, content: Any, offset: int) -> None:
    """Gives the completions with their rewards to the engine's thread; see `Ended`."""
    self._check()
    self._loop.put(Ended(self, rollouts, content, offset))

  def answer(self, drawn: Completion) -> None:
    """Hands out an action; called in the engine's thread."""
    self._answers.put(dataclasses.replace(drawn, number=drawn.number - self.first))

  def _check(self) -> None:
    if self.is_abandoned or not self._loop.is_running:
      raise Abandoned(f"group {self.group} is not needed any more")


class EngineLoop:
  """Steps an engine in a thread of its own.

  Args:
    make_engine: makes an engine and its model; called in the thread.
    config: choice of the tokens.
    decider: see the module.
    on_end: called with each ended group, in the thread, while `changed` is held.
    on_start: called after a second or later `Start`, in the thread.
    vocab_size: number of ids of the model.
    mesh: mesh of the thread; None: that of the caller of `start`.

  Attributes:
    changed: notified after each decision; guards the inbox and what `on_end` writes.
    failure: the exception that ended the thread.
    moved: time of the last decision.
    is_needed: True while the learner waits for completions.
    vocab_size: number of ids of the model.
  """

  def __init__(
    self,
    make_engine: Callable[[], tuple[Engine, Any]],
    config: RolloutConfig,
    decider: Decider,
    *,
    on_end: Callable[[Ended], None],
    on_start: Callable[[], None],
    vocab_size: int,
    mesh: Any = None,
  ):
    self._mesh = mesh
    self._make_engine, self._config, self._decider = make_engine, config, decider
    self._on_end, self._on_start, self.vocab_size = on_end, on_start, vocab_size
    self.changed = threading.Condition()
    self.failure: BaseException | None = None
    self.moved, self.is_needed = time.monotonic(), False
    self._inbox = Inbox()
    self._engine: Engine | None = None
    self._model: Any = None
    self._version: int | None = None
    self._launches, self._idle_s = 0, 0.0
    self._drawing: dict[GroupPolicy, None] = {}
    self._parked, self._is_working, self._stops = 0, False, False
    self._thread: threading.Thread | None = None

  # Other threads.

  @property
  def is_running(self) -> bool:
    """True until the thread has ended or is told to end."""
    return not self._stops and self.failure is None

  def start(self) -> None:
    """Starts the thread."""
    mesh = mesh_lib.current_mesh() if self._mesh is None else self._mesh
    self._thread = threading.Thread(
      target=self._run,
      args=(mesh,),
      name="tunix-greedy",
      daemon=True,
    )
    self._thread.start()

  def put(self, item: Asked | Ended) -> None:
    """Takes what a group asks for, or its end."""
    with self.changed:
      if isinstance(item, Asked):
        self._inbox.asked.append(item)
      else:
        self._inbox.ended.append(item)
      self.changed.notify_all()

  def offer(self, weights: Weights) -> None:
    """Takes the newest weights."""
    with self.changed:
      self._inbox.offered[weights.version.step] = weights
      self.changed.notify_all()

  def fail(self, error: BaseException) -> None:
    """Ends the thread with the error of a group, if it has none yet."""
    with self.changed:
      self.failure = self.failure or error
      self.changed.notify_all()

  def park(self, timeout_s: float) -> None:
    """Waits for the end of the present launch; none follows before `go_on`.

    Raises:
      TimeoutError: the launch has not ended in time.
    """
    with self.changed:
      self._parked += 1
      if not self.changed.wait_for(lambda: not self._is_working, timeout_s):
        self._parked -= 1
        raise TimeoutError(
          f"a launch of the engine has not ended within {timeout_s:g} s "
          "(rollout_timeout_s), and an evaluation waits for it: raise it"
        )

  def go_on(self) -> None:
    """Lets launches follow again after `park`."""
    with self.changed:
      self._parked -= 1
      self.moved = time.monotonic()
      self.changed.notify_all()

  def take_idle(self) -> float:
    """Returns the seconds since the last call in which nothing could be drawn."""
    with self.changed:
      idle, self._idle_s = self._idle_s, 0.0
    return idle

  def stop(self, timeout_s: float) -> bool:
    """Ends the thread after its launch; returns False if it has not ended in time."""
    with self.changed:
      self._stops = True
      self.changed.notify_all()
    if self._thread is None:
      return True
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  # The engine's thread.

  def _run(self, mesh: Any) -> None:
    try:
      with mesh_lib.use_mesh(mesh):
        while self._once():
          pass
    except BaseException as error:  # raised in the learner's thread
      self.fail(error)
    finally:
      self._is_working = False
      if self._engine is not None:
        self._engine.close()
      with self.changed:
        self.changed.notify_all()

  def _once(self) -> bool:
    with self.changed:
      if not self.is_running:
        return False
      if self._parked:
        self.changed.wait(_LOOK_S)
        return True
      state = self._launches, self._version
      decisions, may_step = self._decider.take(self._inbox, *state)
      engine = self._engine
      is_busy = engine is not None and engine.is_busy
      if not decisions and not (may_step and is_busy):
        start = time.monotonic()
        self._decider.check(self.is_needed)
        self.changed.wait(_LOOK_S)
        self._idle_s += time.monotonic() - start
        return True
      self._is_working = True
    for decision in decisions:
      self._apply(decision)
    if may_step and self._engine is not None and self._engine.step():
      self._launches += 1
      self._hand_out()
    with self.changed:
      self._is_working = False
      self.moved = time.monotonic()
      self.changed.notify_all()
    return True

  def _apply(self, decision: Decision) -> None:
    if isinstance(decision, Start):
      self._begin(decision.weights)
    elif isinstance(decision, Switch):
      self._load(decision.weights)
    elif isinstance(decision, Ended):
      if not decision.policy.is_abandoned:
        with self.changed:
          self._on_end(decision)
    elif not decision.policy.is_abandoned:
      self._draw(decision)

  def _begin(self, weights: Weights) -> None:
    is_first = self._engine is None
    if self._engine is not None:
      self._engine.close()
    (self._engine, self._model), self._launches = self._make_engine(), 0
    self._drawing.clear()
    self._load(weights)
    if not is_first:
      with self.changed:
        self._inbox.asked.clear()
        self._inbox.ended.clear()
        self._on_start()

  def _load(self, weights: Weights) -> None:
    assert self._engine is not None
    placement.put(self._model, weights.arrays)
    self._version = weights.version.step
    self._engine.update_weights(version=self._version, mode="keep")

  def _draw(self, asked: Asked) -> None:
    policy = asked.policy
    if policy.turns is None:
      assert self._engine is not None
      policy.turns = EngineTurns(self._engine, self._config, policy.key)
    moved = [
      dataclasses.replace(draw, episode=draw.episode + policy.first)
      for draw in asked.draws
    ]
    policy.turns.submit(moved)
    self._drawing[policy] = None

  def _hand_out(self) -> None:
    for policy in list(self._drawing):
      assert policy.turns is not None
      for drawn in policy.turns.arrived():
        policy.answer(drawn)
      if not policy.turns.open:
        del self._drawing[policy]
