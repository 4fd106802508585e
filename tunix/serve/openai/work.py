"""Threads in which requests are read, apart from the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from typing import TypeVar

# Bytes of a body from which on a request is long. Its text takes about 60 ms.
_LONG = 2**16

T = TypeVar("T")


class Readers:
  """Runs what tokenizers, templates and grammars do.

  A thread that has begun cannot be stopped, also if its client has gone. Long requests
  therefore share few threads: they leave cores to the engine, and short requests do not
  wait behind them. One that has not begun is dropped with its client.

  Args:
    most_long: long requests that are read at the same time; None: a quarter of the
      cores.
  """

  def __init__(self, most_long: int | None = None):
    self.most_long = most_long or max(1, (os.cpu_count() or 1) // 4)
    self._long = concurrent.futures.ThreadPoolExecutor(
      self.most_long, "tunix long requests"
    )

  async def run(self, size: float, function: Callable[..., T], *args: object) -> T:
    """Returns `function(*args)`, which runs in another thread.

    Args:
      size: bytes of the request's body.
      function: the work.
      *args: its arguments.
    """
    pool = self._long if size > _LONG else None
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
