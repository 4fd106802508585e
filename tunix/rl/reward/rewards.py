"""Rewards: calls several functions, weights them, and keeps the outcome of each row.

A reward function is `fn(prompts, completions, **columns) -> list of numbers`, sync or
async. `per_row` makes one from a function that takes a single row. For each row, a
function gives a value, a failure (which it may return as a `Failed`) or a time-out. A
row has a reward only if all functions gave a value; otherwise its reward is NaN and the
learner leaves the row out. A failure never counts as 0.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.rl.reward import outcomes as reward_outcomes
from tunix.rl.reward.functions import RowReward
from tunix.rl.reward.judge import Asking
from tunix.rl.reward.outcomes import Failed, Outcome, PerRow, TimedOut, Value
from tunix.rl.reward.pool import Call, RewardPool
from tunix.utils import checks, coordination

RewardFn = Callable[..., Any]

_OUTCOMES = {kind.__name__: kind for kind in (Value, Failed, TimedOut)}
# Seconds that a process waits for the rewards of the other processes. Reward functions
# have their own time-out, so this limit is only reached if a process hangs outside of
# them. It then ends the run.
_GATHER_TIMEOUT_S = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOutput:
  """The rewards of one batch of B rows.

  Attributes:
    outcomes: the outcomes of the B rows for each function name.
    weights: weight of each function in the total; 1 for a name that is missing.
  """

  outcomes: Mapping[str, Sequence[Outcome]] = dataclasses.field(default_factory=dict)
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def by_function(self) -> dict[str, np.ndarray]:
    """Float64 [B] for each function, without its weight; NaN where it gave no value."""
    return {
      name: np.array([x.value if isinstance(x, Value) else math.nan for x in rows])
      for name, rows in self.outcomes.items()
    }

  @functools.cached_property
  def total(self) -> np.ndarray:
    """Float64 [B], the weighted sum; NaN for a row with an outcome that is no value."""
    total = np.zeros(len(next(iter(self.outcomes.values()), ())))
    for name, values in self.by_function.items():
      total = total + self.weights.get(name, 1.0) * values
    return total

  @property
  def valid(self) -> np.ndarray:
    """Bool [B]: True for a row that has a reward."""
    return np.isfinite(self.total)

  def take(self, rows: np.ndarray) -> RewardOutput:
    """Returns the given rows, in that order."""
    outcomes = {name: [x[row] for row in rows] for name, x in self.outcomes.items()}
    return dataclasses.replace(self, outcomes=outcomes)

  def joined(self, others: Iterable[RewardOutput]) -> RewardOutput:
    """Appends the rows of other batches that have the same functions."""
    parts = [self, *others]
    outcomes = {
      name: [x for part in parts for x in part.outcomes[name]] for name in self.outcomes
    }
    return dataclasses.replace(self, outcomes=outcomes)

  def plus(self, name: str, values: np.ndarray) -> RewardOutput:
    """Adds values [B], such as the scores of a reward model, as one more function."""
    outcomes: list[Outcome] = [
      reward_outcomes.checked(x, "the score is")
      for x in np.asarray(values, np.float64).tolist()
    ]
    return self.plus_outcomes(name, outcomes)

  def plus_outcomes(self, name: str, outcomes: Sequence[Outcome]) -> RewardOutput:
    """Adds outcomes of the B rows as one more function."""
    return dataclasses.replace(self, outcomes={**self.outcomes, name: outcomes})

  def problems(self) -> list[str]:
    """Returns one line for each function and cause of failure, with its rows."""
    lines = []
    for name, outcomes in self.outcomes.items():
      rows = collections.defaultdict(list)
      for row, outcome in enumerate(outcomes):
        if isinstance(outcome, TimedOut):
          rows[f"no answer within {outcome.seconds:g} s"].append(row)
        elif not isinstance(outcome, Value):
          rows[outcome.error].append(row)
      lines += [f"{name}: {_rows(index)}: {why}" for why, index in rows.items()]
    return lines


# Functions that are called for each row, so that a failure affects only its own row.
_BY_ROW = (PerRow, RowReward)


class RewardManager:
  """Calls reward functions and adds their values.

  Attributes:
    names: names of the functions, in their order.
    judges: the functions that ask a judge.
  """

  def __init__(
    self,
    reward_fns: RewardFn | Sequence[RewardFn],
    weights: Sequence[float] | None = None,
    *,
    timeout_s: float | None = None,
    workers: int = 0,
    names: Sequence[str] | None = None,
    rows_per_call: int | None = None,
    memory_bytes: int | None = None,
  ):
    """Initializes the manager; worker processes start at the first call.

    With `workers=0` the functions run in this process, one after the other, and nothing
    can stop one that hangs. With workers they run in separate processes, which are
    killed at the deadline. Each process has its own copy of the functions' modules.

    Args:
      reward_fns: one or several `fn(prompts, completions, **columns)`. A function gets
        the columns that its signature names; `**kwargs` gets all of them.
      weights: one number per function; None is 1 for each.
      timeout_s: seconds that one call may take; required with workers.
      workers: number of processes; 0 runs the functions in this process.
      names: names of the functions in metrics; None uses their `__name__`.
      rows_per_call: largest number of rows that a function gets in one call. If a call
        fails, all its rows have no reward. None passes the whole batch, which functions
        that compare rows need. Functions made by `per_row` and those of `reward_fns`
        always get one row.
      memory_bytes: bytes of address space that a worker may use in addition to what it
        uses after loading its functions; None for no limit. Linux only.

    Raises:
      TypeError: a function is not callable, or cannot be sent to workers.
      ValueError: the number of weights or names differs from that of the functions,
        names repeat, a weight is not finite, or limits are set without workers.
    """
    self._functions = [reward_fns] if callable(reward_fns) else list(reward_fns)
    _check_functions(self._functions)
    self.names = _names(self._functions, names)
    count = len(self._functions)
    weights = [1.0] * count if weights is None else weights
    _check_count("weights", weights, float, count)
    self._weights = [float(weight) for weight in weights]
    checks.number(
      "rows_per_call", rows_per_call, checks.COUNT, whole=True, optional=True
    )
    self._rows_per_call = rows_per_call
    _check_limits(workers, timeout_s, memory_bytes)
    self._pool = None
    self.judges = [f for f in self._functions if isinstance(f, Asking)]
    if workers and timeout_s is not None:
      self._pool = RewardPool(
        # Judges wait for servers, with deadlines of their own: they stay here.
        [_no_rewards if f in self.judges else f for f in self._functions],
        workers=workers,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
      )

  @property
  def has_workers(self) -> bool:
    """True if the functions run in other processes."""
    return self._pool is not None

  def check_columns(self, columns: Iterable[str]) -> None:
    """Checks that the data has the columns that the functions need; calls none of them.

    Raises:
      TypeError: a column is missing; the message names the function and the columns.
    """
    table = dict.fromkeys(["prompts", "completions", *columns])
    for function, name in zip(self._functions, self.names):
      _arguments_of(function, name, table)

  def compute(
    self,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    is_share: bool = False,
  ) -> RewardOutput:
    """Computes the rewards of B rows.

    Args:
      prompts: B prompts.
      completions: B completions.
      columns: further columns of the dataset, B entries each.
      is_share: True if only this process has these rows, and makes all calls.

    Raises:
      TypeError: a column that a function needs is missing, or columns cannot be sent to
        workers.
      ValueError: a column has another length or a reserved name.
      RuntimeError: the workers cannot load the functions.
    """
    table = _table(prompts, completions, columns or {})
    count = len(prompts)
    calls, owners = [], []
    for i, function in enumerate(self._functions):
      arguments = _arguments_of(function, self.names[i], table)
      size = 1 if isinstance(function, _BY_ROW) else self._rows_per_call or count
      for start in range(0, count, max(size, 1)):
        part = {k: v[start : start + size] for k, v in arguments.items()}
        calls.append(Call(i, part, min(size, count - start)))
        owners.append(self.names[i])
    outcomes: dict[str, list[Outcome]] = {name: [] for name in self.names}
    run = self._run_here if is_share else self._run
    for name, part in zip(owners, run(calls)):
      outcomes[name] += part
    weights = dict(zip(self.names, self._weights))
    return RewardOutput(outcomes=outcomes, weights=weights)

  def close(self) -> None:
    """Ends the worker processes."""
    if self._pool is not None:
      self._pool.close()

  def __enter__(self) -> RewardManager:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _run(self, calls: list[Call]) -> Sequence[Sequence[Outcome]]:
    """Runs each call on exactly one process; all processes get all outcomes."""
    if jax.process_count() == 1:
      return self._run_here(calls)
    parts = coordination.deal("rewards", calls, self._as_json, _GATHER_TIMEOUT_S)
    return [[_OUTCOMES[kind](*fields) for kind, fields in part] for part in parts]

  def _as_json(self, calls: Sequence[Call]) -> list[Any]:
    """Runs calls in this process; returns their outcomes as JSON."""
    with coordination.alone("its reward functions"):
      outcomes = self._run_here(list(calls))
    return [
      [(type(x).__name__, dataclasses.astuple(x)) for x in part] for part in outcomes
    ]

  def _run_here(self, calls: list[Call]) -> Sequence[Sequence[Outcome]]:
    pool, outcomes = self._pool, dict[int, Sequence[Outcome]]()
    for i, c in enumerate(calls):
      function = self._functions[c.function]
      if pool is None or function in self.judges:
        outcomes[i] = reward_outcomes.call(function, c.arguments, c.count)
    others = [i for i in range(len(calls)) if i not in outcomes]
    if pool is not None and others:
      outcomes |= zip(others, pool.run([calls[i] for i in others]))
    return [outcomes[i] for i in range(len(calls))]


def _no_rewards(completions: Sequence[Any]) -> None:
  """Takes the place of a judge in the workers, which never call it."""


def _rows(rows: list[int]) -> str:
  if len(rows) == 1:
    return f"row {rows[0]}"
  return f"{len(rows)} rows from row {rows[0]}"


def _table(
  prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns all columns by name, arrays as NumPy arrays; checks their lengths."""
  reserved = {"prompts", "completions", "prompt", "completion"} & set(columns)
  if reserved:
    raise ValueError(
      f"columns {sorted(reserved)} have reserved names, which reward functions receive "
      "the prompts and completions by: rename the columns"
    )
  table = {"prompts": prompts, "completions": completions, **columns}
  for name, column in table.items():
    if hasattr(column, "__array__"):
      table[name] = np.asarray(column)
    if isinstance(column, str) or len(column) != len(prompts):
      raise ValueError(
        f"the column {name!r} has {len(column)} entries for {len(prompts)} prompts: "
        "give a list with one entry per row"
      )
  return table


