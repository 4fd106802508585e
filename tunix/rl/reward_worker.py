"""The process that runs reward functions for `reward_pool`.

It is told what to load, says when it is ready, and then answers one call after the
other. Answers are JSON, not pickles: whatever a reward function does to its process,
the trainer reads numbers and text. This isolates faults; it is no sandbox against
code that means harm.

Messages are eight bytes of length, most significant first, and as many bytes.
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
from collections.abc import Callable
from typing import Any

from tunix.rl import reward_outcomes
from tunix.rl.reward_outcomes import Failed, Value

HEADER = struct.Struct(">Q")
# What a user's script is called when a worker loads it for the functions in it.
MAIN_NAME = "__reward_worker_main__"
# A process that outlives its trainer is ended by its own alarm clock, this many
# seconds after the trainer would have done it.
GRACE_S = 10.0


def main(descriptor: int) -> None:
  """Serves the socket with this file descriptor until it is closed."""
  # The trainer holds the accelerators.
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.set_inheritable(descriptor, False)
  connection = socket.socket(fileno=descriptor)
  hello = pickle.loads(_receive(connection))
  try:
    functions = _load(hello)
  # The user's modules may raise anything; the trainer is told.
  except (Exception, SystemExit) as error:
    _send(connection, {"error": reward_outcomes.describe(error)})
    return
  _limit_memory(hello["memory_bytes"])
  _send(connection, {"ready": True})
  while True:
    index, count, arguments = pickle.loads(_receive(connection))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, hello["timeout_s"] + GRACE_S)
    outcomes = _call(functions[index], arguments, count)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send(connection, [to_json(x) for x in outcomes])


def to_json(outcome: Value | Failed) -> float | str:
  """A number is a value, a text a failure."""
  return outcome.value if isinstance(outcome, Value) else outcome.error


def from_json(message: Any) -> Value | Failed:
  """The inverse of `to_json`."""
  return Value(message) if isinstance(message, float) else Failed(str(message))


def _call(
  function: Callable[..., Any], arguments: bytes, count: int
) -> list[Value | Failed]:
  try:
    loaded = pickle.loads(arguments)
  except Exception as error:  # the columns' own classes may raise anything
    told = reward_outcomes.describe(error)
    return [Failed(f"the columns cannot be loaded in a worker: {told}")] * count
  return reward_outcomes.call(function, loaded, count)


def _load(hello: dict[str, Any]) -> list[Callable[..., Any]]:
  kind, where = hello["main"]
  if kind != "none":
    _load_main(kind, where)
  return pickle.loads(hello["functions"])


def _load_main(kind: str, where: str) -> None:
  """Runs the trainer's script under another name, for the functions defined in it."""
  module = types.ModuleType(MAIN_NAME)
  sys.modules[MAIN_NAME] = sys.modules["__main__"] = module
  run = {"module": runpy.run_module, "path": runpy.run_path}[kind]
  # The script puts its own name back when it is done.
  names = run(where, run_name=MAIN_NAME)
  module.__dict__.update(names)
  sys.modules["__main__"] = module


def _limit_memory(limit: int | None) -> None:
  """Leaves `limit` bytes of address space beyond what is in use now."""
  if limit is None:
    return
  import resource  # not on every platform, and neither is /proc

  with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))


def _send(connection: socket.socket, message: Any) -> None:
  payload = json.dumps(message).encode()
  connection.sendall(HEADER.pack(len(payload)) + payload)


def _receive(connection: socket.socket) -> bytes:
  (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
  return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
  parts = []
  while count:
    part = connection.recv(min(count, 1 << 20))
    if not part:
      sys.exit(0)  # the trainer closed the socket, or is gone
    parts.append(part)
    count -= len(part)
  return b"".join(parts)
