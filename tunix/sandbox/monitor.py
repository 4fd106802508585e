"""The process that starts one command in a jail, watches it, and reports its end.

It runs between the trainer and the command: trainer -> monitor -> entry -> init ->
command. The monitor is outside of the jail and reads the output. The entry moves into
new namespaces; init is process 1 there, so the kernel kills all processes of the jail
when init ends. `cell` has the entry, init and the command's setup.

The monitor reads a request as JSON from its standard input and writes the result as
JSON to its standard output. It believes no process of the jail: it knows them from the
kernel, as its descendants, and signals no others. What entry and init send is checked,
and no process that a stranger's code can reach holds the descriptors for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from tunix.sandbox import cell, syscalls

_TICK_S = 0.05  # interval of the checks of memory and number of processes
_KILL_S = 5.0
_DRAIN_S = 1.0  # enough for full pipes, whose writers have ended
_READ = 1 << 16
_MOST_REPORTED = 1 << 16  # bytes
_MOST_HELD = 256  # descriptors of processes
# What Python, C++ and common tools print when memory cannot be had.
_NO_MEMORY = ("MemoryError", "std::bad_alloc", "Cannot allocate memory")


def main() -> None:
  """Runs the request of the standard input."""
  request = json.load(sys.stdin)
  json.dump(run(request), sys.stdout)
  sys.stdout.flush()


def run(request: dict[str, Any]) -> dict[str, Any]:
  """Runs a request of `jail.Jail` and returns the fields of its `JailResult`.

  Raises:
    ValueError: the setup of the jail reported something that it never reports.
  """
  if sys.platform == "linux":
    # Processes whose parent ended become children of the monitor, which kills them.
    syscalls.prctl(syscalls.SUBREAPER, 1)
    # Closes its memory and descriptors to processes of its user; a fork inherits it.
    syscalls.prctl(syscalls.DUMPABLE, 0)
  with contextlib.suppress(PermissionError):
    # Only root may: hundreds of processes of a jail must not keep the monitor waiting.
    os.setpriority(os.PRIO_PROCESS, 0, -15)
  pipes = [os.pipe() for _ in range(4)]
  start = time.monotonic()
  entry = os.fork()
  if entry == 0:
    cell.enter(request, *(writer for _, writer in pipes))  # does not return
  for _, writer in pipes:
    os.close(writer)
  watch = _Watch(request, entry, [reader for reader, _ in pipes])
  watch.follow(start + request["wall_s"])
  _kill_all(entry)
  watch.drain()
  return watch.result(time.monotonic() - start)


class _Watch:
  """The output and the state of a jail.

  Args:
    request: the request.
    entry: id of the entry, and of the process group of the jail.
    pipes: descriptors of standard output, standard error, report and exit code.
  """

  def __init__(self, request: dict[str, Any], entry: int, pipes: list[int]):
    self._entry, self._request = entry, request
    self._stdout, self._stderr, self._report, self._status = pipes
    self._texts = {pipe: bytearray() for pipe in pipes}
    self._room = request["output_bytes"]
    self._stop: tuple[str, str] | None = None  # finish and reason
    self._selector = selectors.DefaultSelector()
    for pipe in pipes:
      os.set_blocking(pipe, False)
      self._selector.register(pipe, selectors.EVENT_READ)

  def follow(self, deadline: float) -> None:
    """Returns when the command has ended or must be stopped."""
    check = time.monotonic() + _TICK_S
    while self._stop is None and self._status in self._selector.get_map():
      now = time.monotonic()
      if now >= deadline:
        self._stop = "timeout", f"it ran longer than {self._request['wall_s']:g} s"
      elif now >= check:
        self._check_use()
        check = now + _TICK_S
      self._read(max(0.0, min(check, deadline) - now))

  def drain(self) -> None:
    """Reads what is left in the pipes, when all processes of the jail have ended."""
    end = time.monotonic() + _DRAIN_S
    while self._selector.get_map() and self._read(0.0) and time.monotonic() < end:
      pass

  def result(self, seconds: float) -> dict[str, Any]:
    """Returns the fields of a `JailResult`."""
    facts = _facts(bytes(self._texts[self._report])) | {"code": self._exit_code()}
    stdout, stderr = (self._text(x) for x in (self._stdout, self._stderr))
    finish, reason = self._stop or _finish(facts, stderr, self._request)
    return {
      "finish": finish,
      "reason": reason,
      "stdout": stdout,
      "stderr": stderr,
      "exit_code": facts["code"],
      "seconds": seconds,
      "protections": facts["protections"],
      "refused": facts["refused"],
    }

  def _read(self, wait: float) -> bool:
    """Reads once from each pipe that has data; returns False if none has."""
    events = self._selector.select(wait)
    for key, _ in events:
      data = os.read(key.fd, _READ)
      if not data:
        self._selector.unregister(key.fd)
      elif key.fd in (self._report, self._status):
        self._texts[key.fd] += data[: _MOST_REPORTED - len(self._texts[key.fd])]
      else:
        self._keep(key.fd, data)
    return bool(events)

  def _keep(self, pipe: int, data: bytes) -> None:
    self._texts[pipe] += data[: self._room]
    if len(data) > self._room and self._stop is None:
      limit = self._request["output_bytes"]
      self._stop = "output_limit", f"it wrote more than {limit} bytes"
    self._room = max(0, self._room - len(data))

  def _check_use(self) -> None:
    """Stops a jail that has too many processes or too much memory in all."""
    most, memory = self._request["processes"], self._request["memory_bytes"]
    most += 2  # entry and init, which the system's limit counts too
    # Not all of them: a fork bomb may grow faster than it can be counted.
    pids = set(itertools.islice(_descendants(os.getpid()), most + 1))
    if len(pids) > most:
      self._stop = "killed", f"it had more than {most - 2} processes"
    elif sum(map(_own_memory, pids - self._setup())) > memory:
      self._stop = "memory", f"its processes used more than {memory} bytes"

  def _setup(self) -> set[int]:
    """Returns the ids of entry and init, which is the entry's only child."""
    return {self._entry, *_children(self._entry)}

  def _exit_code(self) -> int | None:
    """Returns the exit code that init sent; None if it sent none.

    Raises:
      ValueError: it is no exit code.
    """
    text = self._texts[self._status]
    code = int(text) if text else None
    if code is not None and not -64 <= code <= 255:
      raise ValueError(f"init sent the exit code {code}")
    return code

  def _text(self, pipe: int) -> str:
    text = bytes(self._texts[pipe]).decode("utf-8", "replace")
    # The scratch folder has a random name where the jail has no root of its own.
    return text.replace(self._request["scratch"], cell.WORK)


