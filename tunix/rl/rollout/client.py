"""Interfaces of sampling clients, which draw actions for prompts.

The engine of a client runs in this process or on other hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from tunix.generate.tokens import Completion
from tunix.models.images.prompt_images import PromptImages
from tunix.rl.weights.placement import Weights

Group = tuple[int, int]  # number of the batch, number of the prompt in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
  """A request to draw one action: the tokens of one turn of an episode.

  Attributes:
    episode: number of the episode in the batch. With `turn` it selects the random key.
    turn: number of the action in its episode.
    prompt: token ids, int32 [T].
    max_tokens: largest number of tokens of the action.
    stops: strings that end the action.
    stop_ids: token ids that end the action, in addition to the end-of-sequence ids.
    number: in a `Stream`, number of the action; None: `episode` is its number.
    group: in a `Stream`, numbers of the batch and of the prompt.
    key: in a `Stream`, random key of the batch.
    images: images of the prompt, or None.
    forbidden: token ids that are never drawn.
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
  images: PromptImages | None = None
  forbidden: tuple[int, ...] = ()

  @property
  def id(self) -> int:
    """Number of the drawn action: `number`, or `episode` if `number` is None."""
    return self.episode if self.number is None else self.number

  @property
  def digests(self) -> tuple[bytes, ...]:
    """Digests of the images; empty without images."""
    return () if self.images is None else self.images.digests


class ClientLost(RuntimeError):
  """The engine of another host is lost with all open actions; start a new client."""


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
    """Submits actions to draw."""
    ...

  def poll(self) -> list[Completion]:
    """Works for a bounded time; returns the actions that are ready, if any.

    The `number` of a returned action is its `Draw.id`. It has `sampling_logps`, and, if
    they are known, `versions` and `routes`.
    """
    ...

  def cancel(self) -> None:
    """Ends the client; open actions are not drawn."""
    ...


class Stream(SamplingClient, Protocol):
  """A client that draws actions of many batches, while its weights change.

  Two streams whose engines have equal sizes draw the same bytes if they get the same
  actions and weights before the same launches. `poll` and `load` raise ClientLost if
  the engine is lost.

  Attributes:
    launches: number of launches so far.
  """

  launches: int

  def load(self, weights: Weights) -> None:
    """Loads weights; open actions keep their tokens. The first call starts the stream.

    Tokens that are drawn from now on have the version `weights.version.step`.
    """
    ...


def keyed(key: jax.Array, turn: int) -> jax.Array:
  """Returns the random key of a turn: the batch's `key` itself for turn 0."""
  return key if turn == 0 else jax.random.fold_in(key, turn)


def groups_of(draws: Sequence[Draw]) -> list[list[Draw]]:
  """Groups draws of consecutive episodes with equal turns, prompts and rules to end."""
  groups: list[list[Draw]] = []
  for draw in draws:
    last = groups[-1][-1] if groups else None
    if last is not None and _are_alike(last, draw):
      groups[-1].append(draw)
    else:
      groups.append([draw])
  return groups


def _are_alike(a: Draw, b: Draw) -> bool:
  def rules(x):
    return (x.turn, x.max_tokens, x.stops, x.stop_ids)

  return (
    b.episode == a.episode + 1
    and rules(a) == rules(b)
    and np.array_equal(a.prompt, b.prompt)
    and a.digests == b.digests
  )
