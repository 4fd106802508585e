"""Rollouts as JSON, for batches in checkpoints, for the journal and between processes.

A checkpoint has the batches that are sampled and not trained on. The journal of a
greedy run is rl/schedules/journal.py.

Arrays keep every bit (array_codec.py). Other values of the user (columns of the data,
messages) must be JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.generate.tokens import Tokens, without_unknown
from tunix.rl.common import Rollouts
from tunix.rl.env.env import Action
from tunix.rl.env.episode import Episode, Turn
from tunix.rl.pipeline import PromptBatch
from tunix.rl.reward.outcomes import Failed, TimedOut, Value
from tunix.rl.reward.rewards import RewardOutput
from tunix.utils import array_codec
from tunix.utils.setting import field_values, named_values

_OUTCOMES = {kind.__name__: kind for kind in (Value, Failed, TimedOut)}


def to_json(rollouts: Rollouts) -> dict[str, Any]:
  """Returns rollouts as JSON; environments are left out.

  Raises:
    TypeError: a column of the data or a message of an environment is not JSON.
  """
  out = without_unknown(field_values(rollouts))
  if out["images"] is None:
    del out["images"]
  rewards: RewardOutput = out["rewards"]
  out["rewards"] = {
    "weights": dict(rewards.weights),
    "outcomes": {
      name: [[type(x).__name__, *dataclasses.astuple(x)] for x in rows]
      for name, rows in rewards.outcomes.items()
    },
  }
  out["batch"] = dataclasses.asdict(rollouts.batch)
  out["episodes"] = [_episode(episode) for episode in rollouts.episodes]
  return _checked(out)


def from_json(saved: dict[str, Any]) -> Rollouts:
  """Returns the rollouts of `to_json`."""
  fields = array_codec.from_json(saved)
  rewards = fields["rewards"]
  outcomes = {
    name: [_OUTCOMES[kind](value) for kind, value in rows]
    for name, rows in rewards["outcomes"].items()
  }
  fields["rewards"] = RewardOutput(outcomes=outcomes, weights=rewards["weights"])
  fields["batch"] = PromptBatch(**fields["batch"])
  fields["episodes"] = [_episode_of(episode) for episode in fields["episodes"]]
  if isinstance(images := fields.get("images"), list):  # patches and their grids
    fields["images"] = tuple(images)
  return Rollouts(**fields)


def episodes_to_json(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
  """Returns episodes as JSON; environments are left out.

  Raises:
    TypeError: a message of an environment is not JSON.
  """
  return _checked([_episode(episode, keeps_arrays=True) for episode in episodes])


def episodes_from_json(saved: list[dict[str, Any]]) -> list[Episode]:
  """Returns the episodes of `episodes_to_json`."""
  return [_episode_of(episode) for episode in array_codec.from_json(saved)]


def _checked(value: object) -> Any:
  try:
    encoded = array_codec.to_json(value)
    json.dumps(encoded)
  except TypeError as error:
    raise TypeError(
      f"rollouts cannot be saved as JSON ({error}): use strings, numbers, lists and "
      "dicts in the columns of the data and in the messages of environments"
    ) from error
  return encoded


def _episode(episode: Episode, *, keeps_arrays: bool = False) -> dict[str, Any]:
  out = field_values(episode)
  del out["environment"]
  return out | {"turns": [_turn(turn, keeps_arrays) for turn in episode.turns]}


_OF_TURN = ("reward", "metrics", "logs", "episode_done")


def _turn(turn: Turn, keeps_arrays: bool) -> dict[str, Any]:
  saved = turn.tokens.saved()
  del saved["ids"]  # those of the action
  if not keeps_arrays:  # the padded arrays of the rollouts have them
    for name in ("routes", "head_ids", "head_probs"):
      saved.pop(name, None)
  action = [list(turn.action), dict(vars(turn.action))]
  out = {"prompt": turn.prompt, "action": action, **saved}
  out |= named_values(turn, _OF_TURN)
  # `logs` may hold any object; samples show its text, too.
  return out | {"logs": json.loads(json.dumps(dict(turn.logs), default=str))}


def _episode_of(saved: dict[str, Any]) -> Episode:
  fields: dict[str, Any] = {"turns": [_turn_of(turn) for turn in saved["turns"]]}
  return Episode(**saved | fields)


def _turn_of(saved: dict[str, Any]) -> Turn:
  ids, named = saved["action"]
  own = {"prompt": saved["prompt"], "ids": np.array(ids, np.int32)}
  rest = {name: saved[name] for name in _OF_TURN}
  return Turn(tokens=Tokens.of_saved(saved, **own), action=Action(ids, **named), **rest)
