"""Bounds of the connections of a server: their number, and the time of a header.

uvicorn has neither: its `limit_concurrency` counts idle and half-read connections as
requests, and a header may take for ever. hypercorn bounds the time between two reads,
which a byte now and then renews. granian bounds the time of a header, but runs the
application in its own processes and signals, apart from the engine. None of them
bounds the connections of an address.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Any

from tunix.serve.errors import ApiError
from tunix.serve.guard import PROBES
from tunix.serve.http import Answer
from tunix.serve.settings import ServeSettings
from tunix.utils import optional

# Requests beyond those that run or wait: lists of models, metrics, tokens.
_SPARE_REQUESTS = 128
# Connections without a request, of all addresses together. A process may often have
# 1,024 open files; requests take up to 448 with default settings.
_MOST_IDLE = 512
# Seconds that a new connection has at least, so that many clients may arrive at once.
_ARRIVAL = 1.0


class Connections:
  """The connections of one server, counted by address.

  A connection is idle while it has no request whose header is complete. Beyond a bound
  the oldest idle connection is closed. If an address has only requests and fresh
  connections, its new connection is refused: it gets answers to probes alone.

  All methods belong to the thread of the event loop.

  Attributes:
    requests: number of requests in flight.
  """

  def __init__(self, settings: ServeSettings):
    admitted = settings.max_concurrent + settings.max_queue
    self._most_requests = admitted + _SPARE_REQUESTS
    self._most = settings.max_address_connections or admitted
    self._retry_after = str(settings.retry_after)
    self._proxies = [ipaddress.ip_network(name) for name in settings.proxies]
    self._addresses: dict[Any, str] = {}
    self._by_address: dict[str, dict[Any, None]] = {}
    self._idle: dict[Any, float] = {}  # connection -> time at which it became idle
    self._refused: set[Any] = set()
    self.requests = 0

  def add(self, connection: Any, host: str | None) -> None:
    """Adds a new connection.

    Args:
      connection: an object with `abort()`.
      host: address of the client; None: unknown, and unbounded.
    """
    now = asyncio.get_running_loop().time()
    address = self._addresses[connection] = _address(host)
    own = self._by_address.setdefault(address, {})
    own[connection], self._idle[connection] = None, now
    if host is not None and not self._is_proxy(host) and len(own) > self._most:
      oldest = next((x for x in own if x in self._idle), connection)
      if self._idle[oldest] < now - _ARRIVAL:
        self._close(oldest)
      else:
        self._refused.add(connection)
    if len(self._idle) > _MOST_IDLE:
      self._close(next(iter(self._idle)))

  def remove(self, connection: Any) -> None:
    """Removes a connection; nothing happens if it was removed before."""
    self._idle.pop(connection, None)
    self._refused.discard(connection)
    address = self._addresses.pop(connection, None)
    if address is not None:
      own = self._by_address[address]
      del own[connection]
      if not own:
        del self._by_address[address]

  def mark(self, connection: Any, is_idle: bool) -> None:
    """Records whether a connection has a request."""
    if not is_idle:
      self._idle.pop(connection, None)
    elif connection not in self._idle:
      self._idle[connection] = asyncio.get_running_loop().time()

  def problem(self, connection: Any, path: str) -> ApiError | None:
    """Returns why a request is refused, or None."""
    if path in PROBES:
      return None
    if connection in self._refused:
      reason = f"your address has {self._most} connections"
    elif self.requests >= self._most_requests:
      reason = f"the server works on {self.requests} requests"
    else:
      return None
    headers = {"Retry-After": self._retry_after, "Connection": "close"}
    message = f"{reason}, its limit. Send the request again later"
    return ApiError(429, message, code="too_many_connections", headers=headers)

  def _close(self, connection: Any) -> None:
    self.remove(connection)
    connection.abort()

  def _is_proxy(self, host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return any(address in network for network in self._proxies)


def _address(host: str | None) -> str:
  """Returns what counts as one address; of IPv6, the network of a customer."""
  if host is None or ":" not in host:
    return host or ""
  return str(ipaddress.ip_network(f"{host.partition('%')[0]}/64", strict=False))


def bounded(
  app: Any, connections: Connections, connection: Any
) -> Callable[[Any, Any, Any], Any]:
  """Returns an application that answers 429 beyond the bounds of a server."""

  async def answer(scope: Any, receive: Any, send: Any) -> None:
    problem = connections.problem(connection, scope["path"])
    if problem is not None:
      await _refuse(problem, send)
      return
    connections.requests += 1
    try:
      await app(scope, receive, send)
    finally:
      connections.requests -= 1

  return answer


async def _refuse(problem: ApiError, send: Any) -> None:
  data = Answer(content=problem.body()).data()
  headers = {
    "content-type": "application/json",
    "content-length": str(len(data)),
    **problem.headers,
  }
  raw = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
  await send({"type": "http.response.start", "status": problem.status, "headers": raw})
  await send({"type": "http.response.body", "body": data})


def protocol(settings: ServeSettings) -> Any:
  """Returns the class of uvicorn's connections with the bounds of one server.

  Raises:
    ImportError: the package uvicorn is missing.
  """
  name = "uvicorn.protocols.http.h11_impl"
  h11: Any = optional.require(name, "the server", "tunix[serve]")
  connections = Connections(settings)

  class Protocol(h11.H11Protocol):
    """One connection; h11 bounds the size of a header."""

    _end_of_header: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any):
      super().__init__(*args, **options)
      self.app = bounded(self.app, connections, self)

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      connections.add(self, self.client[0] if self.client else None)
      self._watch(is_reading=True)

    def connection_lost(self, exc: Exception | None) -> None:
      super().connection_lost(exc)
      connections.remove(self)
      self._stop_timer()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      self._watch(is_reading=True)

    def on_response_complete(self) -> None:
      super().on_response_complete()
      self._watch(is_reading=False)  # uvicorn bounds the time until the next byte

    def abort(self) -> None:
      self.transport.abort()  # `close` would wait for a client that reads nothing

    def _watch(self, is_reading: bool) -> None:
      is_idle = self.cycle is None or self.cycle.response_complete
      if self.transport.is_closing():
        return
      connections.mark(self, is_idle)
      if not is_idle:
        self._stop_timer()
      elif is_reading and self._end_of_header is None:
        # Bytes that arrive later do not renew it.
        self._end_of_header = self.loop.call_later(settings.header_timeout, self.abort)

    def _stop_timer(self) -> None:
      if self._end_of_header is not None:
        self._end_of_header.cancel()
        self._end_of_header = None

  return Protocol
