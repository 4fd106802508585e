"""The setup of a jail, from outside to inside: namespaces, root, user, limits.

Each protection that the kernel refuses is left out, and the report of `enter` names
those that hold. `JailResult.protections` has the list.

Entry and init stay when the command runs. The command can neither read nor change them:
they are not dumpable, which closes their memory and descriptors in /proc to all but
root with its rights, and they belong to root if the monitor does. The report ends
before the command begins. Only init keeps a descriptor, for the exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tunix.sandbox import landlock, syscalls

_TEMPORARY = "/tmp"  # the only folder for writing, in a root of its own
WORK = "/tmp/work"  # the folder of the command
# Users of these ids own nothing. The first has one id for each process; a container may
# have no ids as high as these. Of the others, systemd keeps the range for services.
_FIRST_UID = 1 << 30
_FIRST_LOW_UID, _LOW_UIDS = 61184, 4336
# Shown in the jail, read-only, as far as they exist.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_OPEN_FILES = 256


def enter(
  request: dict[str, Any], stdout: int, stderr: int, report: int, status: int
) -> NoReturn:
  """Becomes the entry process of a jail: runs the command of a request, and exits.

  Args:
    request: the request, see `monitor.run`.
    stdout, stderr: descriptors of the command's output.
    report: descriptor that receives lines of JSON, and is closed when the command
      begins.
    status: descriptor that receives the command's exit code as text.
  """
  cell = _Cell(request, stdout, stderr, report, status)
  cell.guarded(cell.entry)


class _Cell:
  """One jail, as seen by the processes that set it up.

  Attributes:
    protections: names of the protections that hold.
  """

  def __init__(
    self, request: dict[str, Any], stdout: int, stderr: int, report: int, status: int
  ):
    self.protections: set[str] = set()
    self._request, self._outputs = request, (stdout, stderr)
    self._report, self._status = report, status
    self._uid = _free_uid()
    self._has_namespaces = False
    # Processes besides the command's that the system counts with it; None: any number.
    self._counted_too: int | None = None

  def guarded(self, run: Callable[[], int]) -> NoReturn:
    """Runs a part of the setup in this process, reports its error, and exits."""
    code = 127
    try:
      code = run()
    except Exception as error:  # the monitor receives any error as text
      self.tell(error=f"the jail cannot be set up: {type(error).__name__}: {error}")
    finally:
      os._exit(code)

  def tell(self, **facts: object) -> None:
    """Sends facts to the monitor."""
    os.write(self._report, json.dumps(facts).encode() + b"\n")

  def entry(self) -> int:
    """Moves into new namespaces and waits for init."""
    os.setpgid(0, 0)  # a group of its own, which the monitor kills as a whole
    with contextlib.suppress(PermissionError):
      os.setpriority(os.PRIO_PROCESS, 0, 0)
    if sys.platform == "linux":
      self._separate()
      syscalls.prctl(syscalls.DIE_WITH_PARENT, 9)  # a change of the user clears it
    init = self._child(self.init)
    self._withdraw()
    os.waitpid(init, 0)
    return 0

  def init(self) -> int:
    """Sets up the root, starts the command, and waits for processes to end."""
    work = self._request["scratch"]
    if self._has_namespaces and _holds(lambda: _new_root(self._request, self._uid)):
      self.protections |= {"files"}
      work = WORK
    if sys.platform == "linux":
      syscalls.prctl(syscalls.DIE_WITH_PARENT, 9)
    command = self._child(lambda: self._command(work))
    self._withdraw(keep=self._status)
    while True:
      pid, status = os.wait()
      if pid == command:
        os.write(self._status, str(os.waitstatus_to_exitcode(status)).encode())
        return 0

  def _child(self, run: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
      self.guarded(run)
    return pid

  def _withdraw(self, keep: int = -1) -> None:
    """Gives up what this process needs no more, before strange code runs beside it."""
    os.closerange(0, keep)
    os.closerange(keep + 1, 1 << 16)
    self._limit()
    if sys.platform == "linux":
      _holds(lambda: syscalls.filter_calls(network=False))
      _holds(syscalls.drop_rights)

  def _separate(self) -> None:
    flags = syscalls.NEW_PIDS | syscalls.NEW_IPC | syscalls.NEW_NAMES
    flags |= 0 if self._request["network"] else syscalls.NEW_NETWORK
    # Root needs no user namespace, which some systems refuse. Others refuse all but
    # user namespaces.
    self._has_namespaces = os.geteuid() == 0 and _holds(lambda: syscalls.unshare(flags))
    flags |= syscalls.NEW_USERS
    if not self._has_namespaces and self._can_unshare(flags):
      self._become_stranger(self._request["scratch"])
      ids = {"uid": os.getuid(), "gid": os.getgid()}  # they have no name afterwards
      syscalls.unshare(flags)
      self._map_user(ids)
      self._has_namespaces = True
    if self._has_namespaces:
      self.protections |= {"processes", "signals"}
      self.protections |= set() if self._request["network"] else {"network"}

  def _can_unshare(self, flags: int) -> bool:
    """Tries it in a process that ends: root stays root where it cannot be done."""

    def attempt() -> int:
      self._become_stranger(self._request["scratch"])
      return 0 if _holds(lambda: syscalls.unshare(flags)) else 1

    return os.waitpid(self._child(attempt), 0)[1] == 0

  def _map_user(self, ids: dict[str, int]) -> None:
    """Gives this user an id other than 0 inside, which has no rights after exec."""
    # Otherwise /proc/self belongs to root. The processes of other jails, which have
    # namespaces too, do not see this one.
    syscalls.prctl(syscalls.DUMPABLE, 1)
    _write("/proc/self/setgroups", "deny")
    for kind, outer in ids.items():
      _write(f"/proc/self/{kind}_map", f"{self._uid} {outer} 1")
    syscalls.prctl(syscalls.DUMPABLE, 0)
    self.protections |= {"user"}
    if ids["uid"] != 0 and _counts_by_namespace():
      self._counted_too = 2  # entry and init

  def _become_stranger(self, work: str) -> None:
    """Changes from root to a user that owns nothing, if that user can run Python."""
    if os.geteuid() != 0 or "user" in self.protections:
      return
    needed = [self._request["argv"][0], *self._request["python"]]
    try:
      if work == self._request["scratch"]:
        os.chown(work, self._uid, self._uid)
      os.setgroups([])
      os.setresgid(self._uid, self._uid, self._uid)
      os.seteuid(self._uid)
      can_run = all(os.access(x, os.X_OK, effective_ids=True) for x in needed)
      os.seteuid(0)
      if not can_run:
        os.chown(work, 0, -1)
        return
      os.setresuid(self._uid, self._uid, self._uid)
    except OSError:  # a container may keep its root from changing users
      return
    self.protections |= {"user", "signals"}
    self._counted_too = 0

  def _command(self, work: str) -> int:
    """Becomes the command."""
    request = self._request
    self._become_stranger(work)
    os.makedirs(work, exist_ok=True)
    os.chdir(work)
    for name, text in request["files"].items():
      os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
      with open(name, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    os.dup2(_input(request["stdin"]), 0)
    for target, output in enumerate(self._outputs, start=1):
      os.dup2(output, target)
    self._limit()
    if sys.platform == "linux":
      self._limit_processes()
      self._confine(work)
    self.tell(protections=sorted(self.protections))
    refused = sorted({*request["require"]} - self.protections)
    if refused:
      self.tell(refused=refused)
      return 127
    environment = {**request["environment"], "HOME": work, "TMPDIR": work}
    try:
      os.execve(request["argv"][0], request["argv"], environment)
    except OSError as error:
      self.tell(error=f"{request['argv'][0]} cannot be started: {error.strerror}")
    return 127

  def _confine(self, work: str) -> None:
    """Restricts this process for ever to its files and to harmless system calls."""
    request = self._request
    readable, writable = ["/"], [_TEMPORARY]
    if "files" not in self.protections:
      readable = [*_shown(request), "/proc", *(f"/dev/{x}" for x in _DEVICES)]
      writable = [work]
    writable += ["/dev/null", "/dev/zero", "/dev/full"]
    try:
      has_signals = landlock.restrict(readable, writable)
    except OSError:
      has_signals = False
      if {"files", "processes"} <= self.protections:
        self.protections |= {"outside"}
    else:
      self.protections |= {"outside"}
    self.protections |= {"signals"} if has_signals else set()
    if _holds(lambda: syscalls.filter_calls(request["network"])):
      self.protections |= {"calls"}
      self.protections |= set() if request["network"] else {"network"}
    syscalls.prctl(syscalls.NO_NEW_PRIVILEGES, 1)
    syscalls.drop_rights()

  def _limit_processes(self) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = self._request["processes"]
    if self._counted_too is not None:
      limit += self._counted_too
    else:
      limit += _tasks_of_user()
      os.nice(10)  # root's processes have no limit, and must not delay the monitor
      resource.setrlimit(resource.RLIMIT_NPROC, (limit, most))
      try:
        os.waitpid(self._child(lambda: 0), 0)
      except BlockingIOError:
        # Processes of other containers, which /proc does not show, count as well. The
        # monitor remains, which counts the processes of the jail.
        limit = most
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))

  def _limit(self) -> None:
    request = self._request
    limits = {
      resource.RLIMIT_AS: request["memory_bytes"],
      resource.RLIMIT_CPU: request["cpu_s"],
      resource.RLIMIT_FSIZE: request["file_bytes"],
      resource.RLIMIT_CORE: 0,
      resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    for kind, limit in limits.items():
      _, most = resource.getrlimit(kind)
      # The soft limit sends SIGXCPU, which names the cause; the hard one sends SIGKILL.
      hard = limit + 1 if kind == resource.RLIMIT_CPU else limit
      if most != resource.RLIM_INFINITY:
        limit, hard = min(limit, most), min(hard, most)
      resource.setrlimit(kind, (limit, hard))


def _free_uid() -> int:
  """Returns an id for the user of this jail, which no other process has."""
  own = _FIRST_UID + os.getpid()
  with contextlib.suppress(OSError), open("/proc/self/uid_map") as file:
    for line in file:
      first, _, count = map(int, line.split())
      if first <= own < first + count:
        return own
  return _FIRST_LOW_UID + os.getpid() % _LOW_UIDS


def _shown(request: dict[str, Any]) -> list[str]:
  """Returns the paths of the system that the command may read."""
  etc = (f"/etc/{x}" for x in _ETC)
  return [*_SYSTEM, *etc, *request["python"], *request["readable"]]


def _tasks_of_user() -> int:
  """Returns the number of threads of all processes of this user that /proc shows."""
  count, own = 0, str(os.getuid())
  for name in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{name}/status") as file:
      # The folder itself belongs to root if the process is not dumpable.
      facts = dict(line.split(":", 1) for line in file)
      if facts["Uid"].split()[0] == own:
        count += int(facts["Threads"])
  return count


def _holds(step: Callable[[], None]) -> bool:
  """Returns False if the kernel refuses a step."""
  try:
    step()
  except (OSError, AttributeError):  # a C library without the function
    return False
  return True


def _counts_by_namespace() -> bool:
  """Returns whether processes are counted for each user namespace (Linux 5.14).

  Older kernels count all processes of the user, the trainer's threads among them.
  """
  version = platform.release().split(".")
  with contextlib.suppress(ValueError, IndexError):
    return (int(version[0]), int(version[1])) >= (5, 14)
  return False


def _input(text: str) -> int:
  """Returns a descriptor that reads a text, from a file without a name."""
  name = ".stdin"
  descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
  os.unlink(name)
  with open(os.dup(descriptor), "wb") as file:
    file.write(text.encode("utf-8", "replace"))
  os.lseek(descriptor, 0, os.SEEK_SET)
  return descriptor


def _write(path: str, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)


def _new_root(request: dict[str, Any], uid: int) -> None:
  """Changes to a root that shows only programs, read-only, and an empty folder."""
  root, disk = request["scratch"], request["disk_bytes"]
  inside = syscalls.NO_SUID | syscalls.NO_DEVICES
  syscalls.unshare(syscalls.NEW_MOUNTS)
  syscalls.mount("", "/", "", syscalls.RECURSIVE | syscalls.PRIVATE)
  syscalls.mount("tmpfs", root, "tmpfs", inside, "size=1m,mode=755")
  os.mkdir(root + _TEMPORARY)
  data = f"size={disk},mode=1777"
  syscalls.mount("tmpfs", root + _TEMPORARY, "tmpfs", inside, data)
  for path in _shown(request):
    _show(path, root)
  for name in _DEVICES:
    _bind_device(f"/dev/{name}", root)
  os.symlink(_TEMPORARY, f"{root}/dev/shm")
  _write(f"{root}/etc/passwd", f"user:x:{uid}:{uid}::{WORK}:/bin/sh\n")
  os.makedirs(f"{root}/proc")
  # Containers that hide parts of /proc refuse a new one; most commands need none.
  no_exec = inside | syscalls.NO_EXEC
  _holds(lambda: syscalls.mount("proc", f"{root}/proc", "proc", no_exec))
  syscalls.change_root(root)
  flags = syscalls.REMOUNT | syscalls.BIND | syscalls.READ_ONLY | inside
  syscalls.mount("", "/", "", flags)


def _show(path: str, root: str) -> None:
  """Shows a path of the system below a new root."""
  target = root + path
  if os.path.lexists(target) or not os.path.exists(path):
    return
  os.makedirs(os.path.dirname(target), exist_ok=True)
  if os.path.islink(path) and not os.path.isabs(os.readlink(path)):
    os.symlink(os.readlink(path), target)
    return
  if os.path.isdir(path):
    os.mkdir(target)
  else:
    _write(target, "")
  syscalls.bind_read_only(path, target)


def _bind_device(path: str, root: str) -> None:
  os.makedirs(f"{root}/dev", exist_ok=True)
  _write(root + path, "")
  syscalls.mount(path, root + path, "", syscalls.BIND)
