"""Tasks of the library reasoning-gym as records, and the environment that scores them.

A record names its task in two columns, from which the environment draws the task again.
A task depends on these columns only, so a resumed run has the same tasks.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tunix.rl.env.env import Action, EnvError, StepResult
from tunix.rl.reward.functions import after_reasoning
from tunix.utils import optional

PREFIX = "reasoning_gym"  # of the keys `env` and `data.train`

# The library draws task i of the seed s with the seed s + i, so near seeds share tasks.
# Our seeds are this far apart.
_APART = 1_000_000
_SEEDS = 2**32 // _APART


def _library(module: str = "factory") -> ModuleType:
  purpose = "a data set of reasoning-gym"
  return optional.require(f"reasoning_gym.{module}", purpose, "tunix[reasoning-gym]")


class Tasks(Sequence[dict[str, Any]]):
  """The tasks of a data set of reasoning-gym as records.

  Args:
    name: name of the data set.
    size: number of tasks.
    seed: seed of the tasks, below 4294; the tasks of different seeds differ.
    system: message of the system: the name of one of the library's (default, direct,
      simple, chain_of_draft, DeepSeekZero), or a text. None: no message.
    levels: difficulty level of the data set's curriculum, from 0, or several, each with
      an equal part of the tasks, in this order. (): only `settings` decide.
    **settings: fields of the data set's configuration.

  Raises:
    ImportError: the library is missing.
    ValueError: there is no such data set, field, value or level.
  """

  def __init__(
    self,
    name: str,
    *,
    size: int = 500,
    seed: int = 0,
    system: str | None = "default",
    levels: int | Sequence[int] = (),
    **settings: object,
  ):
    levels = [levels] if isinstance(levels, int) else list(levels)
    if not (isinstance(seed, int) and 0 <= seed < _SEEDS):
      raise ValueError(f"seed is {seed!r}; expected a whole number below {_SEEDS}")
    if not (isinstance(size, int) and max(1, len(levels)) <= size <= _APART):
      raise ValueError(
        f"size is {size!r}; expected a whole number from {max(1, len(levels))} (a task "
        f"for each level) to {_APART}"
      )
    self._size = size
    drawn = settings | {"size": size, "seed": seed * _APART}
    made, kind = _found(name)
    _check_fields(name, kind, drawn)
    configs = [_at_level(name, level, drawn) for level in levels] or [kind(**drawn)]
    try:
      self._parts = [made(config) for config in configs]
    except (AssertionError, TypeError) as error:  # this is how the library checks
      raise ValueError(f"{name} of reasoning-gym refuses a setting: {error}") from error
    self._system = _library("utils").SYSTEM_PROMPTS.get(system, system)
    own = {"size": size, "seed": seed, "system": system, "levels": levels}
    self._text = json.dumps({"name": name, **own, **settings})
    self._entries: dict[int, dict[str, Any]] = {}  # some take seconds to draw

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: Any) -> Any:
    """Returns the record of a task: prompt, and the columns `task` and `task_index`."""
    index = range(self._size)[index]
    prompt: Any = self.entry(index)["question"]
    if self._system is not None:
      system = {"role": "system", "content": self._system}
      prompt = [system, {"role": "user", "content": prompt}]
    return {"prompt": prompt, "task": self._text, "task_index": index}

  def entry(self, index: int) -> dict[str, Any]:
    """Returns a task as the library describes it."""
    if index not in self._entries:
      self._entries[index] = self._part(index)[index]
    return self._entries[index]

  def score(self, index: int, completion: str) -> float:
    """Returns the library's score of a completion, from 0 to 1.

    The answer is what follows the reasoning. If the message of the system speaks of
    `<answer>`, the answer is the text in the last tags of this name.
    """
    answer = after_reasoning(completion)
    if answer is not None and "<answer>" in (self._system or ""):
      answer = _library("utils").extract_answer(answer)
    answer = None if answer is None else answer.strip()
    # Outside the try: a task that cannot be made is no wrong answer.
    part, entry = self._part(index), self.entry(index)
    try:
      return float(part.score_answer(answer, entry))
    except Exception:  # the library's scorers raise on some wrong answers
      return 0.0

  def _part(self, index: int) -> Any:
    return self._parts[index * len(self._parts) // self._size]


class TaskEnv:
  """An episode of one answer, whose reward is the library's score.

  Args:
    prompt: the prompt of a record of `Tasks`.
    task: column of the record.
    task_index: column of the record.
  """

  def __init__(self, prompt: Any, task: str, task_index: int):
    self._prompt, self._task, self._index = prompt, task, int(task_index)

  def initial_observation(self) -> Any:
    """Returns the prompt."""
    return self._prompt

  def step(self, action: Action) -> StepResult:
    """Scores the answer.

    Raises:
      EnvError: the library has drawn another task than that of the prompt.
    """
    tasks = _opened(self._task)
    if tasks[self._index]["prompt"] != self._prompt:
      raise EnvError(
        f"task {self._index} of {self._task} is not that of the prompt: the library "
        "draws other tasks each time. Use another data set"
      )
    score = tasks.score(self._index, action.text)
    solved = {"solved": float(score >= 1)}
    return StepResult(reward=score, episode_done=True, metrics=solved)


@functools.lru_cache(maxsize=16)
def _opened(task: str) -> Tasks:
  return Tasks(**json.loads(task))


def _found(name: str) -> tuple[Any, Any]:
  """Returns the classes of a data set and of its configuration."""
  known = _library().DATASETS
  if name not in known:
    near = difflib.get_close_matches(name, known, 3) or sorted(known)
    raise ValueError(
      f"reasoning-gym has no data set {name!r}; it has {', '.join(near)}"
    )
  return known[name]


def _check_fields(name: str, kind: Any, settings: dict[str, Any]) -> None:
  fields = [field.name for field in dataclasses.fields(kind)]
  if unknown := sorted(settings.keys() - fields):
    raise ValueError(
      f"{name} of reasoning-gym has no setting {unknown[0]!r}; it has "
      f"{', '.join(fields)}"
    )


def _at_level(name: str, level: int, settings: dict[str, Any]) -> Any:
  """Returns the configuration of a level of the library's curriculum."""
  curriculum = _library().CURRICULA.get(name, lambda: None)()
  if curriculum is None:
    raise ValueError(f"{name} of reasoning-gym has no levels; leave levels out")
  attributes = curriculum.attributes.values()
  count = max(len(attribute.levels) for attribute in attributes)
  if not (isinstance(level, int) and 0 <= level < count):
    raise ValueError(f"levels has {level!r}; {name} has the levels 0 to {count - 1}")
  curriculum.set_global_level(level)
  config = curriculum.generate_configuration(settings)
  if changed := sorted(k for k, v in settings.items() if getattr(config, k) != v):
    raise ValueError(
      f"{changed[0]} is set, and levels of {name} set it too; leave one of them out"
    )
  return config
