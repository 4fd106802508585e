"""What a reward function can come to: a value, a failure, a time-out.

Standard library only: the processes that run reward functions load this file, and
should start quickly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import math
import pathlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST = 400  # characters of a message that are kept


@dataclasses.dataclass(frozen=True)
class Value:
  """The function gave this finite number for the row."""

  value: float


@dataclasses.dataclass(frozen=True)
class Failed:
  """The function raised, died, or gave something that is no reward."""

  error: str


@dataclasses.dataclass(frozen=True)
class TimedOut:
  """The function did not answer within this many seconds, and was stopped."""

  seconds: float


Outcome = Value | Failed | TimedOut


@dataclasses.dataclass(frozen=True)
class PerRow:
  """See `per_row`."""

  function: Callable[..., Any]

  @property
  def __name__(self) -> str:
    return name_of(self.function)

  @property
  def __signature__(self) -> inspect.Signature:
    """That of the function, with the names that a whole batch is passed by."""
    singular = {"prompt": "prompts", "completion": "completions"}
    signature = inspect.signature(self.function)
    renamed = [
      p.replace(name=singular.get(p.name, p.name))
      for p in signature.parameters.values()
    ]
    return signature.replace(parameters=renamed)

  def __call__(self, **columns: Any) -> Any:
    """Rewards of all rows, or an awaitable of them."""
    names = [
      {"prompts": "prompt", "completions": "completion"}.get(c, c) for c in columns
    ]
    rows = [dict(zip(names, row)) for row in zip(*columns.values())]
    rewards = [self.function(**row) for row in rows]
    if any(map(inspect.isawaitable, rewards)):
      return _gathered(rewards)
    return rewards


def per_row(function: Callable[..., Any]) -> PerRow:
  """Makes a reward function of one that takes one row.

  Args:
    function: `function(prompt, completion, **columns) -> float`, sync or async, with
      the columns' entries for that row. A RewardManager calls it row by row, so a row
      that fails or hangs costs no other row its reward.
  """
  return PerRow(function)


def name_of(function: Callable[..., Any]) -> str:
  """What a reward function is called in metrics and messages."""
  inner = getattr(function, "func", function)  # of a functools.partial
  return str(getattr(inner, "__name__", type(inner).__name__))


def call(
  function: Callable[..., Any], arguments: Mapping[str, Any], count: int
) -> list[Value | Failed]:
  """Calls a reward function in this process; `count` outcomes, whatever it does."""
  try:
    result = function(**arguments)
    if inspect.isawaitable(result):
      result = _wait(result)
    return outcomes_of(result, count)
  # The function is the user's: whatever it raises becomes an outcome.
  except (Exception, SystemExit, asyncio.CancelledError) as error:
    return [Failed(describe(error))] * count


def outcomes_of(result: Any, count: int) -> list[Value | Failed]:
  """What a reward function returned, as one outcome for each of `count` rows."""
  if hasattr(result, "tolist"):  # arrays, and scalars of numpy, JAX and torch
    result = result.tolist()
  if isinstance(result, (int, float)) and count == 1:
    result = [result]
  if not isinstance(result, (list, tuple)):
    return [Failed(f"returned {_shown(result)}, not a list of {count} numbers")] * count
  if len(result) != count:
    return [Failed(f"returned {len(result)} rewards for {count} rows")] * count
  return [_outcome(x) for x in result]


def describe(error: BaseException) -> str:
  """Kind, message and place of an exception, on one line."""
  try:
    message = str(error)
  except Exception:  # a user's __str__ may raise as well
    message = "(its message cannot be shown)"
  frames = traceback.extract_tb(error.__traceback__)
  place = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})"
  text = f"{type(error).__name__}: {message}" if message else type(error).__name__
  return " ".join(text[:_LONGEST].split()) + (place if frames else "")


def _outcome(x: Any) -> Value | Failed:
  if hasattr(x, "tolist"):
    x = x.tolist()
  if not isinstance(x, (int, float)):
    return Failed(f"returned {_shown(x)} as the row's reward, not a number")
  try:
    value = float(x)
  except OverflowError:
    value = math.inf
  return Value(value) if math.isfinite(value) else Failed(f"returned {value}")


def _shown(x: Any) -> str:
  if x is None or isinstance(x, (int, float)):
    return str(x)[:_LONGEST]
  return f"a {type(x).__name__}"


async def _gathered(rewards: list[Any]) -> list[Any]:
  return await asyncio.gather(*rewards)


async def _awaited(result: Any) -> Any:
  return await result


def _wait(result: Any) -> Any:
  """The result of an awaitable, also inside a running event loop (a notebook)."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(_awaited(result))
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(asyncio.run, _awaited(result)).result()
