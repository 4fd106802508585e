"""The protocol's routes over a `Service`, beside the routes of `tunix.serve`."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tunix.serve.app import Endpoint, request_of
from tunix.serve.http.bodies import (
  Answer,
  Call,
  Receive,
  Scope,
  read_body,
  read_json,
)
from tunix.serve.http.errors import ApiError
from tunix.serve.http.guard import check, given_key, tenant_of_key, wrong_key
from tunix.serve.openai.context import Context, Tenants
from tunix.serve.settings import ServeSettings
from tunix.tinker import requests, rest
from tunix.tinker.errors import (
  BusyError,
  GoneError,
  NotFoundError,
  ServiceFailedError,
  TinkerError,
)
from tunix.tinker.protocol import fields, wire
from tunix.tinker.protocol.results import Result
from tunix.tinker.rest import TinkerCall
from tunix.tinker.service import Service
from tunix.utils import optional
from tunix.utils.record_file import RecordError

_LOG = logging.getLogger(__name__)
_PROTO = "application/x-protobuf"
_WINDOW = 2**23  # bytes of a zstd window: RFC 8878 has decoders take this many
# Bytes of results that the clients of a tenant take at the same time. In JSON, and in
# the lists before it, a value takes about ten times its bytes.
_SENT, _JSON_BYTES = 2**26, 10
_POLL = 1.0  # seconds between two looks of a waiting request, beside the bell
# The client tries again after 408, 409, 429 and 5xx, so final errors have other codes.
_STATUS: dict[type[TinkerError], int] = {
  NotFoundError: 404,
  GoneError: 410,
  BusyError: 429,
  ServiceFailedError: 503,
}


def routes(
  service: Service,
) -> Callable[[Context], Mapping[tuple[str, str], Any]]:
  """Returns the argument `more` of `serve.app.make_app` that adds the protocol.

  With keys of tenants, the other routes need a key too: a tenant's key sees the base
  model and the tenant's own checkpoints.
  """

  def owns(tenant: str, adapter: str) -> bool:
    try:
      service.place(tenant, adapter)
    except TinkerError:
      return False
    return True

  def more(context: Context) -> Mapping[tuple[str, str], Any]:
    keys = service.settings.keys
    for name, key in keys.items():
      if key == context.settings.api_key:
        raise ValueError(
          f"the key of the tenant {name!r} is also that of the administrator, which "
          "opens every route; expected two keys. Change one of them"
        )
    context.tenants = Tenants(keys, owns)
    # A kill within the drain must not count as a start of the requests that run. In a
    # thread, because a state may be written under the lock.
    context.on_drain = threading.Thread(target=service.stop, daemon=True).start
    bell = _Bell()
    service.listen(bell.ring)
    made: dict[tuple[str, str], Any] = {}
    for (method, path), route in (requests.ROUTES | rest.ROUTES).items():
      full = f"/api/v1/{path}"
      made[method, full] = _TinkerEndpoint(_threaded(route), full, context, service)
    path = "/api/v1/retrieve_future"
    wait = _waiting(bell, context)
    made["POST", path] = _TinkerEndpoint(wait, path, context, service)
    return made

  return more


class _Bell:
  """Wakes the coroutines that wait for results."""

  def __init__(self):
    self._loop: asyncio.AbstractEventLoop | None = None
    self._event = asyncio.Event()

  def ring(self) -> None:
    """Wakes all waiting coroutines; called in any thread."""
    loop = self._loop
    if loop is not None and not loop.is_closed():
      loop.call_soon_threadsafe(self._wake)

  def _wake(self) -> None:
    self._event.set()
    self._event = asyncio.Event()

  @property
  def event(self) -> asyncio.Event:
    """The event of the next ring. Take it before looking at the state."""
    loop = asyncio.get_running_loop()
    if loop is not self._loop:  # an event belongs to the loop of its first wait
      self._loop, self._event = loop, asyncio.Event()
    return self._event


def _threaded(
  route: requests.Route,
) -> Callable[[TinkerCall, Service], Awaitable[Answer]]:
  """Runs a route in a thread, because it reads and writes files."""

  async def run(call: TinkerCall, service: Service) -> Answer:
    content = await asyncio.to_thread(route, call, service)
    return content if isinstance(content, Answer) else Answer(content=content)

  return run


class _TinkerEndpoint(Endpoint):
  """An endpoint whose calls know their tenant, and may have Protocol Buffers."""

  def __init__(self, route: Any, path: str, context: Context, service: Service):
    self._service = service

    async def served(call: object, _: Context) -> Answer:
      try:
        return await route(call, service)
      except TinkerError as error:
        raise _api_error(error, context.settings) from error
      except RecordError as error:  # of a checkpoint: a repetition finds the same
        _LOG.warning("%s: %s", path, error)
        raise ApiError(400, str(error), code="damaged") from error
      except OSError as error:
        _LOG.warning("%s cannot write: %s", path, error)
        raise ApiError(
          503,
          f"the service cannot write the request: {error}. Send the request again, or "
          "have its disk checked",
          code="service_failed",
        ) from error

    super().__init__(served, path, context)

  async def read(self, scope: Scope, receive: Receive) -> Call | None:
    settings, request = self._settings, request_of(scope)
    headers = request.headers
    keys = self._service.settings.keys
    tenant = tenant_of(settings, keys, scope["path"], headers)
    query = {**request.query_params, **request.path_params}
    base = TinkerCall(
      query=query, tenant=tenant, wants_proto=_PROTO in headers.get("accept", "")
    )
    if scope["method"] not in ("POST", "PUT"):
      return base
    try:
      async with asyncio.timeout(settings.client_timeout):
        data = await read_body(headers, receive, settings.max_body_bytes)
    except TimeoutError as error:
      raise ApiError(408, "the body did not arrive in time", code="timeout") from error
    if data is None:
      return None
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if headers.get("content-encoding", "").lower() == "zstd":
      data = await asyncio.to_thread(_inflated, data, settings.max_body_bytes)
    if kind == _PROTO:
      return dataclasses.replace(base, proto=data)
    if not data:
      return base
    if kind != "application/json":  # a form of any web page has other types
      raise ApiError(415, f"Content-Type is {kind[:100]!r}, expected application/json")
    return dataclasses.replace(base, body=await asyncio.to_thread(read_json, data))


def tenant_of(
  settings: ServeSettings,
  keys: Mapping[str, str],
  path: str,
  headers: Mapping[str, str],
) -> str:
  """Returns the name of the tenant that sends a request.

  The key is in the header X-API-Key, as the SDK sends it, or in Authorization.

  Args:
    settings: the server's settings.
    keys: key of each tenant; empty: one tenant, "local".
    path: path of the URL.
    headers: headers with names in lower case.

  Raises:
    ApiError: 401 for a missing or wrong key; 403 for a foreign web page.
  """
  if not keys:
    check(settings, path, headers)
    return "local"
  tenant = tenant_of_key(keys, given_key(headers))
  if tenant is None:
    raise wrong_key("set TINKER_API_KEY to the key of a tenant")
  return tenant


def _inflated(data: bytes, most: int) -> bytes:
  zstandard: Any = optional.require(
    "zstandard", "a compressed request", "tunix[tinker]"
  )
  try:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    with decompressor.stream_reader(data) as reader:
      out = reader.read(most + 1)
    is_cut = len(out) <= most and not _is_whole(zstandard, data, len(out))
  except zstandard.ZstdError as error:
    raise ApiError(400, f"the body is no zstd data: {error}") from error
  if is_cut:
    raise ApiError(400, "the body's zstd data ends early; send it again")
  if len(out) > most:
    raise ApiError(413, f"the body is larger than {most} bytes", code="too_large")
  return out


def _is_whole(zstandard: Any, data: bytes, size: int) -> bool:
  """Returns False for a cut frame, of which zstandard returns the first part."""
  if (content_size := zstandard.frame_content_size(data)) >= 0:
    return size == content_size
  frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
  frame.decompress(data)
  return frame.eof


def _api_error(error: TinkerError, settings: ServeSettings) -> ApiError:
  status = _STATUS.get(type(error), 400)
  again = {"Retry-After": str(settings.retry_after)} if status == 429 else {}
  return ApiError(status, error.message, code=error.code, headers=again)


class _Sending:
  """Bytes of answers that the clients of each tenant take at the same time.

  Results have their turns in the order in which they were found. A large one could
  otherwise wait as long as small ones come.
  """

  def __init__(self):
    self._bytes = collections.Counter[str]()
    self._turns: dict[str, list[object]] = {}

  def begins(self, tenant: str, place: object, size: int) -> bool:
    """Takes room for a result; returns False if there is none or others are first."""
    turns = self._turns.setdefault(tenant, [])
    if place not in turns:
      turns.append(place)
    used = self._bytes[tenant]
    if turns[0] is not place or (used and used + size > _SENT):
      return False
    self._bytes[tenant] += size
    return True

  def leave(self, tenant: str, place: object) -> None:
    """Ends the turn of a result, if it has one."""
    turns = self._turns.get(tenant, [])
    if place in turns:
      turns.remove(place)
    if not turns:
      self._turns.pop(tenant, None)

  def end(self, tenant: str, size: int) -> None:
    """Gives the room of a result back."""
    self._bytes[tenant] -= size


def _waiting(
  bell: _Bell, context: Context
) -> Callable[[TinkerCall, Service], Awaitable[Answer]]:
  """Returns the route that waits for a result, and else answers `try_again`."""

  sending = _Sending()

  async def retrieve(call: TinkerCall, service: Service) -> Answer:
    place = object()
    try:
      outcome = await until_room(call, service, place)
    finally:
      sending.leave(call.tenant, place)
    return outcome if isinstance(outcome, Answer) else await answer(call, *outcome)

  async def until_room(
    call: TinkerCall, service: Service, place: object
  ) -> Answer | tuple[Result, int]:
    id = fields.text(call.body, "request_id")
    until = time.monotonic() + service.settings.wait_seconds
    while True:
      event = bell.event
      result = service.result(call.tenant, id)
      if result is not None:
        size = result.nbytes * (1 if call.wants_proto else _JSON_BYTES)
        if sending.begins(call.tenant, place, size):
          return result, size
      left = until - time.monotonic()
      if left <= 0 or context.gate.is_draining:
        state = "paused_capacity" if service.sampling.is_short(id) else "active"
        return Answer(
          content={"type": "try_again", "request_id": id, "queue_state": state}
        )
      try:
        async with asyncio.timeout(min(left, _POLL)):
          await event.wait()
      except TimeoutError:
        continue

  async def answer(call: TinkerCall, result: Result, size: int) -> Answer:
    async def close() -> None:
      sending.end(call.tenant, size)

    is_proto = call.wants_proto and wire.has_proto(result)
    try:
      form = wire.to_proto if is_proto else wire.to_json
      content = await asyncio.to_thread(form, result)
    except BaseException:  # the client may have gone
      await close()
      raise
    kind = _PROTO if is_proto else "application/json"
    return Answer(content=content, media_type=kind, close=close)

  return retrieve
