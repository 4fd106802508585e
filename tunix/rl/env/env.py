"""The protocol between an environment and an episode.

An environment is the user's code. Each object serves one episode:

    stop = None
    observation, stop = env.initial_observation()
    while True:
      action = <tokens that the policy draws after the observation>
      result = env.step(action)
      if result.episode_done: break
      observation, stop = result.next_observation, result.next_stop_condition

Both methods may be `async`. An observation has one of two forms:

- messages: a text (one message of the user), a message, or a list of messages. The chat
  template renders them. The first observation is the whole conversation; later ones are
  only the new messages.
- tokens: a list of ids, an array, or an object with `to_ints()` (such as
  `tinker.ModelInput`). Each one is the whole prompt of the next action.

The names are those of tinker-cookbook, whose environments run unmodified.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tunix.rl.reward.outcomes import LARGEST
from tunix.utils import array_codec, checks

Message = dict[str, Any]
Observation = Any
# Texts or ids that end the next action, in addition to the end-of-sequence tokens.
StopCondition = Sequence[str] | Sequence[int] | None


_LARGEST = sys.float_info.max
_MOST_IDS = 2**31 - 1  # ids are int32
_MOST_STOPS = 8  # ids or texts of a stop condition


class Action(list[int]):
  """The ids that the policy drew in one turn.

  Attributes:
    text: the text of the ids, without the end-of-sequence token.
    message: the text as a message of the assistant: "content", and "tool_calls" and
      "reasoning_content" where the text has them.
    problem: description of a call of a tool that could not be read; None if there is
      none.
    finish_reason: "eos", "stop" (a stop text), or "length".
  """

  text: str = ""
  message: Message
  problem: str | None = None
  finish_reason: str = "eos"

  def __init__(self, ids: Sequence[int] = (), **fields: Any):
    super().__init__(map(int, ids))
    self.message = {"role": "assistant", "content": ""}
    for name, value in fields.items():
      setattr(self, name, value)

  def copied(self) -> Action:
    """Returns a copy that shares nothing with this action."""
    return Action(self, **copy.deepcopy(vars(self)))


@dataclasses.dataclass(kw_only=True)
class StepResult:
  """The answer of an environment to an action.

  Attributes:
    reward: reward of the action.
    episode_done: True if the episode has ended.
    next_observation: see the module; not read if the episode has ended.
    next_stop_condition: texts or ids that end the next action.
    metrics: numbers by name, logged as `env/<name>`.
    logs: further values that the samples show.
  """

  reward: float
  episode_done: bool
  next_observation: Observation = None
  next_stop_condition: StopCondition = None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Env(Protocol):
  """An environment of one episode; both methods may be `async`.

  An environment of messages may have an attribute `tool_schemas`: JSON schemas of tools
  that the chat template shows and whose calls `Action.message` holds. A method `close`
  is called at the end of the episode, also after a failure. A method `final_reward`
  gives a reward that is added to the last action if a limit ends the episode.
  """

  def initial_observation(self) -> Any:
    """Returns the first observation, or (observation, stop condition)."""
    ...

  def step(self, action: Action) -> Any:
    """Takes an action; returns a `StepResult` or an object with its attributes."""
    ...


class EnvGroup:
  """The environments of one prompt's episodes; a base class for users.

  Any object with `make_envs` will do. The methods may be `async`.
  """

  def make_envs(self) -> Sequence[Env]:
    """Returns one environment for each completion of the prompt."""
    raise NotImplementedError

  def compute_group_rewards(
    self, trajectory_group: Sequence[Any], env_group: Sequence[Env]
  ) -> Sequence[tuple[float, Mapping[str, float]]]:
    """Returns (reward, metrics) of each episode, added to the rewards of its steps.

    Args:
      trajectory_group: the `Episode` of each environment.
      env_group: the environments.
    """
    del env_group
    return [(0.0, {}) for _ in trajectory_group]

  def cleanup(self) -> None:
    """Frees what the environments hold; called once, also after a failure."""


class EnvError(RuntimeError):
  """An environment returned something wrong, raised, or did not answer."""


def ids_of(observation: Observation) -> list[int] | None:
  """Returns the ids of an observation of tokens; None for one of messages.

  Raises:
    EnvError: the observation has neither form.
  """
  if hasattr(observation, "to_ints"):
    observation = observation.to_ints()
  observation = array_codec.as_python(observation)
  if isinstance(observation, str | Mapping):
    return None
  if isinstance(observation, list | tuple) and observation:
    if all(isinstance(i, int) and not isinstance(i, bool) for i in observation):
      return list(observation)
    if all(isinstance(m, Mapping) and "role" in m for m in observation):
      return None
  raise EnvError(
    f"an observation is {_shown(observation)}; expected a text, messages (dicts with "
    '"role" and "content"), or token ids'
  )


def messages_of(observation: Observation) -> list[Message]:
  """Returns the messages of an observation that `ids_of` gives no ids for."""
  if isinstance(observation, str):
    return [{"role": "user", "content": observation}]
  if isinstance(observation, Mapping):
    observation = [observation]
  return [dict(message) for message in observation]


def take(env: Any, action: Action) -> Any:
  """Calls `env.step`, with `extra` if it takes this argument of tinker-cookbook."""
  if "extra" not in inspect.signature(env.step).parameters:
    return env.step(action)
  reason = "length" if action.finish_reason == "length" else "stop"
  return env.step(action, extra={"stop_reason": reason})


def step_result(result: Any) -> StepResult:
  """Checks what `Env.step` returned.

  Raises:
    EnvError: an attribute is missing or has another type.
  """
  try:
    reward, done = result.reward, result.episode_done
  except AttributeError as error:
    raise EnvError(
      f"step returned {_shown(result)}; expected a StepResult with reward and "
      "episode_done"
    ) from error
  return StepResult(
    reward=finite(reward),
    episode_done=bool(done),
    next_observation=getattr(result, "next_observation", None),
    next_stop_condition=getattr(result, "next_stop_condition", None),
    metrics=numbers_of(getattr(result, "metrics", None)),
    logs=dict(getattr(result, "logs", None) or {}),
  )


def finite(reward: Any) -> float:
  """Returns a reward as a float.

  Raises:
    EnvError: it is no number, or out of the range of rewards.
  """
  reward = array_codec.as_python(reward)
  try:
    value = float(reward) if isinstance(reward, int | float) else math.nan
  except OverflowError:
    value = math.inf
  if not abs(value) <= LARGEST:
    raise EnvError(
      f"the reward is {_shown(reward)}; expected a number up to {LARGEST:g} in size"
    )
  return value


def check_ids(ids: Sequence[int], vocab_size: int | None) -> None:
  """Checks ids of an observation or a stop condition.

  Raises:
    EnvError: an id is no id of the model.
  """
  most = _MOST_IDS if vocab_size is None else vocab_size
  wrong = next((i for i in ids if not 0 <= i < most), None)
  if wrong is not None:
    raise EnvError(f"an observation has the id {wrong}; expected ids below {most}")


def numbers_of(metrics: Any) -> dict[str, float]:
  """Returns metrics as floats; values that are no numbers are left out."""
  kept = {}
  for name, value in dict(metrics or {}).items():
    if isinstance(value, int | float) and abs(value) <= _LARGEST:
      kept[str(name)] = float(value)
  return kept


def stops_of(condition: StopCondition) -> tuple[tuple[str, ...], tuple[int, ...]]:
  """Returns the texts and the ids of a stop condition.

  Raises:
    EnvError: it is no list of texts or ids.
  """
  if condition is None:
    return (), ()
  if isinstance(condition, str):
    condition = [condition]
  if isinstance(condition, list | tuple):
    texts = tuple(s for s in condition if isinstance(s, str) and s)
    ids = tuple(i for i in condition if isinstance(i, int))
    if len(texts) + len(ids) == len(condition) <= _MOST_STOPS:
      return texts, ids
  raise EnvError(
    f"a stop condition is {_shown(condition)}; expected at most {_MOST_STOPS} texts or "
    "ids in a list"
  )


def _shown(value: Any) -> str:
  try:
    text = repr(value)
  except Exception:  # of the user's object
    text = " " * 99
  return text if len(text) <= 80 else checks.type_of(value)
