"""Rewards: several functions with weights, each row's outcome known by name.

A reward function is `fn(prompts, completions, **columns) -> list of numbers`, sync or
async; `per_row` makes one of a function that takes a single row. A row gets a value, a
failure or a time-out from each function. A row with anything but values has no reward
(nan): the learner leaves it out. It never counts as 0.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.rl import reward_outcomes
from tunix.rl.reward_fns import RowReward
from tunix.rl.reward_outcomes import Failed, Outcome, PerRow, TimedOut, Value
from tunix.rl.reward_pool import Call, RewardPool
from tunix.utils import checks, coordination

RewardFn = Callable[..., Any]

_OUTCOMES = {kind.__name__: kind for kind in (Value, Failed, TimedOut)}
# Seconds that a process waits for the rewards of the others. The time-out of a reward
# function is its own; here only a process that hangs outside of them ends the run.
_PATIENCE_S = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOutput:
  """The rewards of one batch.

  Attributes:
    total: float64 [B], the weighted sum over functions; nan for a row with an outcome
      that is not a value.
    by_function: float64 [B] a function, unweighted; nan where not a value.
    outcomes: a function's outcome for each row.
    weights: of the functions in the total; 1 of those it lacks.
  """

  total: np.ndarray
  by_function: dict[str, np.ndarray]
  outcomes: dict[str, list[Outcome]]
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def valid(self) -> np.ndarray:
    """Bool [B]: rows that have a reward."""
    return np.isfinite(self.total)

  def take(self, rows: np.ndarray) -> RewardOutput:
    """Some of the rows, in that order."""
    return RewardOutput(
      total=self.total[rows],
      by_function={name: values[rows] for name, values in self.by_function.items()},
      outcomes={
        name: [outcomes[row] for row in rows]
        for name, outcomes in self.outcomes.items()
      },
      weights=self.weights,
    )

  def joined(self, others: Iterable[RewardOutput]) -> RewardOutput:
    """With the rows of other batches, of the same functions, behind its own."""
    every = [self, *others]
    return RewardOutput(
      total=np.concatenate([part.total for part in every]),
      by_function={
        name: np.concatenate([part.by_function[name] for part in every])
        for name in self.by_function
      },
      outcomes={
        name: [outcome for part in every for outcome in part.outcomes[name]]
        for name in self.outcomes
      },
      weights=self.weights,
    )

  def plus(self, name: str, values: np.ndarray) -> RewardOutput:
    """With a function more, whose values [B] (a reward model's scores) are added."""
    values = np.asarray(values, np.float64)
    outcomes: list[Outcome] = [
      Value(float(x)) if math.isfinite(x) else Failed(f"the score is {x}")
      for x in values
    ]
    return RewardOutput(
      total=self.total + np.where(np.isfinite(values), values, np.nan),
      by_function={**self.by_function, name: values},
      outcomes={**self.outcomes, name: outcomes},
      weights=self.weights,
    )

  def problems(self) -> list[str]:
    """One line for each function and cause, with the rows that it cost."""
    lines = []
    for name, outcomes in self.outcomes.items():
      rows = collections.defaultdict(list)
      for row, outcome in enumerate(outcomes):
        if isinstance(outcome, TimedOut):
          rows[f"no answer within {outcome.seconds:g} s"].append(row)
        elif not isinstance(outcome, Value):
          rows[outcome.error].append(row)
      lines += [f"{name}: {_rows(where)}: {why}" for why, where in rows.items()]
    return lines


# A row that fails costs no other row its reward: they are called row by row.
_BY_ROW = (PerRow, RowReward)


class RewardManager:
  """Calls reward functions and adds their values up.

  Attributes:
    names: of the functions, in their order.
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
    """Takes the functions and how to run them.

    With `workers=0` they run in this process, one after the other: nothing can stop
    one that hangs. With workers they run in processes of their own, which are killed
    at the deadline; each process has its own copy of the functions' modules.

    Args:
      reward_fns: one or several `fn(prompts, completions, **columns)`. Columns are
        passed by what the signature names; `**kwargs` gets all of them.
      weights: one a function; all 1 if not given.
      timeout_s: seconds that one call may take; needed with workers.
      workers: processes; 0 for none.
      names: of the functions in metrics; their `__name__` if not given.
      rows_per_call: most rows that a function gets in one call; a call that fails
        costs all its rows. None: the whole batch, which functions that compare rows
        need. Functions made by `per_row`, and the ready ones, get one row.
      memory_bytes: what a worker may allocate, Linux only.

    Raises:
      TypeError: something is not callable, or cannot be sent to workers.
      ValueError: counts that do not fit, equal names, weights that are not finite,
        limits without workers.
    """
    self._functions = [reward_fns] if callable(reward_fns) else list(reward_fns)
    _check_functions(self._functions)
    self.names = _names(self._functions, names)
    self._weights = _checked_weights(weights, len(self._functions))
    checks.number(
      "rows_per_call", rows_per_call, checks.COUNT, whole=True, optional=True
    )
    self._rows_per_call = rows_per_call
    _check_limits(workers, timeout_s, memory_bytes)
    self._pool = None
    if workers and timeout_s is not None:
      self._pool = RewardPool(
        self._functions,
        workers=workers,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
      )

  def check_columns(self, columns: Iterable[str]) -> None:
    """Refuses functions that want a column that is not there, before any is called.

    Raises:
      TypeError: names the function and the columns.
    """
    table = dict.fromkeys(["prompts", "completions", *columns])
    for function, name in zip(self._functions, self.names):
      _chosen(function, name, table)

  def compute(
    self,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
  ) -> RewardOutput:
    """The rewards of B rows.

    Args:
      prompts: B prompts.
      completions: B completions.
      columns: further columns of the dataset, B entries each.

    Raises:
      TypeError: a function wants a column that is not there, or columns cannot be
        sent to workers.
      ValueError: columns of another length, or with a reserved name.
      RuntimeError: the workers cannot load the functions.
    """
    table = _table(prompts, completions, columns or {})
    count = len(prompts)
    calls, owners = [], []
    for i, function in enumerate(self._functions):
      arguments = _chosen(function, self.names[i], table)
      size = 1 if isinstance(function, _BY_ROW) else self._rows_per_call or count
      for start in range(0, count, max(size, 1)):
        part = {k: v[start : start + size] for k, v in arguments.items()}
        calls.append(Call(i, part, min(size, count - start)))
        owners.append(self.names[i])
    outcomes: dict[str, list[Outcome]] = {name: [] for name in self.names}
    for name, part in zip(owners, self._run(calls)):
      outcomes[name] += part
    values = {k: np.array([_value(x) for x in v], float) for k, v in outcomes.items()}
    total = np.zeros(count)
    for name, weight in zip(self.names, self._weights):
      total = total + weight * values[name]
    weights = dict(zip(self.names, self._weights))
    return RewardOutput(
      total=total, by_function=values, outcomes=outcomes, weights=weights
    )

  def close(self) -> None:
    """Ends the worker processes."""
    if self._pool is not None:
      self._pool.close()

  def __enter__(self) -> RewardManager:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _run(self, calls: list[Call]) -> list[list[Outcome]]:
    """Every call once, by one of the processes; all of them get what came of all."""
    if jax.process_count() == 1:
      return [list(part) for part in self._run_here(calls)]
    told = coordination.deal("rewards", calls, self._told, timeout_s=_PATIENCE_S)
    return [[_OUTCOMES[kind](*fields) for kind, fields in part] for part in told]

  def _told(self, calls: Sequence[Call]) -> list[Any]:
    """The outcomes of calls made here, as the other processes are told of them."""
    with coordination.alone("its reward functions"):
      outcomes = self._run_here(list(calls))
    return [
      [(type(x).__name__, dataclasses.astuple(x)) for x in part] for part in outcomes
    ]

  def _run_here(self, calls: list[Call]) -> Sequence[Sequence[Outcome]]:
    if self._pool is not None:
      return self._pool.run(calls)
    functions = self._functions
    return [
      reward_outcomes.call(functions[c.function], c.arguments, c.count) for c in calls
    ]


def _value(outcome: Outcome) -> float:
  return outcome.value if isinstance(outcome, Value) else math.nan


def _rows(rows: list[int]) -> str:
  if len(rows) == 1:
    return f"row {rows[0]}"
  return f"{len(rows)} rows from row {rows[0]}"


def _table(
  prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
  """All columns, arrays of any kind as NumPy's, of equal length."""
  reserved = {"prompts", "completions", "prompt", "completion"} & set(columns)
  if reserved:
    raise ValueError(
      f"the columns {sorted(reserved)} have names that the prompts and completions of "
      "a batch are passed by: rename them"
    )
  table = {"prompts": prompts, "completions": completions, **columns}
  for name, column in table.items():
    if hasattr(column, "__array__"):
      table[name] = np.asarray(column)
    if isinstance(column, str) or len(column) != len(prompts):
      raise ValueError(
        f"the column {name!r} has {len(column)} entries for {len(prompts)} prompts: "
        "give a list with one entry a row"
      )
  return table


def _chosen(function: RewardFn, name: str, table: dict[str, Any]) -> dict[str, Any]:
  """The columns that the function's signature asks for."""
  chosen = {}
  for parameter in inspect.signature(function).parameters.values():
    if parameter.kind is parameter.VAR_KEYWORD:
      return table
    if parameter.kind is parameter.VAR_POSITIONAL:
      continue
    named = parameter.kind is not parameter.POSITIONAL_ONLY
    if named and parameter.name in table:
      chosen[parameter.name] = table[parameter.name]
    elif parameter.default is parameter.empty:
      raise TypeError(
        f"the reward function {name} needs {parameter.name!r}, which is no column of "
        f"this dataset; there are {sorted(table)}: rename the argument, or a "
        "column with data.columns"
      )
  return chosen


def _check_functions(functions: Sequence[Any]) -> None:
  if not functions:
    raise ValueError("there are no reward functions: give at least one")
  for function in functions:
    if not callable(function):
      raise TypeError(
        f"a reward function of type {type(function).__name__} cannot be called; give "
        "fn(prompts, completions, **columns) -> list of numbers"
      )
    try:
      inspect.signature(function)
    except ValueError as error:
      raise TypeError(
        f"{reward_outcomes.name_of(function)} does not say what it takes: wrap it in "
        "a function of your own"
      ) from error


def _names(functions: Sequence[RewardFn], names: Sequence[str] | None) -> list[str]:
  if names is not None:
    checks.listed("names", names, str)
  if names is not None and len(names) != len(functions):
    raise ValueError(f"{len(names)} names for {len(functions)} reward functions")
  labels = [reward_outcomes.name_of(f) for f in functions] if names is None else names
  repeated = [name for name, n in collections.Counter(labels).items() if n > 1]
  if repeated:
    raise ValueError(
      f"several reward functions are called {repeated[0]!r}: tell them apart with "
      "names=[...]"
    )
  return list(labels)


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
  weights = [1.0] * count if weights is None else weights
  checks.listed("weights", weights, float)
  if len(weights) != count:
    raise ValueError(
      f"weights is {weights}: give {count} numbers, one a reward function"
    )
  return [float(weight) for weight in weights]


def _check_limits(
  workers: int, timeout_s: float | None, memory_bytes: int | None
) -> None:
  checks.number("workers", workers, checks.NOT_NEGATIVE, whole=True)
  checks.number("timeout_s", timeout_s, checks.POSITIVE, optional=True)
  checks.number("memory_bytes", memory_bytes, checks.BYTES, whole=True, optional=True)
  if workers and timeout_s is None:
    raise ValueError(
      f"workers={workers} without timeout_s: a function that hangs would stop the run; "
      "say how many seconds a call may take"
    )
  limits = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
  for name, limit in limits.items():
    if limit is not None and not workers:
      raise ValueError(
        f"{name} is {limit} with workers=0: nothing can stop a function in this "
        "process; give workers=1 or more"
      )
