"""What the processes of one run tell each other, outside of what devices compute.

It goes through the key-value store of `jax.distributed`'s coordinator and not through a
collective: a process that does not come is named after a while, where a collective
would wait for it without an end and without a word.
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

# The store lives as long as the processes, and so must the numbers that keep a second
# meeting about the same thing apart from the first.
_meetings: collections.Counter[str] = collections.Counter()
_notices = itertools.count()
# What this process does alone by now: {number: (what, since when)}.
_alone: dict[int, tuple[str, float]] = {}
_numbers = itertools.count()


class AbsentError(RuntimeError):
  """Another process did not do what all processes of a run do together."""


def gather(what: str, value: Any, timeout_s: float = 600) -> list[Any]:
  """A JSON value of every process, on every process, in the order of their numbers.

  Args:
    what: what it is about, the same words on every process; errors repeat them.
    value: of this process.
    timeout_s: seconds to wait for the others.

  Raises:
    AbsentError: a process did not come.
  """
  if jax.process_count() == 1:
    return [value]
  _meetings[what] += 1
  folder = f"tunix/{what}/{_meetings[what]}"
  store = client()
  store.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(value))
  out = []
  for number in range(jax.process_count()):
    try:
      text = store.blocking_key_value_get(f"{folder}/{number}", int(1000 * timeout_s))
    except jax.errors.JaxRuntimeError as error:
      raise AbsentError(
        f"{what}: process {number} of {jax.process_count()} did not come within "
        f"{timeout_s:g} s. Every process has to take part, in the same step (leave out "
        "an `if jax.process_index() == 0` around it); if it ended, its log says why"
      ) from error
    out.append(json.loads(text))
  # Who is here has read all of the meeting before.
  if (before := _meetings[what] - 1) > 0:
    store.key_value_delete(f"tunix/{what}/{before}/{jax.process_index()}")
  return out


def deal(
  what: str,
  parts: Sequence[Any],
  work: Callable[[Sequence[Any]], list[Any]],
  timeout_s: float = 600,
) -> list[Any]:
  """What `work` makes of every part, each made by one of the processes.

  Args:
    what: as in `gather`.
    parts: the same ones on every process.
    work: a JSON value of each of the parts that it is given.
    timeout_s: seconds that a process waits for the others when its own are done.

  Raises:
    AbsentError: as `gather`.
  """
  count = jax.process_count()
  done = gather(what, work(parts[jax.process_index() :: count]), timeout_s)
  return [done[i % count][i // count] for i in range(len(parts))]


def agree(what: str, value: Any, remedy: str, timeout_s: float = 600) -> None:
  """Compares a JSON dict of strings with that of every other process.

  Raises:
    ValueError: a process has another value under some key, or other keys.
    AbsentError: as `gather`.
  """
  first, *others = gather(what, value, timeout_s)
  for number, other in enumerate(others, start=1):
    for key in sorted(first.keys() | other.keys()):
      if first.get(key) != other.get(key):
        raise ValueError(
          f"{what}: {key} is {first.get(key)!r} on process 0 and {other.get(key)!r} on "
          f"process {number}: {remedy}"
        )


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
  """Around code of a user that may never return, while the other processes wait for
  this one, perhaps in a collective, which has no limit; see `launch.Watch`.

  Args:
    what: it does, as in "process 1 has been at WHAT for 600 s".
  """
  number = next(_numbers)
  _alone[number] = what, time.monotonic()
  try:
    yield
  finally:
    del _alone[number]


def longest_alone() -> tuple[str, float]:
  """(what, for how many seconds) this process has been doing `alone` for longest."""
  entries = list(_alone.values())  # at once: other threads write
  what, since = min(entries, key=lambda entry: entry[1], default=("", None))
  return what, 0.0 if since is None else time.monotonic() - since


class StopNotice:
  """Lets all processes stop after the same step when a signal reaches one of them.

  Args:
    lag: steps that a process can be ahead of another one; what is dispatched to the
      devices bounds it.
  """

  def __init__(self, lag: int):
    self._lag = lag
    self._folder = f"tunix/stop/{next(_notices)}"
    self._told = False

  def due(self, signum: int | None, step: int) -> int | None:
    """The signal that this process, having done `step` steps, stops by now.

    Args:
      signum: the signal that reached this process, if one has.
    """
    if jax.process_count() == 1:
      return signum
    store = client()
    if signum is not None and not self._told:
      self._told = True
      # In the future of every process, so that none of them has gone past it unaware.
      notice = json.dumps([step + self._lag, signum])
      store.key_value_set(f"{self._folder}/{jax.process_index()}", notice)
    notices = [json.loads(text) for _, text in store.key_value_dir_get(self._folder)]
    at, number = min(notices, default=(None, None))
    return number if at is not None and step >= at else None


def client() -> Any:
  """The coordinator's client, which JAX has no public name for; Orbax gives it one."""
  from orbax.checkpoint import multihost

  return multihost.get_jax_distributed_client()
