"""The other side of `child`: the process that calls the function.

The process receives the function, reports that it is ready, and then answers calls one
by one. Answers are JSON, not pickles, so that the parent reads only numbers and text:
{"ok": result}, or {"error": text of an exception}. The file imports only the standard
library, because processes must start quickly.

A message is its length in eight bytes, most significant first, and then its bytes.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import types
from typing import Any

from tunix.sandbox.errors import describe

HEADER = struct.Struct(">Q")
# The `__name__` of a user's script when a process loads it for the functions in it.
MAIN_NAME = "__child_main__"
# A process whose parent is gone ends itself by SIGALRM, this many seconds after the
# deadline at which the parent would have killed it.
GRACE_S = 10.0


def main(descriptor: int) -> None:
  """Serves the socket with the given file descriptor until it is closed."""
  # The parent holds the accelerators; a second process that opens them would fail.
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.set_inheritable(descriptor, False)
  connection = socket.socket(fileno=descriptor)
  hello = pickle.loads(_receive(connection))
  try:
    function = _load(hello)
    _limit_memory(hello["memory_bytes"])
  # The user's modules may raise any exception; the parent receives it as text.
  except (Exception, SystemExit) as error:
    connection.sendall(_packed({"error": describe(error)}))
    return
  connection.sendall(_packed({"ok": None}))
  while True:
    arguments = pickle.loads(_receive(connection))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, hello["timeout_s"] + GRACE_S)
    try:
      answer = _packed({"ok": function(*arguments)})
    # So may the function, and its result may be no JSON.
    except (Exception, SystemExit) as error:
      answer = _packed({"error": describe(error)})
    signal.setitimer(signal.ITIMER_REAL, 0)
    connection.sendall(answer)


def _load(hello: dict[str, Any]) -> Any:
  """Unpickles the function of the first message, after the script that it is in."""
  kind, where = hello["main"]
  if kind != "none":
    _load_main(kind, where)
  return pickle.loads(hello["function"])


def _load_main(kind: str, where: str) -> None:
  """Runs the parent's script under another name, to define its functions."""
  module = types.ModuleType(MAIN_NAME)
  sys.modules[MAIN_NAME] = sys.modules["__main__"] = module
  run = {"module": runpy.run_module, "path": runpy.run_path}[kind]
  # runpy restores `sys.modules` afterwards, so it is set again.
  names = run(where, run_name=MAIN_NAME)
  module.__dict__.update(names)
  sys.modules["__main__"] = module


def _limit_memory(limit: int | None) -> None:
  """Limits the address space to its present size plus `limit` bytes."""
  if limit is None:
    return
  import resource  # exists on Unix only, and /proc on Linux only

  with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))


def _packed(message: object) -> bytes:
  """Returns a message as JSON with its length.

  Raises:
    TypeError, ValueError, RecursionError: the message is no JSON.
  """
  payload = json.dumps(message).encode()
  return HEADER.pack(len(payload)) + payload


def _receive(connection: socket.socket) -> bytes:
  """Returns the bytes of the next message; ends the process if there is none."""
  (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
  return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
  parts = []
  while count:
    part = connection.recv(min(count, 1 << 20))
    if not part:
      sys.exit(0)  # the parent closed the socket or has ended
    parts.append(part)
    count -= len(part)
  return b"".join(parts)
