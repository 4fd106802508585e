"""The barrier of the processes that write one checkpoint, which a failure ends.

orbax waits several times during a save until all processes have written their parts. If
one process fails, its own barrier would let all processes wait for `timeout_secs`, and
the failed one would then report the time limit instead of its error.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time

import jax

from tunix.sft.checkpoints import errors
from tunix.utils import coordination

# Number of this process's barriers, which keeps their keys in the store apart.
_numbers = itertools.count()
# Milliseconds between two looks at the failures of other processes.
_PAUSE_MS = 500


class Barrier:
  """The barriers of one CheckpointManager, which all processes pass in the same order.

  Process 0 waits for a key of each other process in the coordinator's store, and the
  others wait for its answer.
  """

  def __init__(self) -> None:
    self._folder = f"tunix/checkpoints/{next(_numbers)}"
    self._calls = itertools.count()

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have called it.

    If the calling thread handles an error, the write of this process has failed. The
    error is then reported to the other processes, and the call returns at once.

    Args:
      key: orbax's name of the moment, the same on every process.
      timeout_ms: most milliseconds to wait.

    Raises:
      coordination.AbsentError: the write of another process has failed, or a process
        did not arrive in time.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1 or _report_failure():
      return
    store, number = coordination.client(), next(self._calls)
    folder = f"{self._folder}/{number}/{key}"
    end = time.monotonic() + timeout_ms / 1000
    if me:
      store.key_value_set(f"{folder}/{me}", "")
      _await(store, f"{folder}/all", end)
      return
    for other in range(1, count):
      _await(store, f"{folder}/{other}", end)
    store.key_value_set(f"{folder}/all", "")
    if number:  # all processes have passed it
      store.key_value_delete(f"{self._folder}/{number - 1}")


def _report_failure() -> bool:
  """Reports the error that the calling thread handles; returns False without one."""
  error = sys.exc_info()[1]
  # orbax writes in threads of its own. In the main thread, a caller may save inside of
  # an `except` block, which does not mean that the write failed.
  if error is None or threading.current_thread() is threading.main_thread():
    return False
  if not isinstance(error, coordination.AbsentError):
    coordination.report_failure(errors.describe(error))
  return True


def _await(store, key: str, end: float) -> None:
  """Waits for a key in the store until the time `end` of the monotonic clock."""
  while True:
    left_ms = int(1000 * (end - time.monotonic()))
    try:
      store.blocking_key_value_get(key, max(1, min(_PAUSE_MS, left_ms)))
      return
    except jax.errors.JaxRuntimeError as error:
      coordination.check_failures()
      if left_ms > _PAUSE_MS and "DEADLINE_EXCEEDED" in str(error):
        continue
      raise coordination.AbsentError(
        "not all processes wrote their parts of a checkpoint in time. If a process "
        "ended, its log has the reason; if the disk is slow, raise timeout_secs of "
        f"the checkpoint options ({errors.describe(error)})"
      ) from error
