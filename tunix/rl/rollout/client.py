"""The client of sampling: it draws actions for prompts, wherever the engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from tunix.generate.tokens import Completion
from tunix.rl.weights.placement import Weights

Group = tuple[int, int]  # number of the batch, number of the prompt in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
  """An action that is to be drawn.

  Attributes:
    episode: number of the episode in the batch. With `turn` it decides the random keys.
    turn: number of the action in its episode.
    prompt: int32 [T].
    max_tokens: most ids of the action.
    stops: texts that end it.
    stop_ids: ids that end it, in addition to the end-of-sequence ids.
    number: in a `Stream`, number of the action; None: that of the episode.
    group: in a `Stream`, numbers of the batch and of the prompt.
    key: in a `Stream`, random key of the batch.
  """

  episode: int
  turn: int
  prompt: np.ndarray
  max_tokens: int
  stops: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  number: int | None = None
  group: Group | None = None
  key: jax.Array | None = None

  @property
  def id(self) -> int:
    """Number that the drawn action has."""
    return self.episode if self.number is None else self.number


class ClientLost(RuntimeError):
  """An engine elsewhere has ended with all that was open; a new client may begin."""


class SamplingClient(Protocol):
  """Draws actions; all methods are called in one thread.

  Attributes:
    vocab_size: number of ids of the model; None: unknown.
  """

  vocab_size: int | None

  @property
  def open(self) -> int:
    """Number of actions that were submitted and not returned."""
    ...

  def submit(self, draws: Sequence[Draw]) -> None:
    """Takes actions to draw."""
    ...

  def poll(self) -> list[Completion]:
    """Works for a bounded time; returns the actions that are ready, if any.

    Their `number` is `Draw.id`. They have `sampling_logps`, and `versions` and `routes`
    if these are known.
    """
    ...

  def cancel(self) -> None:
    """Ends the client; what is open is not drawn."""
    ...


class Stream(SamplingClient, Protocol):
  """A client that draws actions of many batches, while its weights change.

  Two streams of one size draw the same bytes if they get the same actions and weights
  before the same launches. `poll` and `load` raise ClientLost.

  Attributes:
    launches: number of launches so far.
  """

  launches: int

  def load(self, weights: Weights) -> None:
    """Takes weights; open actions keep their tokens. The first ones start the stream.

    Tokens that are drawn from now on have the version `weights.version.step`.
    """
    ...


def keyed(key: jax.Array, turn: int) -> jax.Array:
  """Returns the key of a turn; that of the first turn is the key of a plain rollout."""
  return key if turn == 0 else jax.random.fold_in(key, turn)


def groups_of(draws: Sequence[Draw]) -> list[list[Draw]]:
  """Joins draws of consecutive episodes with equal prompts and rules."""
  groups: list[list[Draw]] = []
  for draw in draws:
    last = groups[-1][-1] if groups else None
    if last is not None and _are_alike(last, draw):
      groups[-1].append(draw)
    else:
      groups.append([draw])
  return groups


def _are_alike(a: Draw, b: Draw) -> bool:
  rules = lambda x: (x.turn, x.max_tokens, x.stops, x.stop_ids)
  return (
    b.episode == a.episode + 1
    and rules(a) == rules(b)
    and np.array_equal(a.prompt, b.prompt)
  )
