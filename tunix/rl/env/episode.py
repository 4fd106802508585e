"""Episodes: the turns of an environment, and the rows that are trained.

A row is a prompt and the ids after it. Drawn ids are trained; ids of observations are
not. Turns share a row while each prompt begins with the previous prompt and action. If
a prompt does not (a template dropped reasoning from it, or the environment rewrote it),
a new row begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tunix.generate.tokens import Tokens, chained
from tunix.models.images.prompt_images import PromptImages
from tunix.rl.env.env import Action, Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """One action and the environment's answer.

  Attributes:
    tokens: the drawn ids after the whole prompt of the action. The prompts of the turns
      of a row share their memory, see prompt_ids.py.
    action: the drawn ids, and their text.
    reward: reward of the action.
    metrics, logs: values that the environment returned with the answer.
    episode_done: True if the environment ended the episode with this answer.
    images: images of the prompt; None without images, and once the rows have them.
  """

  tokens: Tokens
  action: Action
  reward: float = 0.0
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  episode_done: bool = False
  images: PromptImages | None = None

  @property
  def prompt(self) -> np.ndarray:
    """The whole prompt of the action, int32 [T]."""
    return self.tokens.prompt

  @property
  def logps(self) -> np.ndarray:
    """Log-probabilities of the action when it was drawn, float32 [n], in nats."""
    assert self.tokens.sampling_logps is not None
    return self.tokens.sampling_logps

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
    group_reward: reward from `compute_group_rewards`.
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
    """Sum of the rewards of all actions and of `group_reward`."""
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

  def rows(self) -> list[Tokens]:
    """Returns the rows of the episode; none if nothing was drawn.

    The tokens of a row are the actions and observations after its first prompt.
    """
    return [chained([_rewarded(turn) for turn in group]) for group in self._groups()]

  def row_images(self) -> list[PromptImages | None]:
    """Returns the images of each row."""
    return [group[-1].images for group in self._groups()]

  def _groups(self) -> list[list[Turn]]:
    """Returns the turns of each row."""
    groups: list[list[Turn]] = []
    seen: list[int] = []
    for turn in self.turns:
      prompt = turn.prompt.tolist()
      if groups and prompt[: len(seen)] == seen:
        groups[-1].append(turn)
      else:
        groups.append([turn])
      seen = [*prompt, *turn.action]
    return groups


def _rewarded(turn: Turn) -> Tokens:
  """Returns the tokens of a turn with its reward."""
  rewards = np.zeros(len(turn.tokens.ids), np.float32)
  rewards[-1:] = turn.reward
  return dataclasses.replace(turn.tokens, rewards=rewards)
