"""The rewards of a run, by the keys `reward`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tunix.cli.fingerprints import digest as digest_of
from tunix.cli.schema import Config
from tunix.cli.utils import call_strings
from tunix.cli.utils.call_strings import CallString
from tunix.rl import reward_fns, reward_outcomes
from tunix.rl.rewards import RewardManager

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


def build_rewards(config: Config) -> RewardManager | None:
  """What the learner calls; None: the reward model alone.

  Raises:
    FileNotFoundError, ImportError, ValueError: a function that is not there.
  """
  keys = config.reward
  return build_manager(keys.entries, keys.weights, keys.workers, keys.timeout_s)


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


def check(config: Config) -> None:
  """Loads what the keys name, and forgets it.

  Raises:
    FileNotFoundError, ImportError, ValueError: see `build_rewards`.
  """
  if not config.reward.entries and config.reward.model is None:
    raise ValueError(
      "reward.functions is empty and reward.model not set: name what rewards a "
      f"completion, such as --reward.functions=exact_match ({', '.join(READY)}, or "
      "pkg.mod:fn)"
    )
  manager = build_rewards(config)
  if manager is not None:
    manager.close()


def function(text: str) -> Callable[..., Any]:
  """The reward function that an entry of reward.functions names.

  Raises:
    FileNotFoundError, ImportError, ValueError: there is none.
  """
  call = call_strings.parse_call_string(text)
  if call.name is None:
    raise ValueError(f"reward.functions has {text!r}: name a function, {text}:FUNCTION")
  if call.source is not None:
    found = call_strings.load(call)
    return found if call.kwargs is None else _called(found, call, text)
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
  for found in functions:
    name = reward_outcomes.name_of(found)
    names.append(name if name not in names else f"{name}_{len(names) + 1}")
  return names


def digest(config: Config) -> str:
  """Of the files that the functions are defined in."""
  calls = [call_strings.parse_call_string(text) for text in config.reward.entries]
  return digest_of([call_strings.source_digest(call) for call in calls])
