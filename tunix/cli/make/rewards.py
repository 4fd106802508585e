"""Builds the reward functions of a run from the section `reward`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix.cli.make import objects
from tunix.cli.make.fingerprints import digest as digest_of
from tunix.cli.settings.spelling import did_you_mean
from tunix.cli.utils import call_strings
from tunix.cli.utils.call_strings import CallString
from tunix.rl.reward import (
  functions as reward_fns,
  judge,
  outcomes as reward_outcomes,
)
from tunix.rl.reward.rewards import RewardManager
from tunix.utils import checks
from tunix.utils.setting import model_setting, setting

JUDGES = {
  "judge": judge.Judge,
  "pair_judge": judge.PairJudge,
  "rubric": judge.Rubric,
}
# The ready set: judges, and functions of rl.reward_fns that make a reward function.
READY: dict[str, Callable[..., Any]] = JUDGES | {
  name: getattr(reward_fns, name)
  for name in (
    "exact_match",
    "numeric_match",
    "maths_match",
    "format_match",
    "length",
    "json_schema",
  )
}

TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSettings:
  """The rewards of completions: weighted functions, and a reward model.

  Attributes:
    functions: reward functions: names of the ready set (exact_match,
      numeric_match(column=answer), ...), functions of your own ("pkg.mod:fn",
      "/path/file.py:fn"), calls that return a function ("pkg.mod:make(scale=2)"), or
      judges ("judge('prompt.txt', model='name', url='http://host:8000/v1')"). Ready
      functions that compare an answer read the text after `</think>`.
    weights: weight of each function; null: all 1.
    model: folder of a reward model whose score is added to the rewards; null: none.
    workers: processes that run the functions; 0: the training process itself.
    timeout_s: seconds that a call in a worker may take; null: 60.
  """

  functions: tuple[str, ...] | str = setting(
    (), path="functions", fingerprint="reward_functions", takes_object=True
  )
  weights: tuple[float, ...] | None = None
  model: str | None = model_setting("reward")
  workers: int = setting(0, may_change=True)
  timeout_s: float | None = setting(None, may_change=True)

  def __post_init__(self):
    if self.weights is not None and len(self.weights) != len(self.entries):
      raise ValueError(
        f"weights has {len(self.weights)} numbers; expected {len(self.entries)}, one "
        "for each of reward.functions"
      )
    checks.fields(self, workers=checks.NOT_NEGATIVE, timeout_s=checks.POSITIVE)
    if self.timeout_s is not None and not self.workers:
      raise ValueError(
        f"timeout_s is {self.timeout_s} and reward.workers 0; only a call in a worker "
        "can be ended. Set reward.workers"
      )

  @property
  def entries(self) -> tuple[str, ...]:
    """`functions` as a sequence, also if the key is a single text."""
    return (self.functions,) if isinstance(self.functions, str) else self.functions


def build_rewards(
  settings: RewardSettings, folder: pathlib.Path | None = None
) -> RewardManager | None:
  """Builds the manager of the functions; None if only the reward model scores.

  Args:
    settings: section `reward`.
    folder: folder of a run, which keeps the answers of judges; None: nothing does.

  Raises:
    FileNotFoundError, ImportError, ValueError: a function does not exist.
    RecordError: an answer of a judge in the folder is damaged.
  """
  if not settings.entries:
    return None
  functions = [function(text) for text in settings.entries]
  manager = RewardManager(
    functions,
    settings.weights,
    workers=settings.workers,
    timeout_s=settings.timeout_s or TIMEOUT_S if settings.workers else None,
    names=_names(functions),
  )
  if folder is not None:
    for asking in manager.judges:
      asking.asker.keep_in(folder / "judges")
  return manager


def check(
  settings: RewardSettings, columns: Sequence[str], *, has_others: bool = False
) -> None:
  """Loads the reward functions once, to refuse wrong settings before the run.

  Args:
    settings: section `reward`.
    columns: columns of the data besides the prompts.
    has_others: True if environments give rewards.

  Raises:
    FileNotFoundError, ImportError, ValueError: as for `build_rewards`; or a function
      needs a column that the data lacks.
  """
  if not settings.entries and settings.model is None and not has_others:
    raise ValueError(
      "reward.functions is empty and reward.model is not set. Name a reward function, "
      f"such as --reward.functions=exact_match ({', '.join(READY)}, or pkg.mod:fn), or "
      "a reward model"
    )
  manager = build_rewards(settings)
  if manager is not None:
    manager.close()
    check_columns(manager, columns)


def check_columns(manager: RewardManager, columns: Sequence[str]) -> None:
  """Refuses functions that need a column that the data lacks.

  Raises:
    ValueError: names the function and the columns.
  """
  try:
    manager.check_columns(columns)
  except TypeError as error:
    raise ValueError(str(error)) from error


def function(text: str) -> Callable[..., Any]:
  """Returns the reward function of an entry of reward.functions.

  Raises:
    FileNotFoundError, ImportError, ValueError: the function does not exist.
  """
  if objects.is_name(text):
    return objects.get(text)
  call = call_strings.parse_call_string(text)
  if call.name is None:
    raise ValueError(f"reward.functions has {text!r}: name a function, {text}:FUNCTION")
  if call.source is not None:
    loaded = call_strings.load(call)
    return loaded if call.kwargs is None else _called(loaded, call, text)
  if call.name not in READY:
    remedy = did_you_mean(call.name, READY, f"there are {', '.join(READY)}")
    raise ValueError(
      f"reward.functions has {text!r}, which is not in the ready set: {remedy} "
      "Functions of your own are written pkg.mod:fn"
    )
  return _called(READY[call.name], call, text)


def _called(
  make: Callable[..., Any], call: CallString, text: str
) -> Callable[..., Any]:
  try:
    inspect.signature(make).bind(*call.args, **call.kwargs or {})
    made = make(*call.args, **call.kwargs or {})
  except (TypeError, ValueError) as error:
    raise ValueError(f"reward.functions has {text!r}: {error}") from error
  if not callable(made):
    raise ValueError(
      f"reward.functions has {text!r}: the call gave {checks.type_of(made)}, expected "
      "a reward function; without parentheses the function itself is used"
    )
  return made


def _names(functions: list[Callable[..., Any]]) -> list[str]:
  """Returns the functions' names; a repeated name gets a number."""
  names: list[str] = []
  for made in functions:
    name = reward_outcomes.name_of(made)
    names.append(name if name not in names else f"{name}_{len(names) + 1}")
  return names


