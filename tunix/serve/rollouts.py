"""The routes of a host that samples for a run of RL: the methods of a `RolloutHost`.

A call may take long, so its answer says whether it has ended, and the client asks
again. All calls run in one thread, in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import secrets
import threading
from collections.abc import Callable
from typing import Any

from tunix.rl.rollout.host import NOT_BEGUN, HostError, RolloutHost
from tunix.serve import server
from tunix.serve.app import Endpoint, application, request_of
from tunix.serve.http.bodies import Answer, Call, Receive, Scope, read_body
from tunix.serve.http.errors import ApiError, bad, shutting_down
from tunix.serve.http.fields import Fields, missing
from tunix.serve.http.guard import check
from tunix.serve.metrics import Metrics
from tunix.serve.settings import HttpSettings

_LOG = logging.getLogger(__name__)
_HOLD_S = 10.0  # for which a request waits for the end of a call
_MOST_CALLS = 64  # that run, wait, or have a result that was not asked for
_BYTES = "application/octet-stream"


class Calls:
  """The calls of a host.

  Args:
    host: the host.
    settings: address, access and limits.

  Attributes:
    settings: as given.
    metrics: metrics of the server.
  """

  def __init__(self, host: RolloutHost, settings: HttpSettings):
    self._host, self.settings = host, settings
    self.metrics = Metrics(self._gauges)
    self._open: dict[int, concurrent.futures.Future[Any]] = {}
    self._is_draining = False
    self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    # A daemon, so that a call that hangs does not keep the process.
    threading.Thread(target=self._work, name="tunix-host", daemon=True).start()

  def _work(self) -> None:
    while True:
      self._queue.get()()

  def _gauges(self) -> dict[str, float]:
    running = sum(not future.done() for future in self._open.values())
    return {"rollout_calls": running, "rollout_draws": self._host.draws}

  def start_drain(self) -> None:
    """Refuses new calls."""
    self._is_draining = True

  def begin(self, method: str, arguments: dict[str, Any]) -> int:
    """Begins a call; returns its number.

    Raises:
      ApiError: the method is unknown, there are too many calls, or the host shuts down.
    """
    if self._is_draining:
      raise shutting_down(self.settings.retry_after)
    if method not in self._host.methods:
      raise bad("method", f"method is {method!r}, expected one of the host's")
    # A client that takes the host waits for no earlier call, and a run that was killed
    # never asks for its results.
    if method == "take" or len(self._open) >= _MOST_CALLS:
      for number in [n for n, future in self._open.items() if future.done()]:
        del self._open[number]
    if len(self._open) >= _MOST_CALLS:
      raise ApiError(429, "too many calls wait: is the host used by several runs?")
    # Random: a number of an earlier process, or a guess, must not name another call.
    number = secrets.randbits(31)
    while number in self._open:
      number = secrets.randbits(31)
    work: Callable[..., Any] = self._host.methods[method]
    future = self._open[number] = concurrent.futures.Future()
    self._queue.put(lambda: _settle(future, lambda: work(**arguments)))
    return number

  async def answer(self, number: int) -> dict[str, Any]:
    """Returns the result of a call, if it ends in a few seconds.

    Raises:
      ApiError: there is no such call, or it does not fit the state of the host.
    """
    future = self._open.get(number)
    if future is None:
      # Of an earlier process, or dropped by `begin`.
      text = f"call is {number}, and there is no such call: begin it again"
      raise ApiError(404, text, param="call", code=NOT_BEGUN)
    waiting = asyncio.wrap_future(future)
    await asyncio.wait({waiting}, timeout=_HOLD_S)
    if not waiting.done():
      return {"is_done": False, "call": number}
    self._open.pop(number, None)
    error = waiting.exception()
    if isinstance(error, HostError):
      raise ApiError(409, str(error), code=error.code)
    if error is not None:
      if not isinstance(error, ValueError):
        _LOG.error("a call failed", exc_info=error)
      return {"is_done": True, "error": f"{type(error).__name__}: {error}"}
    return {"is_done": True, "value": future.result()}


def _settle(future: concurrent.futures.Future[Any], work: Callable[[], Any]) -> None:
  """Sets the result of a call, or its error, which the client gets."""
  try:
    future.set_result(work())
  except Exception as error:
    future.set_exception(error)


async def health(call: Call, calls: Calls) -> Answer:
  """Returns 200."""
  return Answer(content={"status": "ok"})


async def metrics(call: Call, calls: Calls) -> Answer:
  """Returns the metrics in Prometheus's form."""
  kind = calls.metrics.media_type
  return Answer(content=calls.metrics.text(), media_type=kind)


