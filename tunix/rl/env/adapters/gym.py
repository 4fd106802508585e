"""Environments of Gymnasium whose observations and actions can be texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunix.rl.env.env import Action, StepResult


class GymEnvironment:
  """An environment of Gymnasium as an `Env`.

  An answer that `to_action` refuses with a ValueError gets the error as the next
  observation and `penalty` as its reward.

  Args:
    environment: a `gymnasium.Env`.
    to_action: turns the text of an answer into an action.
    to_text: turns an observation into a text.
    seed: seed of `reset`.
    penalty: reward of an answer that is no action.
  """

  def __init__(
    self,
    environment: Any,
    to_action: Callable[[str], Any],
    to_text: Callable[[Any], str] = str,
    *,
    seed: int | None = None,
    penalty: float = 0.0,
  ):
    self._environment, self._to_action, self._to_text = environment, to_action, to_text
    self._seed, self._penalty = seed, penalty

  def initial_observation(self) -> str:
    """Resets the environment."""
    observation, _ = self._environment.reset(seed=self._seed)
    return self._to_text(observation)

  def step(self, action: Action) -> StepResult:
    """Takes an answer; ends if the environment is terminated or truncated."""
    try:
      wanted = self._to_action(action.text)
    except ValueError as error:
      return StepResult(
        reward=self._penalty,
        episode_done=False,
        next_observation=f"Error: {error}.",
        metrics={"no_action": 1.0},
      )
    observation, reward, terminated, truncated, _ = self._environment.step(wanted)
    return StepResult(
      reward=float(reward),
      episode_done=bool(terminated or truncated),
      next_observation=self._to_text(observation),
      metrics={"no_action": 0.0},
    )

  def close(self) -> None:
    """Closes the environment."""
    self._environment.close()