def digest(settings: RewardSettings) -> str:
  """Returns the digest of the files that define the functions."""
  return digest_of([source_digest(text) for text in settings.entries])


def source_digest(text: str) -> str:
  """Returns the digest of the file, or of the code, that defines a function."""
  if objects.is_name(text):
    # A notebook edits the code of a function while its name stays.
    return digest_of(_content(objects.get(text), 0))
  call = call_strings.parse_call_string(text)
  if call.source is None and call.name in JUDGES:
    return digest_of(_content(function(text), 0))  # it has read its files
  return call_strings.source_digest(call)


# Parts within parts of a function that its digest covers.
_DEPTH = 8


def _content(value: object, depth: int) -> Any:
  """Returns the code and the plain values of a function, equal in every process.

  Values that are neither plain nor callable count by their type.
  """
  inner = functools.partial(_content, depth=depth + 1)
  if value is None or isinstance(value, str | bytes | int | float) or depth > _DEPTH:
    return repr(value) if depth <= _DEPTH else type(value).__qualname__
  if isinstance(value, tuple | list):
    return [inner(entry) for entry in value]
  if isinstance(value, set | frozenset):  # its order depends on the process
    return sorted(map(repr, map(inner, value)))
  if isinstance(value, Mapping):
    return [(repr(key), inner(entry)) for key, entry in value.items()]
  if isinstance(value, types.CodeType):
    return value.co_code.hex(), value.co_names, inner(value.co_consts)
  if isinstance(value, types.FunctionType):
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    parts = value.__code__, value.__defaults__, value.__kwdefaults__, cells
    return inner(list(parts))
  if isinstance(value, functools.partial):
    return inner([value.func, value.args, value.keywords])
  name = type(value).__qualname__
  return (name, inner(vars(value))) if callable(value) and _has_vars(value) else name


def _has_vars(value: object) -> bool:
  return hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType)
