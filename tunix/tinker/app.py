"""The protocol's routes over a `Service`, beside the routes of `tunix.serve`."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tunix.serve.app import Endpoint, read_body, request_of
from tunix.serve.context import Context
from tunix.serve.errors import ApiError
from tunix.serve.guard import check
from tunix.serve.http import Answer, Call, read_json
from tunix.serve.settings import ServeSettings
from tunix.tinker import rest, wire
from tunix.tinker.errors import (
  BusyError,
  GoneError,
  NotFoundError,
  ServiceFailedError,
  TinkerError,
)
from tunix.tinker.learner import AdapterSpec
from tunix.tinker.rest import TinkerCall
from tunix.tinker.service import Service
from tunix.utils import optional

_PROTO = "application/x-protobuf"
_POLL = 1.0  # seconds between two looks of a waiting request, beside the bell
# The client tries again after 408, 409, 429 and 5xx, so final errors have other codes.
_STATUS: dict[type[TinkerError], int] = {
  NotFoundError: 404,
  GoneError: 410,
  BusyError: 429,
  ServiceFailedError: 503,
}

Route = Callable[[TinkerCall, Service], Any]


def routes(
  service: Service,
) -> Callable[[Context], Mapping[tuple[str, str], Any]]:
  """Returns the argument `more` of `serve.app.make_app` that adds the protocol."""

  def more(context: Context) -> Mapping[tuple[str, str], Any]:
    bell = _Bell()
    service.listen(bell.ring)
    made: dict[tuple[str, str], Any] = {}
    for (method, path), route in (_ROUTES | rest.ROUTES).items():
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


def _threaded(route: Route) -> Callable[[TinkerCall, Service], Awaitable[Answer]]:
  """Runs a route in a thread, because it reads and writes files."""

  async def run(call: TinkerCall, service: Service) -> Answer:
    content = await asyncio.to_thread(route, call, service)
    return content if isinstance(content, Answer) else Answer(content=content)

  return run


class _TinkerEndpoint(Endpoint):
  """An endpoint whose calls know their tenant, and may have Protocol Buffers."""

  def __init__(self, route: Any, path: str, context: Context, service: Service):
    self._service = service

    async def served(call: Any, _: Context) -> Answer:
      try:
        return await route(call, service)
      except TinkerError as error:
        raise _api_error(error, context.settings) from error

    super().__init__(served, path, context)

  async def read(self, scope: Any, receive: Any) -> Call | None:
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
  given = headers.get("x-api-key", "").strip()
  bearer = f"Bearer {given}" if given else headers.get("authorization", "")
  if not keys:
    check(settings, path, {**headers, "authorization": bearer})
    return "local"
  found = None
  for name, key in keys.items():  # all of them: the time must not tell which matched
    shared = dataclasses.replace(settings, api_key=key)
    try:
      check(shared, path, {**headers, "authorization": bearer})
    except ApiError:
      continue
    found = name
  if found is None:
    raise ApiError(
      401,
      "the API key is missing or wrong: set TINKER_API_KEY to the key of a tenant",
      code="invalid_api_key",
      headers={"WWW-Authenticate": "Bearer"},
    )
  return found


def _inflated(data: bytes, most: int) -> bytes:
  zstandard: Any = optional.require(
    "zstandard", "a compressed request", "tunix[tinker]"
  )
  try:
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
      out = reader.read(most + 1)
  except zstandard.ZstdError as error:
    raise ApiError(400, f"the body is no zstd data: {error}") from error
  if len(out) > most:
    raise ApiError(413, f"the body is larger than {most} bytes", code="too_large")
  return out


def _api_error(error: TinkerError, settings: ServeSettings) -> ApiError:
  status = _STATUS.get(type(error), 400)
  again = {"Retry-After": str(settings.retry_after)} if status == 429 else {}
  return ApiError(status, error.message, code=error.code, headers=again)


def _waiting(
  bell: _Bell, context: Context
) -> Callable[[TinkerCall, Service], Awaitable[Answer]]:
  """Returns the route that waits for a result, and else answers `try_again`."""

  async def retrieve(call: TinkerCall, service: Service) -> Answer:
    id = wire.text(call.body, "request_id")
    until = time.monotonic() + service.settings.wait_seconds
    while True:
      event = bell.event
      result = service.result(call.tenant, id)
      if result is not None:
        break
      left = until - time.monotonic()
      if left <= 0 or context.gate.is_draining:
        state = "paused_capacity" if service.is_short(id) else "active"
        return Answer(
          content={"type": "try_again", "request_id": id, "queue_state": state}
        )
      try:
        async with asyncio.timeout(min(left, _POLL)):
          await event.wait()
      except TimeoutError:
        continue
    if call.wants_proto and wire.has_proto(result):
      data = await asyncio.to_thread(wire.to_proto, result)
      return Answer(content=data, media_type=_PROTO)
    return Answer(content=await asyncio.to_thread(wire.to_json, result))

  return retrieve


# The routes of requests. Each runs in a thread.


def _future(id: str, model: str | None = None) -> dict[str, Any]:
  return {"request_id": id, **({} if model is None else {"model_id": model})}


def _client_config(call: TinkerCall, service: Service) -> dict[str, Any]:
  return {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": importlib.util.find_spec("zstandard") is not None,
    "sample_cancel_enabled": True,
  }


def _dynamic_config(call: TinkerCall, service: Service) -> dict[str, Any]:
  return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


def _capabilities(call: TinkerCall, service: Service) -> dict[str, Any]:
  most = service.settings.max_tokens
  context = service.max_context
  return {
    "supported_models": [
      {
        "model_name": service.name,
        "max_context_length": most if context is None else min(most, context),
        "trainable": True,
        "sampleable": context is not None,
      }
    ]
  }


def _create_session(call: TinkerCall, service: Service) -> dict[str, Any]:
  metadata = {
    name: call.body.get(name) for name in ("user_metadata", "display_name", "tags")
  }
  return {
    "type": "create_session",
    "session_id": service.create_session(call.tenant, metadata),
    # The SDK logs a warning, which Python prints. Its client sets train_unembed by
    # default, so a refusal would break every program.
    "warning_message": "this service adapts attention and feed-forward layers, and not "
    "the unembedding: train_unembed=True has no effect",
  }


def _heartbeat(call: TinkerCall, service: Service) -> dict[str, Any]:
  service.session(call.tenant, wire.text(call.body, "session_id"))
  return {"type": "session_heartbeat"}


def _create_model(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  rest.check_optimizer(body.get("optimizer_config"))
  given = body.get("lora_config")
  if not isinstance(given, dict):
    raise TinkerError(
      "lora_config is missing; expected the rank of an adapter. Send it"
    )
  try:
    spec = AdapterSpec(
      rank=wire.integer(given, "rank"),
      train_attn=bool(given.get("train_attn", True)),
      train_mlp=bool(given.get("train_mlp", True)),
    )
  except (TypeError, ValueError) as error:
    raise TinkerError(f"lora_config: {error}") from error
  id, model = service.create_model(
    call.tenant,
    wire.text(body, "session_id"),
    wire.integer(body, "model_seq_id"),
    spec,
    base_model=wire.text(body, "base_model"),
    seed=None if given.get("seed") is None else wire.integer(given, "seed"),
    metadata=body.get("user_metadata"),
  )
  return _future(id, model)


def _forward(call: TinkerCall, service: Service) -> dict[str, Any]:
  return _gradient(call, service, backward=False)


def _forward_backward(call: TinkerCall, service: Service) -> dict[str, Any]:
  return _gradient(call, service, backward=True)


def _gradient(call: TinkerCall, service: Service, backward: bool) -> dict[str, Any]:
  request = (
    wire.gradient_from_json(call.body, backward)
    if call.proto is None
    else wire.gradient_from_proto(call.proto)
  )
  id = service.forward_backward(
    call.tenant,
    request.model,
    request.number,
    request.read_rows,
    request.loss,
    request.config,
    backward=request.backward,
  )
  return _future(id, request.model)


def _optim_step(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  model, number = wire.text(body, "model_id"), wire.integer(body, "seq_id")
  given = body.get("adam_params")
  params = {"adam_params": given} if given is None else given
  id = service.optim_step(call.tenant, model, number, params)
  return _future(id, model)


def _save(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  model = wire.text(body, "model_id")
  id = service.save_weights(
    call.tenant,
    model,
    wire.integer(body, "seq_id"),
    wire.optional_text(body, "path"),
    overwrite=bool(body.get("overwrite")),
    ttl_seconds=body.get("ttl_seconds"),
    metadata=body.get("user_metadata"),
  )
  return _future(id, model)


def _save_for_sampler(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  model = wire.text(body, "model_id")
  id = service.save_weights_for_sampler(
    call.tenant,
    model,
    wire.integer(body, "seq_id"),
    wire.optional_text(body, "path"),
    sampler_number=body.get("sampling_session_seq_id"),
    ttl_seconds=body.get("ttl_seconds"),
    metadata=body.get("user_metadata"),
  )
  return _future(id, model)


def _load(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  path, optimizer = wire.text(body, "path"), bool(body.get("optimizer"))
  rest.check_optimizer(body.get("optimizer_config"))
  if (model := wire.optional_text(body, "model_id")) is not None:
    number = wire.integer(body, "seq_id")
    id = service.load_weights(call.tenant, model, number, path, optimizer=optimizer)
    return _future(id, model)
  id, model = service.create_from_checkpoint(
    call.tenant,
    wire.text(body, "session_id"),
    wire.integer(body, "model_seq_id"),
    path,
    optimizer=optimizer,
    base_model=wire.optional_text(body, "base_model"),
    metadata=body.get("user_metadata"),
  )
  return _future(id, model)


def _unload(call: TinkerCall, service: Service) -> dict[str, Any]:
  model = wire.text(call.body, "model_id")
  return _future(service.unload_model(call.tenant, model), model)


def _create_sampling_session(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  service.check_base(wire.optional_text(body, "base_model"))
  id = service.create_sampling_session(
    call.tenant,
    wire.text(body, "session_id"),
    wire.integer(body, "sampling_session_seq_id"),
    wire.optional_text(body, "model_path"),
  )
  return {"type": "create_sampling_session", "sampling_session_id": id}


def _sample(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  prompt = wire.model_input(body.get("prompt"))
  id = service.sample(
    call.tenant,
    wire.text(body, "sampling_session_id"),
    wire.integer(body, "seq_id"),
    prompt,
    body,
  )
  count = body.get("num_samples", 1)
  return {"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(count)]}


def _cancel(call: TinkerCall, service: Service) -> dict[str, Any]:
  service.cancel(call.tenant, wire.text(call.body, "request_id"))
  return {}


_ROUTES: dict[tuple[str, str], Route] = {
  ("POST", "client/config"): _client_config,
  ("POST", "client/dynamic_config"): _dynamic_config,
  ("GET", "get_server_capabilities"): _capabilities,
  ("POST", "create_session"): _create_session,
  ("POST", "session_heartbeat"): _heartbeat,
  ("POST", "create_model"): _create_model,
  ("POST", "unload_model"): _unload,
  ("POST", "forward"): _forward,
  ("POST", "forward_backward"): _forward_backward,
  ("POST", "optim_step"): _optim_step,
  ("POST", "save_weights"): _save,
  ("POST", "save_weights_for_sampler"): _save_for_sampler,
  ("POST", "load_weights"): _load,
  ("POST", "create_sampling_session"): _create_sampling_session,
  ("POST", "asample"): _sample,
  ("POST", "cancel_future"): _cancel,
}
