"""The process that runs reward functions for `reward_pool`.

The process receives the functions, reports that it is ready, and then answers calls one
by one. Answers are JSON, not pickles, so that the trainer reads only numbers and text.
This isolates faults. It is not a sandbox against malicious code.

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
from collections.abc import Callable
from typing import Any

from tunix.rl.reward import outcomes as reward_outcomes
from tunix.rl.reward.outcomes import Failed, Value

HEADER = struct.Struct(">Q")
# The `__name__` of a user's script when a worker loads it for the functions in it.
MAIN_NAME = "__reward_worker_main__"
# A process whose trainer is gone ends itself by SIGALRM, this many seconds after the
# deadline at which the trainer would have killed it.
GRACE_S = 10.0


def main(descriptor: int) -> None:
  """Serves the socket with the given file descriptor until it is closed."""
  # The trainer holds the accelerators; a second process that opens them would fail.
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.set_inheritable(descriptor, False)
  connection = socket.socket(fileno=descriptor)
  hello = pickle.loads(receive(connection))
  try:
    functions = load(hello)
  # The user's modules may raise any exception; the trainer receives it as text.
  except (Exception, SystemExit) as error:
    send(connection, {"error": reward_outcomes.describe(error)})
    return
  limit_memory(hello["memory_bytes"])
  send(connection, {"ready": True})
  while True:
    index, count, arguments = pickle.loads(receive(connection))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, hello["timeout_s"] + GRACE_S)
    outcomes = _call(functions[index], arguments, count)
    signal.setitimer(signal.ITIMER_REAL, 0)
    send(connection, [to_json(x) for x in outcomes])


def to_json(outcome: Value | Failed) -> float | str:
  """Converts a value to a number and a failure to text."""
  return outcome.value if isinstance(outcome, Value) else outcome.error


def from_json(message: Any) -> Value | Failed:
  """Inverts `to_json`."""
  return Value(message) if isinstance(message, float) else Failed(str(message))


def _call(
  function: Callable[..., Any], arguments: bytes, count: int
) -> list[Value | Failed]:
  try:
    loaded = pickle.loads(arguments)
  except Exception as error:  # user classes may raise any exception here
    message = reward_outcomes.describe(error)
    return [Failed(f"the columns cannot be loaded in a worker: {message}")] * count
  return reward_outcomes.call(function, loaded, count)


def load(hello: dict[str, Any]) -> Any:
  """Unpickles "functions" of a pool's first message, after the script they are in."""
  kind, where = hello["main"]
  if kind != "none":
    _load_main(kind, where)
  return pickle.loads(hello["functions"])


def _load_main(kind: str, where: str) -> None:
  """Runs the trainer's script under another name, to define its functions."""
  module = types.ModuleType(MAIN_NAME)
  sys.modules[MAIN_NAME] = sys.modules["__main__"] = module
  run = {"module": runpy.run_module, "path": runpy.run_path}[kind]
  # runpy restores `sys.modules` afterwards, so it is set again.
  names = run(where, run_name=MAIN_NAME)
  module.__dict__.update(names)
  sys.modules["__main__"] = module


def limit_memory(limit: int | None) -> None:
  """Limits the address space to its present size plus `limit` bytes."""
  if limit is None:
    return
  import resource  # exists on Unix only, and /proc on Linux only

  with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))


def send(connection: socket.socket, message: Any) -> None:
  """Sends a message as JSON."""
  connection.sendall(packed(message))


def packed(message: Any) -> bytes:
  """Returns the bytes that `send` sends.

  Raises:
    TypeError, ValueError, RecursionError: the message is no JSON.
  """
  payload = json.dumps(message).encode()
  return HEADER.pack(len(payload)) + payload


def receive(connection: socket.socket) -> bytes:
  """Returns the bytes of the next message; ends the process if there is none."""
  (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
  return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
  parts = []
  while count:
    part = connection.recv(min(count, 1 << 20))
    if not part:
      sys.exit(0)  # the trainer closed the socket or has ended
    parts.append(part)
    count -= len(part)
  return b"".join(parts)
