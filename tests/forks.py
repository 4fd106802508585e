"""Runs the command and Python programs in forks of one process.

A start of the command is mostly imports: two seconds of processor time. `Forks` starts
a process that has done them, and a command is a fork of it with the caller's folder,
environment and files. `shim` is a program `tunix` for shells that asks for such a fork.
A signal to the shim goes to the fork; when the shim is killed, the fork is killed too.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


class Forks:
  """The process that forks; ended by `close`.

  Args:
    environment: its variables. JAX reads its own at import: a fork whose caller has
      other JAX_ variables starts the interpreter anew.
  """

  def __init__(self, environment: dict[str, str]) -> None:
    self._folder = tempfile.TemporaryDirectory()
    self.folder = pathlib.Path(self._folder.name)
    self.shim = self.folder / "bin" / "tunix"
    self.shim.parent.mkdir()
    self.shim.write_text(
      f"#!{sys.executable} -SE\n"
      f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
      f"from tests import forks\n"
      f"sys.exit(forks.ask({str(self._address)!r}, {{'argv': sys.argv[1:]}}))\n"
    )
    self.shim.chmod(0o755)
    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.forks", str(self._address)],
      cwd=ROOT,
      env=environment
      | {"OPENBLAS_NUM_THREADS": "1"},  # its threads would not be forked
      stdout=subprocess.PIPE,
    )
    assert self._process.stdout and self._process.stdout.readline() == b"ready\n"

  @property
  def _address(self) -> pathlib.Path:
    return self.folder / "socket"

  def run(
    self,
    task: dict[str, Any],
    cwd: pathlib.Path,
    environment: dict[str, str],
    timeout: float = 600.0,
  ) -> subprocess.CompletedProcess:
    """Runs a task in a fork; see `_Server`.

    Args:
      task: {"argv": arguments of the command} or {"code": Python source}.
      cwd: the working folder.
      environment: all variables.
      timeout: seconds after which the fork is killed.

    Returns: exit status, standard output and error.
    """
    program = (
      f"from tests import forks; import sys; "
      f"sys.exit(forks.ask({str(self._address)!r}, {task!r}))"
    )
    return subprocess.run(
      [
        sys.executable,
        "-SEc",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}",
      ],
      cwd=cwd,
      env=environment,
      capture_output=True,
      text=True,
      timeout=timeout,
      check=False,
    )

  def close(self) -> None:
    self._process.kill()
    self._process.wait()
    self._folder.cleanup()


@contextlib.contextmanager
def started(environment: dict[str, str]) -> Iterator[Forks]:
  """Yields a new `Forks`, which ends with the block."""
  forks = Forks(environment)
  try:
    yield forks
  finally:
    forks.close()


def ask(address: str, task: dict[str, Any]) -> int:
  """Runs a task in a fork with the files 0 to 2 of this process; returns its status."""
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    task = {**task, "cwd": os.getcwd(), "environment": dict(os.environ)}
    data = json.dumps(task).encode()
    fds = array.array("i", [0, 1, 2])
    connection.sendmsg(
      [len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
    )
    connection.sendall(data)
    for signum in _FORWARDED:
      signal.signal(signum, lambda number, _: connection.sendall(bytes([number])))
    answer = connection.recv(4)
  code = int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL
  return code if code >= 0 else 128 - code


class _Server:
  """Forks for each connection, forwards signals, and answers with the exit status."""

  def __init__(self, address: str) -> None:
    self.listener = socket.socket(socket.AF_UNIX)
    self.listener.bind(address)
    self.listener.listen()
    self.running: dict[int, socket.socket] = {}  # by process id
    self.selector = selectors.DefaultSelector()
    self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
    woken, self.waker = socket.socketpair()
    for end in (woken, self.waker):
      end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
    self.selector.register(woken, selectors.EVENT_READ, lambda: self.reap(woken))

  def loop(self) -> None:
    while True:
      for key, _ in self.selector.select():
        key.data()

  def accept(self) -> None:
    connection, _ = self.listener.accept()
    size, rights, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12))
    fds = array.array("i", rights[0][2])
    length, data = int.from_bytes(size, "big"), b""
    while len(data) < length:
      data += connection.recv(length - len(data))
    child = os.fork()
    if not child:
      _become(json.loads(data), fds)
    for fd in fds:
      os.close(fd)
    self.running[child] = connection
    self.selector.register(
      connection, selectors.EVENT_READ, lambda: self.forward(child, connection)
    )

  def forward(self, child: int, connection: socket.socket) -> None:
    numbers = connection.recv(16)
    if not numbers:  # the client is gone
      self.selector.unregister(connection)
    with contextlib.suppress(ProcessLookupError):
      for number in numbers or [signal.SIGKILL]:
        os.kill(child, number)

  def reap(self, woken: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
      woken.recv(4096)
    while self.running:
      child, status = os.waitpid(-1, os.WNOHANG)
      if not child:
        return
      connection = self.running.pop(child)
      with contextlib.suppress(KeyError):  # the client is gone
        self.selector.unregister(connection)
      code = os.waitstatus_to_exitcode(status)
      with contextlib.suppress(OSError):
        connection.sendall(code.to_bytes(4, "big", signed=True))
      connection.close()


def _become(task: dict[str, Any], fds: Sequence[int]) -> None:
  """Turns this fork into the process that the client asked for; does not return."""
  code = 1
  try:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, *_FORWARDED):
      signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, fd in enumerate(fds):
      os.dup2(fd, target)
    os.closerange(3, 1024)
    os.chdir(task["cwd"])
    read_at_import = _jax_settings(os.environ) == _jax_settings(task["environment"])
    os.environ.clear()
    os.environ.update(task["environment"])
    if not read_at_import:
      _replace(task)
    code = _run(task)
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error.code, str):
      print(error.code, file=sys.stderr)
  except BaseException:  # as the interpreter: printed, and the status is 1
    import traceback

    traceback.print_exc()
  finally:
    _leave(code)


def _leave(code: int) -> None:
  """Ends the process as the interpreter does: exit functions, then the files."""
  import atexit
  import threading

  with contextlib.suppress(BaseException):
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
  for file in (sys.stdout, sys.stderr):
    with contextlib.suppress(BaseException):
      file.flush()
  os._exit(code & 0xFF)


def _run(task: dict[str, Any]) -> int:
  argv = task.get("argv", [])
  if "code" in task:
    sys.argv, sys.path[0:0] = ["-c"], [""]
    exec(compile(task["code"], "<page>", "exec"), _main_module())
    return 0
  from tunix.cli import main

  sys.argv = ["tunix", *argv]
  return main.main(argv)


def _main_module() -> dict[str, Any]:
  """Returns the namespace of a fresh `__main__`, so that its classes can be pickled."""
  import types

  module = types.ModuleType("__main__")
  sys.modules["__main__"] = module
  return module.__dict__


def _replace(task: dict[str, Any]) -> None:
  """Starts the interpreter anew: JAX reads its variables at import."""
  argv = task.get("argv", [])
  if "code" in task:
    words = ["-c", task["code"]]
  else:
    words = ["-m", "tunix.cli.main", *argv]
  os.execv(sys.executable, [sys.executable, *words])


def _jax_settings(environment: Any) -> dict[str, str]:
  return {name: x for name, x in environment.items() if name.startswith("JAX_")}


def main() -> None:
  # What most commands import, and no device.
  import grain  # noqa: F401
  import orbax.checkpoint  # noqa: F401
  import tokenizers  # noqa: F401

  import tunix.cli.commands.eval.main
  import tunix.cli.commands.generate
  import tunix.cli.commands.plan
  import tunix.cli.commands.train
  import tunix.rl.rl_learner  # noqa: F401
  from tunix.cli.main import GC_THRESHOLD

  gc.set_threshold(*GC_THRESHOLD)  # as in a process of the command
  assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
  server = _Server(sys.argv[1])
  print("ready", flush=True)
  server.loop()


if __name__ == "__main__":
  main()
