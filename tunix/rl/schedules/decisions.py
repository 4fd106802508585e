"""The decisions of a greedy run, and the client of a group that asks for them."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from tunix.generate.tokens import Completion
from tunix.rl.common import Rollouts
from tunix.rl.metrics import Phases
from tunix.rl.rollout.client import ClientLost, Draw, Group
from tunix.rl.weights.placement import Weights

if TYPE_CHECKING:
  from tunix.rl.schedules.engine_loop import EngineLoop

_LOOK_S = 0.2  # between two looks of a waiting group at what has changed


class Abandoned(RuntimeError):
  """Nobody waits for the completions of this group any more."""


class Start(NamedTuple):
  """A new engine with these weights."""

  weights: Weights


class Switch(NamedTuple):
  """Other weights for the running engine."""

  weights: Weights


class GroupDraws(NamedTuple):
  """Actions that a group asks for."""

  client: GroupClient
  draws: tuple[Draw, ...]


class GroupEnd(NamedTuple):
  """A group with its rewards.

  Attributes:
    client: drew its actions.
    rollouts: the completions.
    content: the same as JSON; None if there is no journal.
    offset: place of the content in the journal.
  """

  client: GroupClient
  rollouts: Rollouts
  content: Any = None
  offset: int = 0


Decision = Start | Switch | GroupDraws | GroupEnd


@dataclasses.dataclass
class Inbox:
  """Requests, ended groups and weights that no decision has taken.

  Attributes:
    draws, ends: in the order of their arrival.
    weights: by their number of updates.
  """

  draws: list[GroupDraws] = dataclasses.field(default_factory=list)
  ends: list[GroupEnd] = dataclasses.field(default_factory=list)
  weights: dict[int, Weights] = dataclasses.field(default_factory=dict)


class Decider(Protocol):
  """Chooses what takes effect before a launch."""

  def take(
    self, inbox: Inbox, launches: int, version: int | None
  ) -> tuple[list[Decision], bool]:
    """Removes decisions from the inbox.

    Args:
      inbox: what has arrived.
      launches: launches of the present stream.
      version: its weights; None: it has to start.

    Returns: the decisions, and True if a launch may follow them.
    """
    ...

  def lost(self, error: ClientLost) -> None:
    """Takes the loss of the stream; raises an error if no other one may start."""
    ...

  def check(self, is_needed: bool) -> None:
    """Raises an error if the thread has waited for too long.

    Args:
      is_needed: True if the learner waits too. Else the decision may follow from what
        the learner does, and its time does not count.
    """
    ...


class GroupClient:
  """Draws the actions of one group; see `SamplingClient`.

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
    self._loop.put(GroupDraws(self, tuple(draws)))

  def poll(self) -> list[Completion]:
    self._check()
    try:
      drawn = [self._answers.get(timeout=_LOOK_S)]
    except queue.Empty:
      return []
    self._open -= 1
    return drawn

  def cancel(self) -> None:
    self.is_abandoned = True

  def hand_in(self, rollouts: Rollouts, content: object, offset: int) -> None:
    """Gives the completions with rewards to the engine's thread; see `GroupEnd`."""
    self._check()
    self._loop.put(GroupEnd(self, rollouts, content, offset))

  def in_stream(self, draw: Draw, number: int) -> Draw:
    """Returns an action as a stream takes it."""
    own = {"number": number, "group": self.group, "key": self.key}
    return dataclasses.replace(draw, episode=draw.episode + self.first, **own)

  def answer(self, drawn: Completion) -> None:
    """Hands out an action; called in the engine's thread."""
    self._answers.put(drawn)

  def _check(self) -> None:
    if self.is_abandoned or not self._loop.is_running:
      raise Abandoned(f"group {self.group} is not needed any more")
