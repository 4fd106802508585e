"""Programs that try to leave a jail, and what stops each of them.

`python hostile.py SITUATION` is a trainer: it makes what there is to reach, takes from
itself what the situation lacks, runs all programs in one call of a jail, and prints
which of them reached their goal. The jail sees the same system calls fail as it would
in such a container. docs/guides/tools.md has the table.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import platform
import socket
import struct
import subprocess
import sys
import tempfile
from typing import Any

# What a system may not give, by the system calls that fail (x86_64, aarch64).
_CALLS = {
  "namespaces": ((272, 97), (165, 40), (155, 41)),  # unshare, mount, pivot_root
  "landlock": ((444, 444), (445, 445), (446, 446)),
  "filters": ((317, 277),),  # seccomp; and prctl with PR_SET_SECCOMP
}
_PRCTL, _SET_SECCOMP = (157, 167), 22
_USER = 54321  # an ordinary user


@dataclasses.dataclass(frozen=True)
class Hostile:
  """A program that tries one thing.

  Attributes:
    does: what it tries, in the words of the table.
    code: body of a function that returns whether it reached its goal; an exception
      means no. `TOOLS` and the names of the trainer's things are in scope.
    stopped: names of protections; any one of them stops it. NEVER: it fails in every
      jail. Names with a space are facts of the system.
  """

  does: str
  code: str
  stopped: tuple[str, ...]

  def reaches(self, protections: set[str]) -> bool:
    """Returns whether it reaches its goal in a jail with these protections."""
    return self.stopped != NEVER and not protections & {*self.stopped}


NEVER = ("nothing",)
# A command never has root's rights; a process that has them is closed to it.
_FOREIGN = ("outside", "processes", "user", "a trainer that is root")
_FILES = ("files", "outside", "user")
PROGRAMS = [
  Hostile(*fields)
  for fields in (
    # What the jail consists of. `stays` has init, entry and monitor as far as visible.
    (
      "write the memory of the jail's own processes",
      "return any_of(mem, 'r+b')",
      NEVER,
    ),
    ("read their memory", "return any_of(mem, 'rb')", NEVER),
    ("read their variables", "return any_of(environ)", NEVER),
    ("list their descriptors", "return any_of(descriptors)", NEVER),
    ("trace them", "return any_of(trace)", NEVER),
    ("call process_vm_readv on them", "return any_of(vm_read)", NEVER),
    ("take their descriptors", "return any_of(take)", NEVER),
    ("use a descriptor that the jail left", "return leftovers()", NEVER),
    ("stop them", "return any_of(stop)", ("processes", "signals")),
    # Processes of the trainer's user.
    ("read the trainer's variables", "return environ(trainer)", _FOREIGN),
    ("read its memory", "return mem(trainer, 'rb')", _FOREIGN),
    ("write its memory", "return mem(trainer, 'r+b')", _FOREIGN),
    ("list its descriptors", "return descriptors(trainer)", _FOREIGN),
    ("write into its pipes", "return pipes(trainer)", _FOREIGN),
    ("trace it", "return trace(victim)", ("calls", *_FOREIGN)),
    ("call process_vm_readv on it", "return vm_read(trainer)", ("calls", *_FOREIGN)),
    ("take its descriptors", "return take(trainer)", _FOREIGN),
    ("stop it", "return stop(victim)", ("processes", "signals")),
    ("slow it down", "return slow(victim)", _FOREIGN[1:]),
    ("lower its limits", "return lower(victim)", _FOREIGN[1:]),
    # Files.
    ("read the user's files", "return opens('secret')", _FILES),
    ("write the user's files", "return opens('target', 'a')", _FILES),
    ("change their modes", "return mode('target')", ("files", "user")),
    ("read files that all may read", "return opens('public')", ("files", "outside")),
    ("write where all may write", "return opens('open/x', 'w')", ("files", "outside")),
    ("see names of files", "return os.stat(f'{folder}/public')", ("files",)),
    (
      "write the kernel's settings",
      "return setting()",
      ("outside", "user", "a trainer that is not root"),
    ),
    ("see other processes", "return os.stat(f'/proc/{trainer}')", ("processes",)),
    ("fill the disk", "return fill()", ("files",)),
    ("make a device", "return os.mknod('d', 0o20600, 0x103) is None", NEVER),
    # Network, kernel.
    ("connect to a port", "return connect(('127.0.0.1', port))", ("network",)),
    (
      "connect to a socket of Unix",
      "return connect(f'{folder}/s')",
      ("network", "files", "user"),
    ),
    (
      "make a namespace",
      "return libc.unshare(0x10000000) == 0",
      ("calls", "a system without namespaces"),
    ),
    ("mount", "return libc.mount(b'a', b'/mnt', b'tmpfs', 0, 0) == 0", NEVER),
    ("enter init's namespaces", "return enter()", NEVER),
    ("become root", "return os.setuid(0) is None and root()", NEVER),
    ("change the root", "return os.chroot('.') is None", NEVER),
    ("hold memory without a limit", "return os.memfd_create('x') > 0", ("calls",)),
    ("open io_uring", "return call(425, 4, bytes(120)) > 0", ("calls",)),
    ("keep a process for later", "return daemon()", NEVER),
  )
]

TOOLS = """
import ctypes, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
  values = [x if isinstance(x, bytes) else ctypes.c_long(x) for x in arguments]
  return libc.syscall(*values)

