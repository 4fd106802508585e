"""The policy as an episode sees it: actions for prompts, many at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tunix.generate.tokens import Completion


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
  """

  episode: int
  turn: int
  prompt: np.ndarray
  max_tokens: int
  stops: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()


class Policy(Protocol):
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

    Their `number` is that of the episode. They have `sampling_logps`, and `versions`
    and `routes` if these are known.
    """
    ...
