"""Making of the environments of a prompt's completions.

The user's function gets the prompt and the columns of the data that its signature
names. It returns one environment, and is then called once for each completion, or an
`EnvGroup` with those of all completions of the prompt. Processes of environments import
this file, which therefore loads neither jax nor numpy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tunix.rl.env.adapters.trl import TRLEnvironment
from tunix.rl.env.env import EnvError, EnvGroup
from tunix.utils import checks

MakeEnv = Callable[..., Any]

# Columns that reward functions receive besides those of the data.
ENVIRONMENTS, CONVERSATIONS = "environments", "conversations"


class Copies(EnvGroup):
  """A group whose environments are made one by one, by the same function.

  Args:
    make: makes an environment.
    first: the first one.
    count: number of environments.
  """

  def __init__(self, make: Callable[[], Any], first: Any, count: int):
    self._make, self._first, self._count = make, first, count

  def make_envs(self) -> list[Any]:
    envs = [self._first]
    try:
      while len(envs) < self._count:
        envs.append(self._make())
    except BaseException:  # of the user's function; nobody else knows of the others
      for env in envs:
        if hasattr(env, "close"):
          env.close()
      raise
    return envs


def group_of(make: Callable[[], Any], count: int) -> Any:
  """Returns the environments of a prompt: a group that `make` made, or one of copies.

  Args:
    make: makes an environment or a group of them, see `one`.
    count: completions of the prompt.
  """
  first = make()
  return first if hasattr(first, "make_envs") else Copies(make, first, count)


def one(make: MakeEnv, values: dict[str, Any]) -> Any:
  """Calls the user's function for a row of the data.

  Args:
    make: the function.
    values: prompt and columns of the row.

  Raises:
    EnvError: it made no environment.
  """
  made = make(**arguments(make, values))
  is_env = hasattr(made, "initial_observation") and hasattr(made, "step")
  if is_env or hasattr(made, "make_envs"):
    return made
  if hasattr(made, "reset") and not hasattr(made, "step"):
    columns = {name: x for name, x in values.items() if name != "prompt"}
    return TRLEnvironment(made, values["prompt"], columns)
  raise EnvError(
    f"env returned {checks.type_of(made)}; expected an environment with "
    "initial_observation and step, a group with make_envs, or one of TRL with reset"
  )


def arguments(make: MakeEnv, values: dict[str, Any]) -> dict[str, Any]:
  """Returns those of `values` that the signature of a function names.

  Arguments that a `functools.partial` has bound already are left out.

  Raises:
    ValueError: an argument without a default is missing, or a column has a reserved
      name.
  """
  for name in (ENVIRONMENTS, CONVERSATIONS):
    if name in values:
      raise ValueError(
        f"the data has the column {name!r}, which stands for what episodes give to "
        "reward functions: rename it"
      )
  bound = getattr(make, "keywords", {})
  values = {name: x for name, x in values.items() if name not in bound}
  parameters = inspect.signature(make).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return values
  for p in parameters:
    needed = p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    if needed and p.name not in values:
      raise ValueError(
        f"env needs {p.name!r}, and the data has {', '.join(values)}: add the column, "
        "or give the argument a default"
      )
  return {p.name: values[p.name] for p in parameters if p.name in values}
