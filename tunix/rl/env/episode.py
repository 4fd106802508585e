"""Episodes: the turns of an environment, and the rows that are trained.

A row is a prompt and the ids after it, of which those that were drawn are trained and
those of observations are not. The turns of an episode are one row as long as each
prompt begins with the prompt and the action before it. Where a prompt does not (a
template dropped reasoning from it, or the environment rewrote it), a new row begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix.rl.env.env import Action, Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """One action and the environment's answer.

  Attributes:
    prompt: int32 [T], the whole prompt of the action. The turns of a row share its
      memory, see prompt_ids.py.
    action: the ids that were drawn, and their text.
    logps: float32 [n], their log-probabilities when they were drawn, in nats.
    versions: int32 [n], version of the weights that drew each, or None.
    routes: experts of the tokens of the prompt and the action, or None; see `Drawn`.
      They are not saved with an episode, because its rows have them.
    reward: reward of the action.
    metrics, logs: what the environment gave with it.
    episode_done: True if the environment ended the episode with it.
  """

  prompt: np.ndarray
  action: Action
  logps: np.ndarray
  versions: np.ndarray | None = None
  routes: np.ndarray | None = None
  reward: float = 0.0
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  episode_done: bool = False

  # The names of tinker-cookbook's transitions, for its `compute_group_rewards`.

  @property
  def ob(self) -> CookbookInput:
    """The prompt."""
    return self.prompt.view(CookbookInput)

  @property
  def ac(self) -> CookbookAction:
    """The ids and log-probabilities of the action."""
    logps = self.logps.tolist()
    return CookbookAction(list(self.action), logps, logps)


class CookbookInput(np.ndarray):
  """Ids that can be read like a `tinker.ModelInput`."""

  @property
  def length(self) -> int:
    """Number of the ids."""
    return self.size

  def to_ints(self) -> list[int]:
    """Returns the ids."""
    return self.tolist()


class CookbookAction(NamedTuple):
  """An action in tinker-cookbook's form."""

  tokens: list[int]
  maybe_logprobs: list[float]
  logprobs: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Ids of one or more turns.

  Attributes:
    prompt: int32 [T], ids before the first action.
    ids: int32 [n], actions and observations after it; the last one was drawn.
    drawn: bool [n], True for ids that were drawn.
    logps: float32 [n], 0 on observations.
    versions: int32 [n] or None.
    rewards: float32 [n], the reward of an action at its last id, else 0.
    routes: experts of the prompt's ids and of `ids`, [T + n, M, k]; or None.
  """

  prompt: np.ndarray
  ids: np.ndarray
  drawn: np.ndarray
  logps: np.ndarray
  versions: np.ndarray | None
  rewards: np.ndarray
  routes: np.ndarray | None = None


@dataclasses.dataclass(kw_only=True)
class Episode:
  """The turns of one environment, and how they ended.

  Attributes:
    turns: the actions, in their order.
    messages: the conversation; empty if observations are ids.
    finish_reason: "done" (the environment ended it), "turns", "tokens", "observation"
      (no room for it), "seconds", or "failed".
    failure: why the environment failed; None if it did not.
    environment: the environment, None if it was never made.
    group_reward: what `compute_group_rewards` gave.
    metrics: further numbers of the episode.
  """

  turns: list[Turn] = dataclasses.field(default_factory=list)
  messages: list[Message] = dataclasses.field(default_factory=list)
  finish_reason: str = "done"
  failure: str | None = None
  environment: Any = None
  group_reward: float = 0.0
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def reward(self) -> float:
    """Sum of the rewards of all actions, and the reward in the group."""
    return sum(turn.reward for turn in self.turns) + self.group_reward

  @property
  def text(self) -> str:
    """Texts of the actions, one paragraph each."""
    return "\n\n".join(turn.action.text for turn in self.turns)

  @property
  def transitions(self) -> list[Turn]:
    """The turns, under the name that tinker-cookbook's trajectories give them."""
    return self.turns

  @property
  def stop_reason(self) -> str | None:
    """The reason of the end, as tinker-cookbook's trajectories name it.

    It is the name of a metric `stop/<reason>` that the environment gave, or None.
    """
    last = self.turns[-1].metrics if self.turns else {}
    names = (name for name, value in last.items() if name.startswith("stop/") and value)
    return next((name.removeprefix("stop/") for name in names), None)

  @property
  def final_ob(self) -> CookbookInput:
    """The ids of the last prompt and action."""
    last = [[*t.prompt.tolist(), *t.action] for t in self.turns[-1:]] or [[]]
    return np.array(last[0], np.int32).view(CookbookInput)

  def rows(self) -> list[Row]:
    """Returns the rows of the episode; none if nothing was drawn."""
    groups: list[list[Turn]] = []
    seen: list[int] = []
    for turn in self.turns:
      prompt = turn.prompt.tolist()
      if groups and prompt[: len(seen)] == seen:
        groups[-1].append(turn)
      else:
        groups.append([turn])
      seen = [*prompt, *turn.action]
    return [_row(group) for group in groups]


def _row(turns: Sequence[Turn]) -> Row:
  first = turns[0].prompt
  at = len(first)
  parts: dict[str, list[Any]] = {"ids": [], "drawn": [], "logps": [], "rewards": []}
  versions: list[Any] = []
  has_versions = all(turn.versions is not None for turn in turns)
  for turn in turns:
    observed = turn.prompt[at:]
    n, k = len(observed), len(turn.action)
    parts["ids"] += [observed, np.array(turn.action, np.int32)]
    parts["drawn"] += [np.zeros(n, bool), np.ones(k, bool)]
    parts["logps"] += [np.zeros(n, np.float32), turn.logps]
    rewards = np.zeros(n + k, np.float32)
    rewards[-1] = turn.reward
    parts["rewards"].append(rewards)
    if has_versions:
      # An observation counts with the version that read it.
      first_version = turn.versions[:1] if turn.versions is not None else []
      versions += [np.repeat(first_version, n), turn.versions]
    at = len(turn.prompt) + k
  kinds = {"ids": np.int32, "drawn": bool, "logps": np.float32, "rewards": np.float32}
  joined = {k: np.concatenate(v).astype(kinds[k]) for k, v in parts.items()}
  stamps = np.concatenate(versions).astype(np.int32) if has_versions else None
  return Row(prompt=first, versions=stamps, routes=_routes(turns), **joined)


def _routes(turns: Sequence[Turn]) -> np.ndarray | None:
  """Returns the experts of the ids of a row; None if a turn has none.

  A token keeps the experts of its first run. The last id of an action is run in the
  next turn.
  """
  known = [turn.routes for turn in turns if turn.routes is not None]
  if len(known) < len(turns):
    return None
  ends = [0, *(len(routes) - 1 for routes in known)]
  parts = [routes[start:-1] for start, routes in zip(ends, known)]
  return np.concatenate([*parts, known[-1][-1:]])
