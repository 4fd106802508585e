"""Outcomes of reward functions: a value, a failure or a time-out for each row.

The processes that run reward functions import this file, so it imports nothing that is
slow to load.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from tunix.sandbox.errors import MAX_MESSAGE, describe
from tunix.utils import array_codec, checks

# Largest size of a reward. Up to it, float64 tells x from x + 1, and the squares of
# differences, of which the deviations of groups are made, fit in float32.
LARGEST = 1e15


@dataclasses.dataclass(frozen=True)
class Value:
  """A number up to `LARGEST` in size that the function returned for the row."""

  value: float


@dataclasses.dataclass(frozen=True)
class Failed:
  """The function raised, its process ended, or it returned something else."""

  error: str


@dataclasses.dataclass(frozen=True)
class TimedOut:
  """The function did not return within `seconds` and was stopped."""

  seconds: float


Outcome = Value | Failed | TimedOut


@dataclasses.dataclass(frozen=True)
class PerRow:
  """A reward function of a batch that calls `function` for each row."""

  function: Callable[..., Any]

  @property
  def __name__(self) -> str:
    return name_of(self.function)

  @property
  def __signature__(self) -> inspect.Signature:
    """The signature of `function` with the argument names of a batch."""
    singular = {"prompt": "prompts", "completion": "completions"}
    signature = inspect.signature(self.function)
    renamed = [
      p.replace(name=singular.get(p.name, p.name))
      for p in signature.parameters.values()
    ]
    return signature.replace(parameters=renamed)

  def __call__(self, **columns: object) -> Any:
    """Returns the rewards of all rows, or an awaitable of them."""
    names = [
      {"prompts": "prompt", "completions": "completion"}.get(c, c) for c in columns
    ]
    rows = [dict(zip(names, row)) for row in zip(*columns.values())]
    rewards = [self.function(**row) for row in rows]
    if any(map(inspect.isawaitable, rewards)):
      return _gathered(rewards)
    return rewards


def per_row(function: Callable[..., Any]) -> PerRow:
  """Makes a reward function from a function that takes one row.

  A RewardManager calls it for each row separately, so that all other rows get a reward
  if one row fails or hangs.

  Args:
    function: `function(prompt, completion, **columns) -> float`, sync or async. It gets
      the columns' entries for that row.
  """
  return PerRow(function)


def name_of(function: Callable[..., Any]) -> str:
  """Returns the name of a reward function in metrics and messages."""
  inner = getattr(function, "func", function)  # of a functools.partial
  return str(getattr(inner, "__name__", type(inner).__name__))


def call(
  function: Callable[..., Any], arguments: Mapping[str, Any], count: int
) -> list[Value | Failed]:
  """Calls a reward function in this process; always returns `count` outcomes."""
  try:
    result = function(**arguments)
    if inspect.isawaitable(result):
      result = _wait(result)
    return outcomes_of(result, count)
  # The function is user code: any exception becomes an outcome.
  except (Exception, SystemExit, asyncio.CancelledError) as error:
    return [Failed(describe(error))] * count


def outcomes_of(result: object, count: int) -> list[Value | Failed]:
  """Converts the result of a reward function to outcomes, one for each of the rows."""
  result = array_codec.as_python(result)
  if isinstance(result, (int, float)) and count == 1:
    result = [result]
  if not isinstance(result, (list, tuple)):
    return [Failed(f"returned {_shown(result)}, not a list of {count} numbers")] * count
  if len(result) != count:
    return [Failed(f"returned {len(result)} rewards for {count} rows")] * count
  return [_outcome(x) for x in result]


def _outcome(x: object) -> Value | Failed:
  if isinstance(x, Failed):
    return x
  x = array_codec.as_python(x)
  if not isinstance(x, (int, float)):
    return Failed(f"returned {_shown(x)} as the row's reward, not a number")
  try:
    value = float(x)
  except OverflowError:
    value = math.inf
  return checked(value, "returned")


def checked(value: float, verb: str) -> Value | Failed:
  """Returns a Value, or for a number out of range a Failed that begins with `verb`."""
  if abs(value) <= LARGEST:  # False for NaN
    return Value(value)
  # One digit, because messages that are equal are shown once.
  return Failed(
    f"{verb} {value:.0e}; expected a number from {-LARGEST:g} to {LARGEST:g}"
  )


def _shown(x: object) -> str:
  if x is None or isinstance(x, (int, float)):
    return str(x)[:MAX_MESSAGE]
  return checks.type_of(x)


async def _gathered(rewards: list[Any]) -> list[Any]:
  return await asyncio.gather(*rewards)


async def _awaited(result: Any) -> Any:
  return await result


def _wait(result: object) -> Any:
  """Waits for an awaitable, also inside a running event loop (a notebook)."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(_awaited(result))
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(asyncio.run, _awaited(result)).result()