def _facts(report: bytes) -> dict[str, Any]:
  """Returns what the setup reported: {"protections", "refused"} and perhaps "error".

  Raises:
    ValueError: it is nothing that a setup reports.
  """
  facts: dict[str, Any] = {"protections": [], "refused": []}
  for line in report.split(b"\n")[:-1]:
    facts |= json.loads(line)
  names = [*facts["protections"], *facts["refused"]]
  texts = [*names, facts.get("error", "")]
  fields = {"protections", "refused", "error"}
  if not facts.keys() <= fields or not all(isinstance(x, str) for x in texts):
    raise ValueError(f"the setup of the jail reported {facts}")
  return facts


def _finish(
  facts: dict[str, Any], stderr: str, request: dict[str, Any]
) -> tuple[str, str]:
  """Returns the finish and the reason of a command that ended by itself."""
  code = facts["code"]
  if "error" in facts:
    return "error", facts["error"]
  if code is None:
    return "killed", "the first process of the jail was killed"
  if code == 0:
    return "ok", ""
  if code == -signal.SIGXCPU:
    return "timeout", f"it used more than {request['cpu_s']} s of processor time"
  if code == -signal.SIGXFSZ:
    return "killed", f"it wrote a file of more than {request['file_bytes']} bytes"
  if any(x in stderr[-1000:] for x in _NO_MEMORY):
    return "memory", f"a process needed more than {request['memory_bytes']} bytes"
  if code < 0:
    return "killed", f"it was ended by {signal.Signals(-code).name}"
  return "error", f"exit code {code}"


def _descendants(pid: int) -> Iterator[int]:
  """Yields the ids of the children of a process and of their children.

  A process is yielded before its children are read.
  """
  waiting = [pid]
  while waiting:
    parent = waiting.pop()
    children = _children(parent)
    yield from children
    waiting += children


def _children(pid: int) -> list[int]:
  """Returns the ids of the children of a process, those that ended among them."""
  children = []
  # A process may end at any moment; systems without /proc show none.
  with contextlib.suppress(OSError):
    for thread in os.listdir(f"/proc/{pid}/task"):
      with open(f"/proc/{pid}/task/{thread}/children") as file:
        children += [int(x) for x in file.read().split()]
  return children


def _own_memory(pid: int) -> int:
  """Returns the resident bytes of a process without those of files."""
  try:
    with open(f"/proc/{pid}/statm") as file:
      _, resident, of_files = file.read().split()[:3]
  except (OSError, ValueError):  # it has ended
    return 0
  return (int(resident) - int(of_files)) * resource.getpagesize()


def _kill_all(entry: int) -> None:
  """Kills all processes of the jail and waits for their ends."""
  end, own, has_entry = time.monotonic() + _KILL_S, os.getpid(), True
  while time.monotonic() < end:
    if has_entry:
      # A fork fails while a signal to its group is pending, so this ends fork bombs.
      # The number is the group's as long as nobody has waited for the entry.
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(entry, signal.SIGKILL)
    # Processes that left the group. The children of an ended one are found next time.
    _kill_descendants(own)
    others = [pid for pid in _children(own) if pid != entry]
    for pid in others:
      os.waitpid(pid, os.WNOHANG)
    if not has_entry and not others:
      return
    if not others:  # the children of the entry come to the monitor when it has ended
      has_entry = os.waitpid(entry, os.WNOHANG) == (0, 0)
    time.sleep(0.002)


def _kill_descendants(own: int) -> None:
  """Kills the descendants of this process, or many of them, if there are very many.

  An id may change hands between a look and a signal; a descriptor of a process cannot.
  """
  held: dict[int, int] = {}
  for pid in itertools.islice(_descendants(own), _MOST_HELD):
    try:
      held[pid] = os.pidfd_open(pid)
    except ProcessLookupError:
      continue
    except OSError:  # a system without such descriptors, or no more of them
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
  ours = set(_descendants(own))
  for pid, descriptor in held.items():
    if pid in ours:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.close(descriptor)
