"""Steps of a call that generates: read, wait for a place, run, answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from tunix.generate.engine.request import EngineRequest
from tunix.generate.tokens import Completion
from tunix.serve.http.bodies import Answer, Call, Stream
from tunix.serve.http.forms import StreamOptions
from tunix.serve.openai.context import Context
from tunix.serve.openai.images import read_size
from tunix.serve.openai.running import Clock, Part, Run, check_alive, collect

# Seconds between two checks of the clock: a shutdown shortens the limit.
_LOOK = 1.0


class Job(Protocol):
  """A call that was read.

  Attributes:
    requests: requests to the engine.
    stream: how the answer is sent.
    headers: headers of the answer.
  """

  requests: list[EngineRequest]
  stream: StreamOptions
  headers: dict[str, str]

  def answer(self, run: Run, rows: list[list[Completion]]) -> Any:
    """Returns the JSON of a whole answer."""
    ...

  def chunks(self, run: Run, part: Part) -> list[Any]:
    """Returns the events of one delta."""
    ...

  def last_chunks(self, run: Run) -> list[Any]:
    """Returns the events after all deltas."""
    ...


async def serve(
  context: Context, call: Call, read: Callable[[Call, Context], Job]
) -> Answer | Stream:
  """Serves a call that generates.

  Args:
    context: the server.
    call: the call.
    read: reads a call. It runs in another thread, because tokenizers, templates and
      grammars can take seconds.

  Raises:
    ApiError: the call is malformed, or the server is full.
    EngineDead: the engine failed.
  """
  started = time.monotonic()
  check_alive(context.driver)
  clock = context.clock()
  async with contextlib.AsyncExitStack() as stack:
    await stack.enter_async_context(context.gate.entered())
    work = context.readers.run(read_size(call), read, call, context)
    job = await within(clock, work)
    run = Run(context.driver, job.requests, job.stream.streams)
    stack.callback(run.cancel)
    if not job.stream.streams:
      rows = await collect(run, clock)
      return Answer(content=job.answer(run, rows), headers=job.headers)
    parts = run.parts(clock)
    # The status is sent after the first delta, so that a request that fails at once
    # gets the status of its error.
    first = await anext(parts)
    context.metrics.first_token(time.monotonic() - started)
    events = _events(job, run, first, parts)
    return Stream(events=events, headers=job.headers, close=stack.pop_all().aclose)


async def _events(
  job: Job, run: Run, first: Part, parts: AsyncIterator[Part]
) -> AsyncIterator[Any]:
  for chunk in job.chunks(run, first):
    yield chunk
  async for part in parts:
    for chunk in job.chunks(run, part):
      yield chunk
  for chunk in job.last_chunks(run):
    yield chunk


async def within(clock: Clock, work: Awaitable[Any]) -> Any:
  """Waits for work as long as the clock allows.

  Raises:
    ApiError: the time is over. A thread runs to its end, and its result is dropped.
  """
  task = asyncio.ensure_future(work)
  try:
    while not task.done():
      await asyncio.wait({task}, timeout=min(_LOOK, clock.left()))
      if not task.done():
        clock.check()
    return task.result()
  finally:
    task.cancel()
