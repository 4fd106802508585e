"""Runs the command and Python programs in forks of one process.

A start of the command is mostly imports: two seconds of processor time. `Forks` starts
a process that has done them, and a command is a fork of it with the caller's folder,
environment and files. `shim` is a program `tunix` for shells that asks for such a fork.
SIGINT and SIGTERM to the shim go to the fork; when the shim is killed, the fork is
killed too. A fork shares no thread, device or compiled program with other forks.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
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
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_COMMAND = "tunix.cli.main"
_RUNNING: set[int] = set()  # process ids of the servers


class Forks:
  """The process that forks; ended by `close`, or by the end of the caller."""

  def __init__(self) -> None:
    self._folder = tempfile.TemporaryDirectory()
    self.folder = pathlib.Path(self._folder.name)
    self.shim = self.folder / "bin" / "tunix"
    self.shim.parent.mkdir()
    self.shim.write_text(
      f"#!{sys.executable} -SE\n"
      f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
      f"from tests import forks\n"
      f"task = {{'kind': '-m', 'program': {_COMMAND!r}, 'argv': sys.argv[1:]}}\n"
      f"sys.exit(forks.ask({str(self._address)!r}, task))\n"
    )
    self.shim.chmod(0o755)
    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.forks", str(self._address)],
      cwd=ROOT,
      env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads would not be forked
      stdin=subprocess.PIPE,  # its end is the caller's end
      stdout=subprocess.PIPE,
    )
    _RUNNING.add(self._process.pid)
    assert self._process.stdout and self._process.stdout.readline() == b"ready\n"

  @property
  def _address(self) -> pathlib.Path:
    return self.folder / "socket"

  def command(self, task: dict[str, Any]) -> list[str]:
    """Returns the arguments of a process that runs a task in a fork.

    Args:
      task: what `_task` returns.
    """
    program = (
      f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests import forks; "
      f"sys.exit(forks.ask({str(self._address)!r}, {task!r}))"
    )
    return [sys.executable, "-SEc", program]

  def close(self) -> None:
    _RUNNING.discard(self._process.pid)
    self._process.kill()
    self._process.wait()
    self._folder.cleanup()


@functools.cache
def shared() -> Forks:
  """Returns the forks of this process."""
  forks = Forks()
  atexit.register(forks.close)
  return forks


def popen(
  argv: Sequence[str | os.PathLike[str]], /, **options: Any
) -> subprocess.Popen:
  """Starts a Python program in a fork; otherwise as `subprocess.Popen`.

  Signals other than SIGINT, SIGTERM and SIGKILL do not reach the fork.

  Args:
    argv: `sys.executable`, then `-m MODULE`, `-c CODE` or a file, then its arguments.
    **options: those of `subprocess.Popen`.
  """
  return subprocess.Popen(shared().command(_task([*map(str, argv)])), **options)


def run(
  argv: Sequence[str | os.PathLike[str]], /, **options: Any
) -> subprocess.CompletedProcess:
  """Runs a Python program in a fork to its end; otherwise as `subprocess.run`."""
  return subprocess.run(shared().command(_task([*map(str, argv)])), **options)


def spent() -> float:
  """Returns the processor seconds of the servers and of their forks that ended."""
  ticks = 0
  for pid in _RUNNING:
    with contextlib.suppress(OSError):  # a system without /proc
      fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
      ticks += sum(map(int, fields[11:15]))
  return ticks / os.sysconf("SC_CLK_TCK")


def _task(argv: list[str]) -> dict[str, Any]:
  """Returns what a fork is asked for: `kind` of program, `program`, and `argv`."""
  assert argv[0] == sys.executable, argv
  if argv[1] in ("-m", "-c"):
    return {"kind": argv[1], "program": argv[2], "argv": argv[3:]}
  return {"kind": "file", "program": argv[1], "argv": argv[2:]}


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
    self.selector.register(sys.stdin, selectors.EVENT_READ, sys.exit)
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
    ours, theirs = map(_jax_settings, (os.environ, task["environment"]))
    os.environ.clear()
    os.environ.update(task["environment"])
    _configure_jax(ours, theirs)
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
  """Runs the program as `__main__`; returns its status if it does not exit."""
  import runpy

  kind, program, argv = task["kind"], task["program"], task["argv"]
  sys.argv = [program if kind == "file" else kind, *argv]
  if program == _COMMAND:  # imported already: it cannot be imported as `__main__`
    from tunix.cli import main

    sys.argv[0] = "tunix"
    return main.main(argv)
  if kind == "-m":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
  elif kind == "file":
    sys.path.insert(0, str(pathlib.Path(program).absolute().parent))
    runpy.run_path(program, run_name="__main__")
  else:
    sys.path.insert(0, "")
    exec(compile(program, "<page>", "exec"), _main_module())
  return 0


def _main_module() -> dict[str, Any]:
  """Returns the namespace of a fresh `__main__`, so that its classes can be pickled."""
  import types

  module = types.ModuleType("__main__")
  sys.modules["__main__"] = module
  return module.__dict__


def _jax_settings(environment: Any) -> dict[str, str]:
  return {name: x for name, x in environment.items() if name.startswith("JAX_")}


def _configure_jax(ours: dict[str, str], theirs: dict[str, str]) -> None:
  """Gives JAX the variables of the client: it read those of the server at import."""
  import jax

  assert ours.keys() <= theirs.keys(), f"{ours.keys() - theirs.keys()} cannot be unset"
  for name, text in theirs.items() - ours.items():
    name = name.lower()
    value = getattr(jax.config, name)
    kind = str if value is None else type(value)
    is_on = text.lower() in ("1", "true", "on")
    jax.config.update(name, is_on if kind is bool else kind(text))


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