def parent_of(pid):
  return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

# The jail's own processes are the ancestors up to the trainer.
stays, pid = [], os.getppid()
while pid not in (0, trainer):
  stays.append(pid)
  try:
    pid = parent_of(pid)
  except OSError:
    break

def any_of(attempt, *arguments):
  done = []
  for pid in stays:
    try:
      done.append(attempt(pid, *arguments))
    except OSError:
      done.append(False)
  return any(done)

def mem(pid, mode):
  return open(f"/proc/{pid}/mem", mode)

def environ(pid):
  return open(f"/proc/{pid}/environ", "rb").read()

def descriptors(pid):
  return [os.readlink(f"/proc/{pid}/fd/{x}") for x in os.listdir(f"/proc/{pid}/fd")]

def pipes(pid):
  for name in os.listdir(f"/proc/{pid}/fd"):
    path = f"/proc/{pid}/fd/{name}"
    try:
      if os.readlink(path).startswith("pipe:") and os.open(path, os.O_WRONLY) > 0:
        return True
    except PermissionError:
      continue

def trace(pid):
  attached = libc.ptrace(0x4206, pid, 0, 0) == 0  # PTRACE_SEIZE
  if attached:
    libc.ptrace(17, pid, 0, 0)
  return attached

def vm_read(pid):
  # A bad address is looked at only when the access was allowed.
  local, remote = ctypes.create_string_buffer(8), struct.pack("PL", 8, 8)
  vector = struct.pack("PL", ctypes.addressof(local), 8)
  libc.process_vm_readv(pid, vector, 1, remote, 1, 0)
  return ctypes.get_errno() == 14

def take(pid):
  return call(438, os.pidfd_open(pid), 0, 0) >= 0

def leftovers():
  for fd in range(3, 256):
    try:
      os.write(fd, b'{"protections": ["all"]}\\n')
    except OSError as error:
      if error.errno != 9 and fd > 9:
        return True
    else:
      return True

def stop(pid):
  os.kill(pid, signal.SIGSTOP)
  time.sleep(0.02)
  state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
  os.kill(pid, signal.SIGCONT)
  return state == "T"

def slow(pid):
  os.setpriority(os.PRIO_PROCESS, pid, 19)
  return True

def lower(pid):
  resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
  return True

def opens(name, mode="r"):
  return open(f"{folder}/{name}", mode)

def mode(name):
  os.chmod(f"{folder}/{name}", 0o640)
  return True

def setting():
  return os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY) > 0

def fill():
  for number in range(8):
    open(f"full{number}", "wb").write(bytes(1 << 20))
  return True

def connect(address):
  kind = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
  socket.socket(kind).connect(address)
  return True

def enter():
  return libc.setns(os.open(f"/proc/{os.getppid()}/ns/mnt", os.O_RDONLY), 0) == 0

def root():
  return "CapEff:\\t0000000000000000" not in open("/proc/self/status").read()

def daemon():
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      for fd in range(3):
        os.close(fd)
      os.execv("/bin/sleep", ["sleep", mark])
    os._exit(0)
  return False  # the trainer looks for it
"""


def _program(facts: dict[str, Any]) -> str:
  """Returns one program that tries everything, each in a process of its own."""
  lines = [f"{name} = {value!r}" for name, value in facts.items()]
  for number, program in enumerate(PROGRAMS):
    body = program.code.replace("\n", "\n  ")
    lines.append(f"def try{number}():\n  {body}")
  lines.append(
    f"""
for number in range({len(PROGRAMS)}):
  pid = os.fork()
  if pid == 0:
    try:
      code = 1 if globals()[f"try{{number}}"]() else 0
    except (OSError, AttributeError, ValueError):
      code = 0
    os._exit(code)
  status = os.waitpid(pid, 0)[1]
  if status:
    print(number, status >> 8 or -status, flush=True)
