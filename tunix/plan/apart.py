"""Calls of functions in a fresh process, so that a plan for GPUs touches none.

JAX reads its platforms and XLA its flags once, when a process first uses them.
"""

from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from tunix.plan import gpus
from tunix.utils import env

# What plans raise for their input; another error is a fault and keeps its traceback.
_ERRORS = (ValueError, ImportError, OSError, RuntimeError)
_REQUEST, _ANSWER = "request", "answer"


def plan(
  function: Callable[..., Any],
  settings: object,
  topology: str,
  *args: object,
  **options: object,
) -> Any:
  """Returns `function(settings, topology, ...)`, for GPUs from a process of its own.

  Raises:
    ValueError: the topology has a wrong number of GPUs.
    Exception: see `call`.
  """
  if not gpus.is_name(topology):
    return function(settings, topology, *args, **options)
  gpus.shape(topology)  # refuses wrong numbers before the process starts
  return call(function, settings, topology, *args, **options)


def call(function: Callable[..., Any], *args: object, **options: object) -> Any:
  """Returns `function(*args, **options)`, computed in a process that plans for GPUs.

  Args:
    function: a function of a module; it, its arguments and its result are pickled.

  Raises:
    ValueError, ImportError, OSError, RuntimeError: raised by the function.
    RuntimeError: the process ended without an answer.
  """
  with tempfile.TemporaryDirectory() as folder:
    answer = pathlib.Path(folder, _ANSWER)
    pathlib.Path(folder, _REQUEST).write_bytes(pickle.dumps((function, args, options)))
    code = (
      f"import sys; sys.path[:] = {sys.path!r}; "
      f"from tunix.plan import apart; apart.main({folder!r})"
    )
    flags = f"{env.value('XLA_FLAGS') or ''} {gpus.FLAGS}"
    settings = env.inherited({**gpus.ENVIRONMENT, "XLA_FLAGS": flags})
    done = subprocess.run([sys.executable, "-c", code], env=settings, check=False)
    if not answer.is_file():
      raise RuntimeError(
        f"the process of the plan ended with exit status {done.returncode}; expected a "
        "plan. Its messages are above; -9 means that memory ran out"
      )
    result, error = pickle.loads(answer.read_bytes())
  if error is not None:
    raise error
  return result


def main(folder: str) -> None:
  """Runs the call of a request's folder and writes its result or its error there."""
  place = pathlib.Path(folder)
  function, args, options = pickle.loads((place / _REQUEST).read_bytes())
  result = error = None
  try:
    result = function(*args, **options)
  except _ERRORS as raised:
    error = raised
  (place / _ANSWER).write_bytes(pickle.dumps((result, error)))