async def begin(call: Call, calls: Calls) -> Answer:
  """Begins a call, and waits a few seconds for its end."""
  fields = Fields(call.body)
  method, arguments = fields.text("method"), fields.object("arguments")
  fields.end(frozenset())
  if method is None:
    raise missing("method")
  return Answer(content=await calls.answer(calls.begin(method, arguments)))


async def answer(call: Call, calls: Calls) -> Answer:
  """Waits a few seconds for the end of a call."""
  fields = Fields(call.body)
  number = fields.whole("call")
  fields.end(frozenset())
  if number is None:
    raise missing("call")
  return Answer(content=await calls.answer(number))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartCall(Call):
  """A part of a parameter.

  Attributes:
    data: its bytes.
  """

  data: bytes = b""


async def part(call: PartCall, calls: Calls) -> Answer:
  """Takes a part of a parameter; the query says which one."""
  query = call.query
  start = query.get("start", "")
  if not (start.isascii() and start.isdigit()):
    raise bad("start", f"start is {start[:40]!r}, expected a number of bytes")
  arguments = {
    "owner": query.get("owner", ""),
    "path": query.get("path", ""),
    "start": int(start),
    "data": call.data,
  }
  return Answer(content=await calls.answer(calls.begin("part", arguments)))


class _PartEndpoint(Endpoint):
  """An endpoint whose body is bytes."""

  async def read(self, scope: Scope, receive: Receive) -> PartCall | None:
    settings, request = self._settings, request_of(scope)
    check(settings, scope["path"], request.headers)
    kind = request.headers.get("content-type", "")
    if kind != _BYTES:
      raise ApiError(415, f"Content-Type is {kind[:100]!r}, expected {_BYTES}")
    try:
      async with asyncio.timeout(settings.client_timeout):
        data = await read_body(request.headers, receive, settings.max_body_bytes)
    except TimeoutError as error:
      raise ApiError(408, "the body did not arrive in time", code="timeout") from error
    return None if data is None else PartCall(query=request.query_params, data=data)


def make_app(host: RolloutHost, settings: HttpSettings) -> Any:
  """Returns the application of a host; `app.state.context` is its `Calls`.

  Raises:
    ImportError: a package of the extra `serve` is missing.
  """
  calls = Calls(host, settings)
  routes = {
    ("GET", "/health"): health,
    ("GET", "/ready"): health,
    ("GET", "/metrics"): metrics,
    ("POST", "/rollouts/call"): begin,
    ("POST", "/rollouts/answer"): answer,
  }
  path = "/rollouts/part"
  route: Any = part
  context: Any = calls
  more = {("POST", path): _PartEndpoint(route, path, context)}
  return application(routes, calls, more=more)


def serve(
  host: RolloutHost,
  settings: HttpSettings,
  on_start: Callable[[str], None] | None = None,
) -> None:
  """Serves until SIGTERM or SIGINT.

  Args:
    host: the host.
    settings: address, access and limits.
    on_start: see `server.make_server`.

  Raises:
    ImportError: a package of the extra `serve` is missing.
    OSError: the address cannot be used.
  """
  app = make_app(host, settings)
  server.run_until_signal(server.make_server(app, settings, on_start))
