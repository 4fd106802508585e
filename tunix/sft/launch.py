"""Start of a run with several processes, and detection of a lost process.

If the coordinator does not answer, or another process has ended, JAX aborts the process
with a stack trace. This module detects both cases earlier, and reports them in one
line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tunix.utils import checks, coordination

EXIT_CODE = 1

_HOW = (
  "every process of a run is started with the same coordinator and number of "
  "processes, and its own process_id"
)


def initialize(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  timeout_s: int = 300,
  heartbeat_s: int = 30,
  stall_s: int = 3600,
) -> None:
  """Calls `jax.distributed.initialize`, with clear errors; call it before using JAX.

  Args:
    coordinator: "host:port" of process 0. None: JAX reads all three arguments from the
      environment (Slurm, Open MPI, GKE, TPU VMs).
    num_processes: number of processes of the run.
    process_id: number of this process, from 0 to num_processes - 1.
    timeout_s: most seconds to wait for the other processes.
    heartbeat_s: seconds without a sign of life of a process after which the others end;
      at least 10.
    stall_s: most seconds that a process may wait for one batch of its data, or for its
      share of reward calls; after that all processes end.

  Raises:
    ValueError: The arguments contradict each other.
    coordination.AbsentError: The coordinator does not answer.
  """
  _check(coordinator, num_processes, process_id, timeout_s, heartbeat_s)
  checks.number("stall_s", stall_s, checks.COUNT)
  if coordinator is not None and process_id:
    _wait_for_port(coordinator, timeout_s)
  who = f"process {0 if process_id is None else process_id}"

  def give_up() -> None:
    _end(
      f"{who} of {num_processes or 'the run'} waited {timeout_s} s for the others, and "
      f"not all came: {_HOW}"
    )

  timer = threading.Timer(timeout_s, give_up)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes=num_processes,
      process_id=process_id,
      # JAX's limits end the process without our message, so they must be longer.
      initialization_timeout=timeout_s + 30,
      heartbeat_timeout_seconds=heartbeat_s + 15,
      shutdown_timeout_seconds=heartbeat_s,
    )
  finally:
    timer.cancel()
  if jax.process_count() > 1:
    Watch(heartbeat_s, stall_s, _end).start()


def _check(coordinator, num_processes, process_id, timeout_s, heartbeat_s) -> None:
  is_set = [x is not None for x in (coordinator, num_processes, process_id)]
  if any(is_set) and not all(is_set):
    raise ValueError(
      f"coordinator is {coordinator!r}, num_processes {num_processes} and process_id "
      f"{process_id}: give all three, or none to read them from the environment"
    )
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
      raise ValueError(f"coordinator is {coordinator!r}: expected host:port")
  if num_processes is not None and not 0 <= process_id < num_processes:
    raise ValueError(
      f"process_id is {process_id} of {num_processes} processes: they count from 0"
    )
  checks.number("timeout_s", timeout_s, checks.COUNT)
  checks.number("heartbeat_s", heartbeat_s, checks.Range(10))


def _wait_for_port(coordinator: str, timeout_s: float) -> None:
  host, _, port = coordinator.rpartition(":")
  end = time.monotonic() + timeout_s
  while True:
    try:
      socket.create_connection((host, int(port)), timeout=5).close()
      return
    except OSError as error:
      if time.monotonic() > end:
        raise coordination.AbsentError(
          f"the coordinator {coordinator} did not answer within {timeout_s} s "
          f"({error}): start process 0 there, open the port, and look at its log; "
          f"{_HOW}"
        ) from error
    time.sleep(min(1.0, timeout_s / 10))


def _failure(failures: dict[int, str]) -> str:
  """Returns the message about reported failures; that of this process comes first."""
  me = jax.process_index()
  if text := failures.get(me):
    return f"{text}. {coordination.RESTART}"
  number = min(failures, key=lambda number: (not failures[number], number))
  return coordination.described_failure(
    number, failures[number] or "it lost another one"
  )


class Watch:
  """A thread that publishes this process's signs of life, and reads those of others.

  A sign of life includes the longest `coordination.alone` block of the process.

  Args:
    patience_s: most seconds without a sign of life.
    stall_s: most seconds in one `coordination.alone` block.
    lost: function that is called with a message when a process is lost; it does not
      return.
  """

  def __init__(self, patience_s: float, stall_s: float, lost: Callable[[str], Any]):
    self._patience_s, self._stall_s, self._lost = patience_s, stall_s, lost
    self._pause_s = min(5.0, patience_s / 4)
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._ended = threading.Event()

  def start(self) -> None:
    self._thread.start()
    # Exit handlers run in reverse order, so this one ends the thread before JAX shuts
    # down. A request to a coordinator that is shutting down would abort the process.
    atexit.register(self._end)

  def _end(self) -> None:
    self._ended.set()
    self._thread.join(timeout=self._patience_s)

  def _run(self) -> None:
    client = coordination.client()
    seen: dict[int, tuple[str, float]] = {}
    failed: dict[int, str] = {}
    count = 0
    while not self._ended.is_set():
      now = time.monotonic()
      count += 1
      try:
        me = f"{_ALIVE}/{jax.process_index()}"
        sign = json.dumps([count, *coordination.longest_alone()])
        client.key_value_set(me, sign, allow_overwrite=True)
        signs = client.key_value_dir_get(_ALIVE)
        failures = coordination.failures()
      except jax.errors.JaxRuntimeError:
        return  # the coordinator or this process is shutting down, which JAX handles
      if failures and failures == failed and not _caught.is_set():
        self._lost(_failure(failures))
      failed = failures
      for key, sign in signs:
        number = int(key.rpartition("/")[2])
        if seen.get(number, ("", 0.0))[0] != sign:
          seen[number] = sign, now
        self._check_progress(number, *json.loads(sign)[1:])
      silent = [i for i, (_, at) in seen.items() if now - at > self._patience_s]
      if silent:
        self._lost(
          f"process {silent[0]} of {jax.process_count()} has not been heard of for "
          f"{self._patience_s:g} s: it ended or hangs, and its own log may say why. "
          f"{coordination.RESTART}"
        )
      self._ended.wait(self._pause_s)

  def _check_progress(self, number: int, what: str, seconds: float) -> None:
    if seconds <= self._stall_s:
      return
    if jax.process_index() == 0:
      # The coordinator ends with this process. The others must read the sign before.
      self._ended.wait(2 * self._pause_s)
    self._lost(
      f"process {number} of {jax.process_count()} has been at {what} for {seconds:.0f} "
      "s and the others wait for it: look what does not return there, or set "
      f"distributed.stall_s (now {self._stall_s:g}; stall_s of launch.initialize) "
      f"higher if it takes so long. {coordination.RESTART}"
    )


_ALIVE = "tunix/alive"


@contextlib.contextmanager
def shared_failure() -> Iterator[None]:
  """Context that reports an error to the other processes, so that they end and name it.

  Does nothing in a run of one process.

  Raises:
    coordination.AbsentError: instead of JAX's error if another process has ended.
    RuntimeError: instead of JAX's error if a save in the background has failed.
  """
  _caught.clear()
  try:
    yield
  except Exception as error:  # reported, and raised again
    if jax.process_count() == 1:
      raise
    _caught.set()
    named = _named(error)
    # Without a coordinator no process can receive the report.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      _report(f"{type(named).__name__}: {named}"[:_LONGEST])
    if named is error:
      raise
    raise named from error


_LONGEST = 300  # characters of a reported error
# Seconds that the coordinator waits for the others to read its report: it ends their
# connection, and JAX then aborts them.
_FAREWELL_S = 15.0
_caught = threading.Event()  # the main thread has this process's error


def _named(error: Exception) -> Exception:
  """Returns the error that explains JAX's error, or the error itself."""
  if not isinstance(error, jax.errors.JaxRuntimeError):
    return error
  me, count = jax.process_index(), jax.process_count()
  reported: dict[int, str] = {}
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    reported = {
      number: text for number, text in coordination.failures().items() if text
    }
  if me in reported:
    return RuntimeError(f"{reported[me]}. {coordination.RESTART}")
  for number, text in sorted(reported.items()):
    return coordination.AbsentError(coordination.described_failure(number, text))
  text = (str(error) or type(error).__name__).splitlines()[0][:200]
  return coordination.AbsentError(
    f"process {me} of {count} lost the others: one of them ended, and its own log says "
    f"why ({text}). {coordination.RESTART}"
  )


def _report(text: str) -> None:
  """Reports this process's failure; the coordinator waits until the others read it.

  Args:
    text: the error. It is not reported if another process has reported the cause.
  """
  others = coordination.failures()
  others.pop(jax.process_index(), None)
  coordination.report_failure("" if any(others.values()) else " ".join(text.split()))
  end = time.monotonic() + _FAREWELL_S
  while jax.process_index() == 0 and time.monotonic() < end:
    if len(coordination.failures()) == jax.process_count():
      return
    time.sleep(0.1)


def _end(text: str) -> None:
  """Ends the process from any thread; the main thread may wait for a device forever."""
  print(f"tunix: {text}", file=sys.stderr, flush=True)
  os._exit(EXIT_CODE)
