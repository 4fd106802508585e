"""Threads for the user's code, used again when a call has ended.

A thread cannot be stopped, so the number of those that hang has no limit here: a call
takes a thread that is free, or a new one. Starting a thread costs more CPU time than a
short environment's whole step.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Inbox = queue.SimpleQueue[Callable[[], None]]
_FREE: list[_Inbox] = []  # of threads that wait for a call
# A child has none of its parent's threads.
os.register_at_fork(after_in_child=_FREE.clear)


def start(function: Callable[[], None]) -> None:
  """Calls a function in a thread, and does not wait for it.

  Args:
    function: must not raise; it sees no context variables of other calls.
  """
  try:
    inbox = _FREE.pop()
  except IndexError:
    inbox = queue.SimpleQueue()
    # A daemon, so that one that hangs does not keep the process from ending.
    name = "tunix environment"
    threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
  inbox.put(function)


async def result(function: Callable[[], T]) -> T:
  """Calls a function in a thread, without blocking the event loop.

  Returns: what it returns.

  Raises:
    BaseException: what it raises, `SystemExit` too. A future cannot hold a
      `StopIteration`, which comes as the cause of a `RuntimeError`.
  """
  loop = asyncio.get_running_loop()
  future: asyncio.Future[T] = loop.create_future()

  def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
    if not future.done():  # not cancelled
      set_outcome(outcome)

  def run() -> None:
    try:
      outcome, set_outcome = function(), future.set_result
    except StopIteration as error:
      outcome, set_outcome = (
        RuntimeError("it raised StopIteration"),
        future.set_exception,
      )
      outcome.__cause__ = error
    except BaseException as error:  # the user's function may raise anything
      outcome, set_outcome = error, future.set_exception
    if not loop.is_closed():
      loop.call_soon_threadsafe(settle, set_outcome, outcome)

  start(run)
  return await future


def _serve(inbox: _Inbox) -> None:
  while True:
    contextvars.Context().run(inbox.get())
    _FREE.append(inbox)