os._exit(7)
"""
  )
  return "\n".join([lines[0], *lines[1 : len(facts)], TOOLS, *lines[len(facts) :]])


def _refuse(missing: list[str]) -> None:
  """Makes system calls fail with EPERM in this process and its children."""
  column, architecture = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}[
    platform.machine()
  ]
  op = lambda code, value, yes=0, no=0: struct.pack("HBBI", code, yes, no, value)
  refused, allowed = op(0x06, 0x00050001), op(0x06, 0x7FFF0000)
  code = [op(0x20, 4), op(0x15, architecture, 1, 0), allowed, op(0x20, 0)]
  for name in missing:
    for numbers in _CALLS[name]:
      code += [op(0x15, numbers[column], 0, 1), refused]
  if "filters" in missing:
    code += [op(0x15, _PRCTL[column], 0, 3), op(0x20, 16)]
    code += [op(0x15, _SET_SECCOMP, 0, 1), refused]
  code.append(allowed)
  libc, data = ctypes.CDLL(None, use_errno=True), b"".join(code)
  buffer = ctypes.create_string_buffer(data, len(data))
  header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
  assert libc.prctl(38, 1, 0, 0, 0) == 0
  assert libc.prctl(22, ctypes.c_ulong(2), header, 0, 0) == 0, ctypes.get_errno()


def _things(folder: pathlib.Path) -> None:
  """Makes files in a folder that others may enter."""
  folder.chmod(0o755)
  for name, mode in (("secret", 0o600), ("target", 0o600), ("public", 0o644)):
    (folder / name).write_text("x")
    (folder / name).chmod(mode)
  (folder / "open").mkdir()
  (folder / "open").chmod(0o777)


def main(user: str, missing: list[str]) -> dict[str, Any]:
  """Runs all programs and returns what they reached.

  Args:
    user: "root" or "user".
    missing: names of `_CALLS` that fail; "others": no other user can run Python.
  """
  if user == "user":
    os.setgroups([])
    os.setresgid(_USER, _USER, _USER)
    os.setresuid(_USER, _USER, _USER)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after exec: dumpable
  if calls := [x for x in missing if x != "others"]:
    _refuse(calls)
  from tunix.sandbox.jail import Jail, JailSettings

  mark, python = f"89.{os.getpid()}", sys.executable
  with tempfile.TemporaryDirectory(dir="/tmp") as name:
    folder = pathlib.Path(name)
    _things(folder)
    if "others" in missing:
      (folder / "own").mkdir(mode=0o700)
      python = str(folder / "own" / "python")
      os.symlink(os.path.realpath(sys.executable), python)
    jail = Jail(
      JailSettings(
        wall_s=30,
        disk_bytes=4 << 20,
        file_bytes=2 << 20,
        readable=(f"{folder}/own",) if "others" in missing else (),
      )
    )
    victim = subprocess.Popen(["/bin/sleep", "60"])
    with (
      socket.create_server(("127.0.0.1", 0)) as server,
      socket.socket(socket.AF_UNIX) as local,
    ):
      local.bind(f"{folder}/s")
      local.listen()
      facts = {
        "victim": victim.pid,
        "trainer": os.getpid(),
        "folder": name,
        "port": server.getsockname()[1],
        "mark": mark,
      }
      before = jail.run([python, "-c", ""])
      argv = [python, "-s", "-P", "main.py"]
      result = jail.run(argv, files={"main.py": _program(facts)})
      if "signals" in before.protections and "others" not in missing:
        jail.run([python, "-c", "import os; os.kill(-1, 9); os.kill(os.getppid(), 9)"])
    is_alive = victim.poll() is None
    victim.kill()
  reached = [line.split() for line in result.stdout.splitlines()]
  return {
    "protections": before.protections,
    "reached": [PROGRAMS[int(number)].does for number, code in reached if code == "1"],
    "ended": [(PROGRAMS[int(n)].does, code) for n, code in reached if code != "1"],
    "result": dataclasses.asdict(result),
    "is_alive": is_alive,
    "is_left": is_running(mark),
  }


def is_running(mark: str) -> bool:
  """Returns whether a process of this machine has a text in its command."""
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      if mark.encode() in path.read_bytes():
        return True
    except OSError:
      continue
  return False


if __name__ == "__main__":
  sys.path.insert(0, sys.argv[1])
  json.dump(main(sys.argv[2], sys.argv[3:]), sys.stdout)
