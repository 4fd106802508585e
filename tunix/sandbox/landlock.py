"""Landlock: a process gives up files and other processes, without any rights.

Linux has it since 5.13; containers without namespaces have it too. A process of such a
domain reads and writes only what its rules name, and it can neither debug nor read the
memory and descriptors of processes outside of the domain. From version 6 of the
interface (Linux 6.12) it sends them no signals either.

See linux/landlock.h and https://docs.kernel.org/userspace-api/landlock.html. The file
imports only the standard library, as `syscalls` does.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable

from tunix.sandbox import syscalls

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # x86_64 and aarch64
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_ALL = (
  1 << 15
) - 1  # the rights to files of version 3, which is the first with truncate
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
_SCOPES = 1 | 2  # abstract sockets and signals
_FIRST, _FIRST_WITH_SIGNALS = 3, 6


def restrict(readable: Iterable[str], writable: Iterable[str]) -> bool:
  """Restricts this process and its children for ever.

  Args:
    readable: folders and files to read and execute. Those that do not exist, or that
      this user cannot reach, are left out.
    writable: folders and devices to read, write and execute.

  Returns: whether signals to processes outside are refused too.

  Raises:
    OSError: the kernel has no Landlock, or one that does not cover all writing.
  """
  version = syscalls.call(_CREATE, 0, 0, _VERSION_FLAG)
  if version < _FIRST:
    raise OSError(38, f"Landlock of version {version}; expected {_FIRST} or later")
  has_scopes = version >= _FIRST_WITH_SIGNALS
  attributes = struct.pack("QQQ", _ALL, 0, _SCOPES if has_scopes else 0)
  size = len(attributes) if has_scopes else 8
  rules = syscalls.call(_CREATE, attributes, size, 0)
  try:
    for path in readable:
      _allow(rules, path, _READ)
    for path in writable:
      _allow(rules, path, _ALL)
    syscalls.prctl(syscalls.NO_NEW_PRIVILEGES, 1)
    syscalls.call(_RESTRICT, rules, 0)
  finally:
    os.close(rules)
  return has_scopes


def _allow(rules: int, path: str, rights: int) -> None:
  with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
      if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _OF_FILES
      rule = struct.pack("=Qi", rights, descriptor)
      syscalls.call(_ADD, rules, _PATH_BENEATH, rule, 0)
    finally:
      os.close(descriptor)
