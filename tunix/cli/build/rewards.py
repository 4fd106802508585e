"""The rewards of a run, by the keys `reward`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tunix.cli.run.fingerprints import digest as digest_of
from tunix.cli.utils import call_strings
from tunix.cli.utils.call_strings import CallString
from tunix.rl import reward_fns, reward_outcomes
from tunix.rl.rewards import RewardManager
from tunix.utils import checks

# Functions of rl.reward_fns, each of which makes a reward function.
READY = {
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
  """Where rewards come from.

  Attributes:
    functions: names of the ready set (exact_match, numeric_match(column=answer), ...),
      functions of your own ("pkg.mod:fn", "/path/file.py:fn"), or calls that make one
      ("pkg.mod:make(scale=2)").
    weights: numbers, one a function; null: all 1.
    model: folder of a reward model, whose score is added; null: none.
    workers: processes that run the functions; 0: this one.
    timeout_s: seconds that a call in such a process may take; null: 60.
  """

  functions: tuple[str, ...] | str = ()
  weights: tuple[float, ...] | None = None
  model: str | None = None
  workers: int = 0
  timeout_s: float | None = None

  def __post_init__(self):
    if self.weights is not None and len(self.weights) != len(self.entries):
      raise ValueError(
        f"weights has {len(self.weights)} numbers for {len(self.entries)} "
        "reward.functions: give one a function"
      )
    checks.fields(self, workers=checks.NOT_NEGATIVE, timeout_s=checks.POSITIVE)
    if self.timeout_s is not None and not self.workers:
      raise ValueError(
        f"timeout_s is {self.timeout_s} and reward.workers 0: only a process of its "
        "own can be ended; set reward.workers"
      )

  @property
  def entries(self) -> tuple[str, ...]:
    """`functions` as a sequence, also where a single one was given."""
    return (self.functions,) if isinstance(self.functions, str) else self.functions


def build_rewards(settings: RewardSettings) -> RewardManager | None:
  """What the learner calls; None: the reward model alone.

  Raises:
    FileNotFoundError, ImportError, ValueError: a function that is not there.
  """
  return build_manager(
    settings.entries, settings.weights, settings.workers, settings.timeout_s
  )


def build_manager(
  entries: Sequence[str],
  weights: Sequence[float] | None = None,
  workers: int = 0,
  timeout_s: float | None = None,
) -> RewardManager | None:
  """What calls the functions that `entries` name; None without any.

  Raises:
    FileNotFoundError, ImportError, ValueError: a function that is not there.
  """
  if not entries:
    return None
  functions = [function(text) for text in entries]
  return RewardManager(
    functions,
    weights,
    workers=workers,
    timeout_s=timeout_s or TIMEOUT_S if workers else None,
    names=_names(functions),
  )


def check(settings: RewardSettings, columns: Sequence[str]) -> None:
  """Loads what the keys name, and forgets it.

  Args:
    settings: of the rewards.
    columns: of the data, besides the prompts.

  Raises:
    FileNotFoundError, ImportError, ValueError: see `build_rewards`; a function asks for
      a column that is not there.
  """
  if not settings.entries and settings.model is None:
    raise ValueError(
      "reward.functions is empty and reward.model not set: name what rewards a "
      f"completion, such as --reward.functions=exact_match ({', '.join(READY)}, or "
      "pkg.mod:fn)"
    )
  manager = build_rewards(settings)
  if manager is not None:
    manager.close()
    check_columns(manager, columns)


def check_columns(manager: RewardManager, columns: Sequence[str]) -> None:
  """Refuses functions that ask for a column that is not there.

  Raises:
    ValueError: names the function and the columns.
  """
  try:
    manager.check_columns(columns)
  except TypeError as error:
    raise ValueError(str(error)) from error


def function(text: str) -> Callable[..., Any]:
  """The reward function that an entry of reward.functions names.

  Raises:
    FileNotFoundError, ImportError, ValueError: there is none.
  """
  call = call_strings.parse_call_string(text)
  if call.name is None:
    raise ValueError(f"reward.functions has {text!r}: name a function, {text}:FUNCTION")
  if call.source is not None:
    loaded = call_strings.load(call)
    return loaded if call.kwargs is None else _called(loaded, call, text)
  if call.name not in READY:
    near = difflib.get_close_matches(call.name, READY, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(READY)}"
    raise ValueError(
      f"reward.functions has {text!r}, which is none of the ready set: {remedy} "
      "Functions of your own are pkg.mod:fn"
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
      f"reward.functions has {text!r}: the call gave a {type(made).__name__}, expected "
      "a reward function; without parentheses the function itself is used"
    )
  return made


def _names(functions: list[Callable[..., Any]]) -> list[str]:
  """Of the functions; a repeated one gets its number."""
  names: list[str] = []
  for made in functions:
    name = reward_outcomes.name_of(made)
    names.append(name if name not in names else f"{name}_{len(names) + 1}")
  return names


def digest(settings: RewardSettings) -> str:
  """Of the files that the functions are defined in."""
  calls = [call_strings.parse_call_string(text) for text in settings.entries]
  return digest_of([call_strings.source_digest(call) for call in calls])
