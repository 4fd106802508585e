"""Bounds of a server's connections: their number, requests, and time of a header.

uvicorn has neither: its `limit_concurrency` counts idle and half-read connections as
requests, and a header may take for ever. hypercorn bounds the time between two reads,
which a byte now and then renews. granian bounds the time of a header, but runs the
application in its own processes and signals, apart from the engine. None of them
bounds the connections of an address.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ipaddress
from collections.abc import Iterator
from typing import Any

from tunix.serve.http.bodies import Answer, Receive, Scope, Send
from tunix.serve.http.errors import ApiError
from tunix.serve.http.guard import PROBES
from tunix.serve.settings import HttpSettings
from tunix.utils import optional

# Requests beyond those that run or wait: lists of models, metrics, tokens.
_SPARE_REQUESTS = 128
# Idle connections of all addresses together. A process may often have 1,024 open files;
# requests take up to 448 with default settings.
_MOST_IDLE = 512


class Connections:
  """The connections of one server and their requests, counted by address.

  A connection is idle while it has no request whose header is complete. If too many are
  idle, the address with the most of them loses its oldest one. Named proxies have no
  bounds of their own: their connections are those of many clients.

  All methods belong to the thread of the event loop.
  """

  def __init__(self, settings: HttpSettings):
    admitted = settings.max_concurrent + settings.max_queue
    self._most = admitted + _SPARE_REQUESTS
    self._most_of_address = settings.max_address_requests or admitted
    self._retry_after = str(settings.retry_after)
    self._proxies = [ipaddress.ip_network(name) for name in settings.proxies]
    self._idle: dict[str, dict[Any, None]] = {}  # by address, the oldest first
    self._requests: collections.Counter[str] = collections.Counter()

  def address(self, host: str | None) -> str | None:
    """Returns what counts as one address: of IPv6, the network of a customer.

    Args:
      host: address of a client; None: unknown.

    Returns:
      None if the client has no bounds.
    """
    if host is None:
      return None
    ip = ipaddress.ip_address(host.partition("%")[0])
    if any(ip in network for network in self._proxies):
      return None
    if ip.version == 4:
      return host
    return str(ipaddress.ip_network((ip, 64), strict=False))

  def mark(self, connection: object, address: str | None, is_idle: bool) -> None:
    """Records whether a connection is idle.

    Args:
      connection: an object with `abort()`.
      address: from `address`.
      is_idle: False also for a connection that has ended.
    """
    if address is None:
      return
    own = self._idle.setdefault(address, {})
    if is_idle:
      own[connection] = None
      if sum(map(len, self._idle.values())) > _MOST_IDLE:
        self._close_one()
    else:
      own.pop(connection, None)
    if not own:
      self._idle.pop(address, None)

  def _close_one(self) -> None:
    own = max(self._idle.values(), key=len)
    oldest = next(iter(own))
    del own[oldest]
    oldest.abort()

  def problem(self, address: str | None) -> ApiError | None:
    """Returns why a further request is refused, or None."""
    if address is not None and self._requests[address] >= self._most_of_address:
      reason = f"your address has {self._most_of_address} open requests"
    elif self._requests.total() >= self._most:
      reason = f"the server has {self._most} open requests"
    else:
      return None
    headers = {"Retry-After": self._retry_after, "Connection": "close"}
    message = f"{reason}, its limit. Send the request again later"
    return ApiError(429, message, code="too_many_requests", headers=headers)

  @contextlib.contextmanager
  def request(self, address: str | None) -> Iterator[None]:
    """Counts a request."""
    key = address or ""
    self._requests[key] += 1
    try:
      yield
    finally:
      self._requests[key] -= 1
      if not self._requests[key]:
        del self._requests[key]


def bounded(app: Any, connections: Connections, address: str | None) -> Any:
  """Returns an application that answers 429 beyond the bounds of a server.

  Probes are answered always.
  """

  async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    problem = connections.problem(address)
    if problem is not None and scope["path"] not in PROBES:
      await _refuse(problem, send)
      return
    with connections.request(address):
      await app(scope, receive, send)

  return answer


async def _refuse(problem: ApiError, send: Send) -> None:
  data = Answer(content=problem.body()).data()
  headers = {
    "content-type": "application/json",
    "content-length": str(len(data)),
    **problem.headers,
  }
  raw = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
  await send({"type": "http.response.start", "status": problem.status, "headers": raw})
  await send({"type": "http.response.body", "body": data})


def protocol(settings: HttpSettings) -> Any:
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
    _address: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
      super().connection_made(transport)
      self._address = connections.address(self.client[0] if self.client else None)
      self._bounded = bounded(self.app, connections, self._address)
      self.app = self._answer
      self._watch(is_reading=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
      cycle = self.cycle
      await self._bounded(scope, receive, send)
      if not cycle.response_complete:
        self.abort()  # the client took no part of the answer in time

    def connection_lost(self, exc: Exception | None) -> None:
      super().connection_lost(exc)
      connections.mark(self, self._address, is_idle=False)
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
      connections.mark(self, self._address, is_idle)
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