def _arguments_of(
  function: RewardFn, name: str, table: dict[str, Any]
) -> dict[str, Any]:
  """Returns the columns that the signature of the function names."""
  arguments = {}
  for parameter in inspect.signature(function).parameters.values():
    if parameter.kind is parameter.VAR_KEYWORD:
      return table
    if parameter.kind is parameter.VAR_POSITIONAL:
      continue
    named = parameter.kind is not parameter.POSITIONAL_ONLY
    if named and parameter.name in table:
      arguments[parameter.name] = table[parameter.name]
    elif parameter.default is parameter.empty:
      raise TypeError(
        f"the reward function {name} needs {parameter.name!r}, which is no column of "
        f"this dataset; its columns are {sorted(table)}: rename the argument, or a "
        "column with data.columns"
      )
  return arguments


def _check_functions(functions: Sequence[Any]) -> None:
  if not functions:
    raise ValueError("there are no reward functions: give at least one")
  for function in functions:
    if not callable(function):
      raise TypeError(
        f"a reward function is {checks.type_of(function)}, which cannot be called; "
        "give fn(prompts, completions, **columns) -> list of numbers"
      )
    try:
      inspect.signature(function)
    except ValueError as error:
      raise TypeError(
        f"{reward_outcomes.name_of(function)} has no signature that can be read: wrap "
        "it in a Python function"
      ) from error


