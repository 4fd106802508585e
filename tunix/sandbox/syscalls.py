"""System calls of Linux that `monitor` needs and Python 3.11 does not have.

The file has namespaces, mounts, rights, and a filter of system calls (seccomp). It
imports only the standard library, because the monitor's process must start quickly.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct

# linux/sched.h
NEW_MOUNTS, NEW_USERS, NEW_PIDS = 0x00020000, 0x10000000, 0x20000000
NEW_NETWORK, NEW_IPC, NEW_NAMES = 0x40000000, 0x08000000, 0x04000000
_NEW_ANY = (
  NEW_MOUNTS | NEW_USERS | NEW_PIDS | NEW_NETWORK | NEW_IPC | NEW_NAMES | 0x02000000
)

# linux/mount.h
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT = 1, 2, 4, 8, 32
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
_DETACH = 2
# The flags that a mount shows in statvfs, with their values for mount.
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}

# linux/prctl.h
DIE_WITH_PARENT, DUMPABLE, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 36, 38
_SECCOMP, _SECCOMP_FILTER = 22, 2
_CAPABILITIES_3 = 0x20080522  # linux/capability.h, two words of 32 rights

# Numbers of refused calls on (x86_64, aarch64). All of them have replacements that
# code in a jail may use, or are for administrators.
_REFUSED = {
  "unshare": (272, 97),  # a new user namespace would give mounts without a size limit
  "setns": (308, 268),
  "mount": (165, 40),
  "umount2": (166, 39),
  "pivot_root": (155, 41),
  "fsopen": (430, 430),
  "open_tree": (428, 428),
  "move_mount": (429, 429),
  "ptrace": (101, 117),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "io_uring_setup": (425, 425),  # it opens sockets past this filter
  "bpf": (321, 280),
  "perf_event_open": (298, 241),
  "userfaultfd": (323, 282),
  "keyctl": (250, 219),
  "add_key": (248, 217),
  "request_key": (249, 218),
  "open_by_handle_at": (304, 265),
  "init_module": (175, 105),
  "finit_module": (313, 273),
  "kexec_load": (246, 104),
  # These hold memory that belongs to no address space.
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "shmget": (29, 194),
  "msgget": (68, 186),
  "semget": (64, 190),
}
_SOCKET = (41, 198)  # socketpair, which asyncio needs, has another number
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # calls of x86_64's second interface

# linux/bpf_common.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


@functools.cache
def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
  """Moves this process into new namespaces.

  Raises:
    OSError: the kernel refuses.
  """
  _checked(_libc().unshare(flags), "unshare")


def prctl(option: int, value: int) -> None:
  """Sets an attribute of this process.

  Raises:
    OSError: the kernel refuses.
  """
  _checked(_libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def call(number: int, *arguments: int | bytes) -> int:
  """Calls the system by number and returns its answer.

  Raises:
    OSError: the kernel refuses.
  """
  values = [x if isinstance(x, bytes) else ctypes.c_long(x) for x in arguments]
  result = _libc().syscall(ctypes.c_long(number), *values)
  _checked(result, f"system call {number}")
  return result


def drop_rights() -> None:
  """Gives up all of root's rights (capabilities), also for programs started later.

  A process of user 0 keeps the right to files of user 0.

  Raises:
    OSError: the kernel refuses.
  """
  prctl(NO_NEW_PRIVILEGES, 1)  # a program of user 0 would get all rights again
  header = struct.pack("Ii", _CAPABILITIES_3, 0)
  _checked(_libc().capset(header, bytes(24)), "capset")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
  """Mounts a file system.

  Raises:
    OSError: the kernel refuses.
  """
  names = (x.encode() for x in (source, target, kind))
  result = _libc().mount(*names, ctypes.c_ulong(flags), data.encode())
  _checked(result, f"mount {target}")


def bind_read_only(source: str, target: str) -> None:
  """Shows a file or folder at another path, without the right to write.

  Raises:
    OSError: the kernel refuses.
  """
  mount(source, target, "", BIND | RECURSIVE)
  shown = os.statvfs(target).f_flag
  # A user namespace may not drop the flags of a mount that it inherits.
  flags = sum(flag for bit, flag in _KEPT.items() if shown & bit)
  mount("", target, "", REMOUNT | BIND | READ_ONLY | NO_SUID | flags)


def change_root(folder: str) -> None:
  """Makes a mounted folder the root, and removes the old root.

  Raises:
    OSError: the kernel refuses.
  """
  os.chdir(folder)
  number = {"x86_64": 155, "aarch64": 41}[platform.machine()]
  # pivot_root with the same folder twice stacks the old root on the new one.
  _checked(_libc().syscall(number, b".", b"."), "pivot_root")
  _checked(_libc().umount2(b".", _DETACH), "umount2")
  os.chdir("/")


def filter_calls(network: bool) -> None:
  """Refuses system calls of this process and its children, for ever.

  Refused calls fail with EPERM. They open namespaces, mounts, sockets, memory outside
  of address spaces, and other processes' memory.

  Args:
    network: whether sockets are allowed.

  Raises:
    OSError: the kernel has no filters, or the processor is unknown.
  """
  if platform.machine() not in _ARCHITECTURES:
    raise OSError(_ENOSYS, f"no filter for {platform.machine()}")
  prctl(NO_NEW_PRIVILEGES, 1)
  code = b"".join(_program(network))
  buffer = ctypes.create_string_buffer(code, len(code))
  header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
  result = _libc().prctl(_SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), header, 0, 0)
  _checked(result, "seccomp")


def _program(network: bool) -> list[bytes]:
  """Returns the instructions: a jump skips a number of them if true, or if false."""

  def op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)

  def answer(number: int, error: int) -> list[bytes]:
    return [op(_EQUAL, number, 0, 1), op(_RETURN, _ERROR | error)]

  column, architecture = _ARCHITECTURES[platform.machine()]
  refused = [numbers[column] for numbers in _REFUSED.values()]
  refused += [] if network else [_SOCKET[column]]
  # The fields of seccomp_data: number at 0, architecture at 4, first argument at 16.
  program = [op(_LOAD, 4), op(_EQUAL, architecture, 1, 0), op(_RETURN, _KILL)]
  program += [op(_LOAD, 0)]
  if column == 0:
    program += [op(_AT_LEAST, _X32, 0, 1), op(_RETURN, _ERROR | _EPERM)]
  for number in refused:
    program += answer(number, _EPERM)
  # The flags of clone3 are in memory, which a filter cannot read. With ENOSYS, the C
  # library calls clone.
  program += answer(_CLONE3[column], _ENOSYS)
  program += [op(_EQUAL, _CLONE[column], 0, 3), op(_LOAD, 16)]
  program += [op(_ANY_BIT, _NEW_ANY, 0, 1), op(_RETURN, _ERROR | _EPERM)]
  return [*program, op(_RETURN, _ALLOW)]
