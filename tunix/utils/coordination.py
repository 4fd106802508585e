"""Messages between the processes of one run, outside of the computation on devices.

Messages go through the key-value store of `jax.distributed`'s coordinator, not through
a collective. A collective would wait forever for a missing process; the store waits for
a limited time, and the error names the process.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

# Number of calls of `gather` for each subject, which keeps their keys in the store
# apart. The store lives as long as the processes, and so does the counter.
_meetings: collections.Counter[str] = collections.Counter()
# Key of this process in the last exchange of each topic, which the next one deletes.
_last_keys: dict[str, str] = {}
_notices = itertools.count()
# Open `alone` blocks of this process: {number: (description, monotonic start)}.
_alone: dict[int, tuple[str, float]] = {}
_numbers = itertools.count()
_FAILURES = "tunix/failures"
RESTART = "Checkpoints written before are whole: start all processes again"


class AbsentError(RuntimeError):
  """Error: another process did not take part in an exchange of all processes."""


def gather(
  what: str, value: object, timeout_s: float = 600, *, topic: str | None = None
) -> list[Any]:
  """Returns the values of all processes, in the order of the process indices.

  Args:
    what: subject of the exchange, the same text on every process; part of errors.
    value: JSON value of this process.
    timeout_s: seconds to wait for each other process.
    topic: the same text for subjects that differ in a number, such as that of a step.
      An exchange frees the memory that the one before it on its topic takes in the
      coordinator. All exchanges of a topic are made in one order. None: `what`.

  Raises:
    AbsentError: a process did not take part in time.
  """
  if jax.process_count() == 1:
    return [value]
  _meetings[what] += 1
  folder = f"tunix/{what}/{_meetings[what]}"
  store, key = client(), f"{folder}/{jax.process_index()}"
  store.key_value_set(key, json.dumps(value))
  out = []
  for number in range(jax.process_count()):
    try:
      text = store.blocking_key_value_get(f"{folder}/{number}", int(1000 * timeout_s))
    except jax.errors.JaxRuntimeError as error:
      raise AbsentError(
        f"{what}: process {number} of {jax.process_count()} did not take part within "
        f"{timeout_s:g} s. Every process must call it in the same step (remove an "
        "`if jax.process_index() == 0` around the call). If the process ended, its log "
        "has the reason"
      ) from error
    out.append(json.loads(text))
  # Every process is here, so it has read all values of the exchange before.
  topic = what if topic is None else topic
  if (before := _last_keys.get(topic)) is not None:
    store.key_value_delete(before)
  _last_keys[topic] = key
  return out


def deal(
  what: str,
  parts: Sequence[Any],
  work: Callable[[Sequence[Any]], list[Any]],
  timeout_s: float = 600,
) -> list[Any]:
  """Splits work over the processes and returns all results on every process.

  Args:
    what: subject of the exchange, as in `gather`.
    parts: inputs of the work, the same on every process.
    work: function that returns one JSON value for each part that it is given.
    timeout_s: seconds that a process waits for the others after it has finished.

  Returns: results in the order of `parts`.

  Raises:
    AbsentError: a process did not take part in time.
  """
  count = jax.process_count()
  done = gather(what, work(parts[jax.process_index() :: count]), timeout_s)
  return [done[i % count][i // count] for i in range(len(parts))]


def share(count: int) -> range:
  """Returns this process's share of `count` numbers: one of nearly equal blocks."""
  me, processes = jax.process_index(), jax.process_count()
  return range(me * count // processes, (me + 1) * count // processes)


def exchange(what: str, work: Callable[[], Any], timeout_s: float) -> list[Any]:
  """Runs work of this process's own and returns the results of all processes.

  A failure on one process is an error on all of them, so that none waits for it.

  Args:
    what: subject of the exchange, as in `gather`.
    work: function that returns the JSON value of this process.
    timeout_s: seconds that a process waits for the others after it has finished.

  Raises:
    AbsentError: another process failed, or did not take part in time.
  """
  if jax.process_count() == 1:
    return [work()]
  try:
    mine = {"value": work()}
  except Exception as error:  # reported to the others, and raised again
    gather(what, {"failure": f"{type(error).__name__}: {error}"}, timeout_s)
    raise
  results = gather(what, mine, timeout_s)
  for number, result in enumerate(results):
    if "failure" in result:
      raise AbsentError(described_failure(number, result["failure"]))
  return [result["value"] for result in results]


def agree(
  what: str,
  value: object,
  remedy: str,
  timeout_s: float = 600,
  *,
  topic: str | None = None,
) -> None:
  """Compares a dict of JSON values with those of all other processes.

  Args:
    what: subject of the exchange, as in `gather`.
    value: {name: JSON value} of this process.
    remedy: end of the error message.
    timeout_s: seconds to wait for each other process.
    topic: see `gather`.

  Raises:
    ValueError: a process has other keys, or another value for a key.
    AbsentError: a process did not take part in time.
  """
  first, *others = gather(what, value, timeout_s, topic=topic)
  for number, other in enumerate(others, start=1):
    for key in sorted(first.keys() | other.keys()):
      if first.get(key) != other.get(key):
        raise ValueError(
          f"{what}: {key} is {first.get(key)!r} on process 0 and {other.get(key)!r} on "
          f"process {number}: {remedy}"
        )


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
  """Marks a block of user code during which the other processes wait for this one.

  Such code may never return, and the others may wait in a collective, which has no
  time limit. `launch.Watch` ends all processes after a while.

  Args:
    what: description of the block, as in "process 1 has been at WHAT for 600 s".
  """
  number = next(_numbers)
  _alone[number] = what, time.monotonic()
  try:
    yield
  finally:
    del _alone[number]


def longest_alone() -> tuple[str, float]:
  """Returns (description, seconds) of the `alone` block that is open for longest."""
  entries = list(_alone.values())  # a copy, because other threads write
  what, since = min(entries, key=lambda entry: entry[1], default=("", None))
  return what, 0.0 if since is None else time.monotonic() - since


def report_failure(text: str) -> None:
  """Tells the other processes why this one ends."""
  me = f"{_FAILURES}/{jax.process_index()}"
  client().key_value_set(me, text, allow_overwrite=True)


def forget_failure() -> None:
  """Removes the report of this process, before it starts another run."""
  if jax.process_count() > 1:
    client().key_value_delete(f"{_FAILURES}/{jax.process_index()}")


def failures() -> dict[int, str]:
  """Returns the reported failures by process index."""
  entries = client().key_value_dir_get(_FAILURES)
  return {int(key.rpartition("/")[2]): text for key, text in entries}


def check_failures() -> None:
  """Raises AbsentError if another process has reported a failure."""
  for number, text in sorted(failures().items()):
    if number != jax.process_index() and text:
      raise AbsentError(described_failure(number, text))


def described_failure(number: int, text: str) -> str:
  """Returns the message about the failure of process `number`."""
  return f"process {number} of {jax.process_count()} failed: {text}. {RESTART}"


class StopNotice:
  """Agreement of all processes to stop after the same step.

  A signal may reach only one process. It announces a step in the future at which all
  processes stop.

  Args:
    lag: number of steps that one process can be ahead of another. The number of
      dispatched computations bounds it.
  """

  def __init__(self, lag: int):
    self._lag = lag
    self._folder = f"tunix/stop/{next(_notices)}"
    self._is_announced = False

  def due(self, signum: int | None, step: int) -> int | None:
    """Returns the signal to stop for after `step` steps; None: continue.

    Args:
      signum: signal that this process has received; None: none.
      step: number of steps that this process has done.
    """
    if jax.process_count() == 1:
      return signum
    store = client()
    if signum is not None and not self._is_announced:
      self._is_announced = True
      # A step that no process can have passed without reading the notice.
      notice = json.dumps([step + self._lag, signum])
      store.key_value_set(f"{self._folder}/{jax.process_index()}", notice)
    notices = [json.loads(text) for _, text in store.key_value_dir_get(self._folder)]
    at, number = min(notices, default=(None, None))
    return number if at is not None and step >= at else None


def client() -> Any:
  """Returns the client of JAX's coordinator; only Orbax has a public name for it."""
  from orbax.checkpoint import multihost

  return multihost.get_jax_distributed_client()