def _names(functions: Sequence[RewardFn], names: Sequence[str] | None) -> list[str]:
  if names is None:
    names = [reward_outcomes.name_of(function) for function in functions]
  _check_count("names", names, str, len(functions))
  repeated = [name for name, n in collections.Counter(names).items() if n > 1]
  if repeated:
    raise ValueError(
      f"several reward functions are called {repeated[0]!r}: give each of them another "
      "name with names=[...]"
    )
  return list(names)


def _check_count(name: str, values: Sequence[Any], kind: type, count: int) -> None:
  checks.listed(name, values, kind)
  if len(values) != count:
    raise ValueError(f"{name} is {values}: give {count}, one per reward function")


def _check_limits(
  workers: int, timeout_s: float | None, memory_bytes: int | None
) -> None:
  checks.number("workers", workers, checks.NOT_NEGATIVE, whole=True)
  checks.number("timeout_s", timeout_s, checks.POSITIVE, optional=True)
  checks.number("memory_bytes", memory_bytes, checks.BYTES, whole=True, optional=True)
  if workers and timeout_s is None:
    raise ValueError(
      f"workers is {workers} and timeout_s is not set: a function that hangs would "
      "stop the run; set timeout_s to the seconds that a call may take"
    )
  limits = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
  for name, limit in limits.items():
    if limit is not None and not workers:
      raise ValueError(
        f"{name} is {limit} with workers=0: nothing can stop a function in this "
        "process; set workers to 1 or more"
      )
