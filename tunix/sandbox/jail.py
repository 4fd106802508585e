"""Runs commands in a jail: a process that can be killed, with limits.

A command that hangs, floods its output, forks, takes memory or ends itself costs only
its own call: `Jail.run` returns in bounded time, and the result names the reason. The
jail is not a virtual machine; docs/guides/tools.md lists what it protects from.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tunix
from tunix.utils import checks, processes

Finish = Literal["ok", "timeout", "memory", "killed", "output_limit", "error"]
PROTECTIONS = (
  "calls",
  "files",
  "network",
  "outside",
  "processes",
  "signals",
  "user",
)

# The monitor needs up to 5 s to kill processes; the rest is for its start on a machine
# that is busy.
_GRACE_S = 30.0
_SECONDS = checks.Range(0, 86400, beyond=True)
_ROOT = str(pathlib.Path(tunix.__file__).parent.parent)
_MONITOR = (
  f"import sys; sys.path.insert(0, {_ROOT!r}); "
  "from tunix.sandbox import monitor; monitor.main()"
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JailSettings:
  """Limits of each call of a jail.

  Attributes:
    wall_s: seconds from the start of the command.
    cpu_s: processor seconds of each process.
    memory_bytes: address space in bytes of each process, and resident memory of all
      processes together.
    processes: number of processes and threads. Without the protection `user`, the
      monitor counts processes every 50 ms and kills a jail with more.
    file_bytes: size of each file in bytes.
    disk_bytes: size of all files in bytes, with the protection `files`.
    output_bytes: bytes of standard output and standard error together.
    network: whether the command may use the network.
    readable: folders or files that the command may read, in addition to the system's
      programs and Python's packages.
    require: protections without which no command runs, of "calls" (a filter of system
      calls), "files" (a root of its own), "network" (no network), "outside" (files and
      memory outside are neither written nor, except programs, read), "processes" (no
      view of other processes, and none outlives the call), "signals" (none to other
      processes) and "user" (rights of a user that owns nothing).
    workers: number of commands that run at the same time; 0: the number of processors.
  """

  wall_s: float = 10.0
  cpu_s: int = 10
  memory_bytes: int = 1 << 30
  processes: int = 32
  file_bytes: int = 16 << 20
  disk_bytes: int = 64 << 20
  output_bytes: int = 64 << 10
  network: bool = False
  readable: tuple[str, ...] = ()
  require: tuple[str, ...] = ()
  workers: int = 0

  def __post_init__(self):
    checks.fields(
      self,
      wall_s=_SECONDS,
      cpu_s=checks.Range(1, 86400),
      memory_bytes=checks.BYTES,
      processes=checks.Range(1, 1 << 15),
      file_bytes=checks.BYTES,
      disk_bytes=checks.BYTES,
      output_bytes=checks.BYTES,
      workers=checks.Range(0, 1 << 10),
    )
    unknown = sorted({*self.require} - {*PROTECTIONS})
    if unknown:
      raise ValueError(f"require has {unknown}; expected names of {PROTECTIONS}")
    relative = [x for x in self.readable if not os.path.isabs(x)]
    if relative:
      raise ValueError(f"readable has {relative}; expected absolute paths")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JailResult:
  """The end of a command.

  Attributes:
    finish: "ok" (exit code 0), "timeout" (of wall or processor time), "memory",
      "killed" (by a signal, or for too many processes), "output_limit", or "error"
      (another exit code, or the command did not start).
    reason: the finish in words; empty for "ok".
    stdout: standard output, at most the limit.
    stderr: standard error, at most the limit.
    exit_code: exit code; negative: number of the signal; None: stopped by the jail.
    seconds: duration.
    protections: names of the protections that held, see `JailSettings.require`.
  """

  finish: Finish
  reason: str
  stdout: str
  stderr: str
  exit_code: int | None
  seconds: float
  protections: tuple[str, ...]

  def text(self) -> str:
    """Returns the result as a model reads it: output, errors, and a bad finish."""
    parts = [x.rstrip("\n") for x in (self.stdout, self.stderr) if x.strip()]
    if self.finish != "ok":
      parts.append(f"[{self.finish}: {self.reason}]")
    return "\n".join(parts) or "[no output]"


class Jail:
  """Runs commands with the same limits, at most `settings.workers` at a time."""

  def __init__(self, settings: JailSettings | None = None):
    self.settings = settings or JailSettings()
    workers = self.settings.workers or os.cpu_count() or 1
    self._places = threading.BoundedSemaphore(workers)
    self._has_warned = False

  def run(
    self,
    argv: Sequence[str],
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
  ) -> JailResult:
    """Runs a command and waits for its end, at most about `wall_s` seconds.

    The wait for a place among the `workers` is not part of `wall_s`.

    Args:
      argv: absolute path of a program, and its arguments.
      stdin: text of the standard input.
      files: texts of files by path, relative to the working folder.

    Raises:
      ValueError: the program or a file has a wrong path.
      RuntimeError: the system cannot give a protection that `require` names.
    """
    _check(argv, files or {})
    with (
      self._places,
      tempfile.TemporaryDirectory(
        prefix="tunix-jail-", ignore_cleanup_errors=True
      ) as scratch,
    ):
      request = self._request(argv, stdin, files or {}, os.path.realpath(scratch))
      result = _monitored(request, self.settings.wall_s + _GRACE_S)
    self._report_missing(result)
    return result

  def protections(self) -> tuple[str, ...]:
    """Returns the protections that this system gives, from a call of a program."""
    return self.run(["/bin/sh", "-c", ":"]).protections

  def _request(
    self, argv: Sequence[str], stdin: str, files: Mapping[str, str], scratch: str
  ) -> dict[str, Any]:
    request = dataclasses.asdict(self.settings)
    request["python"] = _python_folders()
    request |= {"argv": [*argv], "stdin": stdin, "files": dict(files)}
    return request | {"scratch": scratch, "environment": _environment()}

  def _report_missing(self, result: JailResult) -> None:
    """Logs the protections that this system does not give, once."""
    required = {*PROTECTIONS} - ({"network"} if self.settings.network else set())
    missing = sorted(required - {*result.protections})
    if missing and not self._has_warned:
      self._has_warned = True
      also = " A command can end processes of this user." * ("signals" in missing)
      _log.warning(
        "the jail runs without the protections %s, which this system does not give.%s "
        "docs/guides/tools.md has what a command can then do, and `require` refuses it",
        ", ".join(missing),
        also,
      )


def _monitored(request: Mapping[str, Any], limit_s: float) -> JailResult:
  """Runs a request in a new monitor process.

  Raises:
    RuntimeError: a required protection is missing.
  """
  process = subprocess.Popen(
    [sys.executable, "-I", "-S", "-c", _MONITOR],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,  # a process group, which is killed as a whole
    env=_libraries(),
  )
  answer = errors = b""
  try:
    text = json.dumps(request).encode()
    answer, errors = process.communicate(text, timeout=limit_s)
  except subprocess.TimeoutExpired:
    errors = b"it did not answer"
  finally:
    code = processes.kill_group(process)
    for pipe in (process.stdin, process.stdout, process.stderr):
      if pipe is not None:
        pipe.close()
  try:
    facts: dict[str, Any] = json.loads(answer)
  except ValueError:
    message = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
    facts = _ended(f"the monitor of the jail ended with exit code {code}: {message}")
  refused = facts.pop("refused")
  if refused:
    raise RuntimeError(
      f"require has {refused}, which this system does not give to a jail. Allow user "
      "namespaces or run as root, or remove the names; see docs/guides/tools.md"
    )
  facts["protections"] = tuple(facts["protections"])
  return JailResult(**facts)


def _ended(reason: str) -> dict[str, Any]:
  """Returns the fields of a result without an answer of the monitor."""
  fields = {"finish": "killed", "reason": reason, "stdout": "", "stderr": ""}
  return fields | {"exit_code": None, "seconds": 0.0, "protections": [], "refused": []}


def _check(argv: Sequence[str], files: Mapping[str, str]) -> None:
  if not argv or not os.path.isabs(argv[0]):
    raise ValueError(f"argv is {list(argv)}; expected an absolute path of a program")
  if any("\0" in x for x in argv):
    raise ValueError("argv has a zero character; the system cannot pass it")
  for name in files:
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
      raise ValueError(f"files has {name!r}; expected a path below the working folder")


def _python_folders() -> list[str]:
  """Returns the folders of this Python and of the links that lead to it."""
  folders, path = [sys.prefix, sys.base_prefix], sys.executable
  for _ in range(8):  # a chain of links is short; a circle has no end
    folders.append(os.path.dirname(os.path.dirname(path)))
    if not os.path.islink(path):
      break
    path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
  folders.append(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
  return [x for x in dict.fromkeys(folders) if x != "/"]


def _libraries() -> dict[str, str]:
  """Returns the variables that some installations of Python need to start."""
  names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
  return {name: os.environ[name] for name in names if name in os.environ}


def _environment() -> dict[str, str]:
  """Returns the variables of a command: none of the trainer's, which may be secret."""
  one_thread = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")
  return {
    **_libraries(),
    **{f"{x}_NUM_THREADS": "1" for x in one_thread},
    "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    # Equal code prints equal text, also where it prints a set.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The trainer holds the accelerators.
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
  }
