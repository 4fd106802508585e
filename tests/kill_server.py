"""Runs the command many times in children of one process, and kills them as asked.

A start of the command is mostly imports, so they are done once: each run is a fork of
this process, made before JAX has a device and with it threads. Tasks are lines of JSON
on standard input (`Task` of tests/kill_plan.py); an exit status is answered for each.

In a child every change to files below a folder is seen: BEFORE it by an audit hook,
which hears of every one that Python code makes, whatever it calls; AFTER it, and in the
midst of a file's first write (TORN), by functions put around those of `os` and `open`.
What C++ writes (the arrays of checkpoints) is not seen: kills at random instants are
for that (`after_s` of a task, and `KillDrill`).
"""

import io
import json
import math
import os
import re
import shutil  # noqa: F401  before `os` is wrapped: it looks at what that can do
import signal
import sys
import time
from typing import Any

# Audit event -> functions of `os` that end it. Of each the first argument is the path.
CALLS = {
  "os.rename": ("rename", "replace"),
  "os.remove": ("remove", "unlink"),
  "os.mkdir": ("mkdir",),
  "os.rmdir": ("rmdir",),
  "os.chmod": ("chmod",),
  "os.truncate": ("truncate",),
  "os.link": ("link",),
  "os.symlink": ("symlink",),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOT_PATHS = (int, type(None))


class Watch:
  """Writes down every moment of a change below `root`, and ends the process at one.

  Args:
    task: see tests/kill_plan.py.
  """

  def __init__(self, task: dict[str, Any]):
    self.root = os.path.realpath(task["root"])
    self.kill, self.number = task["kill"], task["number"]
    self.log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

  def start(self) -> None:
    sys.addaudithook(self.hear)
    for event, names in CALLS.items():
      for name in names:
        setattr(os, name, self.around(event, getattr(os, name)))
    os.open = self.around("open", os.open)
    opened = self.around_open(io.open)
    io.open = opened
    __builtins__.open = opened

  def hear(self, event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
      if not isinstance(args[2], int) or not args[2] & _WRITES:
        return
      self.moment("before", event, args[0], -1)
    elif event in CALLS:
      self.moment("before", event, args[0], args[-1])

  def around(self, event: str, function: Any) -> Any:
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
      done = function(path, *args, **kwargs)
      if event != "open" or args[0] & _WRITES:
        folder = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
        self.moment("after", event, path, folder)
      return done

    return call

  def around_open(self, function: Any) -> Any:
    def call(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
      file = function(path, mode, *args, **kwargs)
      if not isinstance(path, _NOT_PATHS) and set(mode) & set("wxa+"):
        self.moment("after", "open", path, None)
        self.tear(file, path)
      return file

    return call

  def tear(self, file: Any, path: Any) -> None:
    write = file.write

    def half(data: Any) -> int:
      if self.moment("torn", "open", path, None, is_kept=True):
        write(data[: len(data) // 2])
        file.flush()
        self.end()
      file.write = write  # the first one alone
      return write(data)

    file.write = half

  def moment(
    self, when: str, event: str, path: Any, folder: Any, *, is_kept: bool = False
  ) -> bool:
    """Whether the process ends here; it does unless `is_kept`."""
    if isinstance(path, _NOT_PATHS):
      return False
    path = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
      path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    path = os.path.abspath(path)
    if not path.startswith(self.root + os.sep):
      return False
    kind = [when, event, _kind(path[len(self.root) + 1 :])]
    os.write(self.log, (json.dumps(kind) + "\n").encode())
    if kind != self.kill:
      return False
    self.number -= 1
    if self.number >= 0:
      return False
    if not is_kept:
      self.end()
    return True

  def end(self) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kind(path: str) -> str:
  """A path without what differs between files of one kind."""
  path = re.sub(r"\.[^./]+-\d+-[0-9a-f]{8}\.partial", ".partial", path)
  path = re.sub(r"\d+", "#", re.sub(r"[0-9a-f]{16,}", "#", path))
  # A checkpoint's items are written alike; what is deep in one is only removed.
  path = re.sub(r"(checkpoints/#[^/]+/)[a-z]+(_[a-z]+)?(?=[./])", r"\1*", path)
  return re.sub(r"(checkpoints/#/).*", r"\1**", path)


def _run(task: dict[str, Any]) -> int:
  """Forks a run and waits for it; returns its exit code, -9 when it was killed."""
  child = os.fork()
  if child:
    return _ended(child, task["after_s"])
  code = 1
  try:
    output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    Watch(task).start()
    from tunix.cli import main

    code = main.main(task["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
  finally:
    os._exit(code)


def _ended(child: int, after_s: float | None) -> int:
  """Waits for a child; kills it after `after_s` seconds, if that is not None."""
  end = math.inf if after_s is None else time.monotonic() + after_s
  while time.monotonic() < end:
    pid, status = os.waitpid(child, 0 if after_s is None else os.WNOHANG)
    if pid:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.002)
  os.kill(child, signal.SIGKILL)
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
  # Everything that a run imports, and no device.
  import grain  # noqa: F401
  import orbax.checkpoint  # noqa: F401

  assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
  for line in sys.stdin:
    print(_run(json.loads(line)), flush=True)


if __name__ == "__main__":
  main()
