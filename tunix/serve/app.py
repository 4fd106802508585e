"""The ASGI application; the only file that imports the web framework."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tunix.data.images import ImageReader
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.replicas import Replicas
from tunix.serve import admin, status
from tunix.serve.http.bodies import (
  LAST_EVENT,
  Answer,
  Call,
  LargeBodies,
  Receive,
  Relay,
  Scope,
  Send,
  Stream,
  event,
  read_body,
  read_json,
)
from tunix.serve.http.errors import ApiError, as_api_error
from tunix.serve.http.guard import check
from tunix.serve.openai import lifecycle, tokens
from tunix.serve.openai.chat import ChatJob
from tunix.serve.openai.completions import CompletionJob
from tunix.serve.openai.context import Context, Grammars, LoadModel
from tunix.serve.openai.images import read_size
from tunix.serve.settings import ServeSettings
from tunix.utils import optional

_LOG = logging.getLogger(__name__)
# Bytes from which on a body is parsed in a thread: 1 MiB takes about 10 ms.
_LARGE_BODY = 2**20
_PIECE = 2**18  # bytes of an answer that are sent together
_CLIENT_GONE = 499  # nginx's status for it; it is only counted

Route = Callable[[Call, Context], Awaitable[Answer | Stream | Relay]]
More = Callable[[Context], Mapping[tuple[str, str], Any]]


def make_app(
  driver: Driver | Replicas,
  settings: ServeSettings | None = None,
  *,
  grammars: Grammars | None = None,
  load_model: LoadModel | None = None,
  images: ImageReader | None = None,
  more: More | None = None,
) -> Any:
  """Returns the application of a server.

  Args:
    driver: a started driver; `driver.engine` is its engine.
    settings: address, access and limits; None: the defaults.
    grammars: builder of constraints, see `engine.grammar.Grammars`; None: requests with
      `response_format` are refused.
    load_model: loads the model of a checkpoint folder; None: `/update_weights` is
      refused.
    images: reader of images, for a model with a vision tower; None: requests with
      images are refused.
    more: returns further ASGI applications by (method, path), given the context.

  Returns:
    A Starlette application. `app.state.context` is its `Context`.

  Raises:
    ImportError: a package of the extra `serve` is missing.
  """
  settings = ServeSettings() if settings is None else settings
  context = Context(driver, settings, grammars, load_model, images)
  return application(_ROUTES, context, more=None if more is None else more(context))


def application(
  routes: Mapping[tuple[str, str], Any],
  context: Any,
  lifespan: Any = None,
  more: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
  """Returns an application of some routes.

  Args:
    routes: a `Route` for each (method, path).
    context: what the routes get; it has `settings`, `metrics` and `start_drain`.
    lifespan: asynchronous context manager around the life of the server, or None.
    more: ASGI applications by (method, path), which read their requests themselves.
  """
  optional.require("starlette", "the server", "tunix[serve]")
  from starlette.applications import Starlette
  from starlette.exceptions import HTTPException
  from starlette.routing import Route as Path

  endpoints = {
    (method, path): Endpoint(route, path, context)
    for (method, path), route in routes.items()
  }
  paths = [
    Path(path, endpoint, methods=[method])
    for (method, path), endpoint in {**endpoints, **(more or {})}.items()
  ]
  app = Starlette(
    routes=paths,
    exception_handlers={HTTPException: _refused},
    lifespan=None if lifespan is None else lambda _: lifespan(),
  )
  app.router.redirect_slashes = False
  app.state.context = context
  return app


async def _completions(call: Call, context: Context) -> Answer | Stream:
  return await lifecycle.serve(context, call, CompletionJob)


async def _chat(call: Call, context: Context) -> Answer | Stream:
  return await lifecycle.serve(context, call, ChatJob)


async def _generate(call: Call, context: Context) -> Answer | Stream:
  return await lifecycle.serve(context, call, tokens.GenerateJob)


async def _tokenize(call: Call, context: Context) -> Answer:
  work = context.readers.run(read_size(call), tokens.tokenize, call, context)
  return await lifecycle.within(context.clock(), work)


async def _detokenize(call: Call, context: Context) -> Answer:
  work = context.readers.run(call.size, tokens.detokenize, call, context)
  return await lifecycle.within(context.clock(), work)


_ROUTES: dict[tuple[str, str], Route] = {
  ("GET", "/"): status.page,
  ("GET", "/health"): status.health,
  ("GET", "/ready"): status.ready,
  ("GET", "/metrics"): status.metrics,
  ("GET", "/v1/models"): status.models,
  ("GET", "/v1/models/{model:path}"): status.model,
  ("POST", "/v1/completions"): _completions,
  ("POST", "/v1/chat/completions"): _chat,
  ("POST", "/inference/v1/generate"): _generate,
  ("POST", "/tokenize"): _tokenize,
  ("POST", "/detokenize"): _detokenize,
  ("GET", "/tokenizer_info"): tokens.tokenizer_info,
  ("POST", "/pause"): admin.pause,
  ("POST", "/resume"): admin.resume,
  ("GET", "/is_paused"): admin.is_paused,
  ("POST", "/v1/load_lora_adapter"): admin.load_adapter,
  ("POST", "/v1/unload_lora_adapter"): admin.unload_adapter,
  ("POST", "/update_weights"): admin.update_weights,
}


async def _refused(request: object, error: Any) -> Any:
  """Returns the answer for an unknown path or a wrong method."""
  from starlette.responses import Response

  messages = {404: "this server has no such path", 405: "the path has another method"}
  text = messages.get(error.status_code, error.detail)
  problem = ApiError(error.status_code, f"{text}: check the URL and the method")
  answer = Answer(status=problem.status, content=problem.body())
  return Response(answer.data(), problem.status, media_type=answer.media_type)


class Endpoint:
  """An ASGI application for one route.

  If the client disconnects before the answer is complete, the work is cancelled.
  """

  def __init__(self, route: Route, path: str, context: Context):
    self._route, self._path, self._context = route, path, context
    self._settings = context.settings

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    started, sender = time.monotonic(), _Sender(send, self._settings.client_timeout)
    try:
      await self._race(scope, receive, sender)
    finally:
      code = sender.status if sender.is_over else _CLIENT_GONE
      self._context.metrics.answered(self._path, code, time.monotonic() - started)

  async def _race(self, scope: Scope, receive: Receive, sender: _Sender) -> None:
    try:
      call = await self.read(scope, receive)
    except Exception as error:  # each answer has OpenAI's form, also that of a bug
      await self._fail(error, sender)
      return
    if call is None:
      return
    work = asyncio.ensure_future(self._respond(call, sender))
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
      await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
      gone.cancel()
      work.cancel()  # without effect on finished work
      await asyncio.gather(work, gone, return_exceptions=True)
    if not work.cancelled():
      work.result()

  async def read(self, scope: Scope, receive: Receive) -> Call | None:
    """Reads a request; None if the client went away.

    Raises:
      ApiError: the request has no access, or a body that is refused.
    """
    request = request_of(scope)
    # A router and a host of rollouts have no tenants.
    has_tenants = isinstance(self._context, Context)
    keys = self._context.tenants.keys if has_tenants else None
    tenant = check(self._settings, scope["path"], request.headers, keys)
    query = {**request.query_params, **request.path_params}
    if scope["method"] != "POST":
      return Call(query=query, tenant=tenant)
    try:
      async with asyncio.timeout(self._settings.client_timeout):
        data = await read_body(request.headers, receive, self._settings.max_body_bytes)
    except TimeoutError as error:
      raise ApiError(408, "the body did not arrive in time", code="timeout") from error
    if data is None:
      return None
    if not data:
      return Call(query=query, tenant=tenant)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of any web page has other types
      raise ApiError(415, f"Content-Type is {kind[:100]!r}, expected application/json")
    if len(data) < _LARGE_BODY:
      return Call(body=read_json(data), query=query, size=len(data), tenant=tenant)
    body = await LargeBodies.here().read(data)
    return Call(body=body, query=query, size=len(data), tenant=tenant)

  async def _respond(self, call: Call, sender: _Sender) -> None:
    try:
      context = self._context
      if call.tenant is not None and isinstance(context, Context):
        context = context.seen_by(call.tenant)
      answer = await self._route(call, context)
      try:
        if isinstance(answer, Stream | Relay):
          await sender.stream(answer)
        else:
          await sender.answer(answer)
      finally:
        await answer.close()
    except Exception as error:  # see `_race`
      await self._fail(error, sender)

  async def _fail(self, error: Exception, sender: _Sender) -> None:
    if isinstance(error, _ClientStuck):
      return
    problem = as_api_error(error)
    if problem is None:
      _LOG.exception("%s failed", self._path, exc_info=error)
      problem = ApiError(500, "the server failed: see its log", code="internal_error")
    if sender.status == 0:
      await sender.answer(_error_answer(problem))
    else:  # a stream has begun: the error is its last event
      await sender.last(event(problem.body()))


class _ClientStuck(Exception):
  """The client does not take its answer."""


class _Sender:
  """Sends one answer; each part has a bounded time.

  Attributes:
    status: status that was sent; 0: none yet.
    is_over: all of the answer was sent.
  """

  def __init__(self, send: Send, timeout: float):
    self._send, self._timeout = send, timeout
    self.status, self.is_over = 0, False

  async def answer(self, answer: Answer) -> None:
    data = answer.data()
    await self._start(answer.status, answer.media_type, answer.headers, len(data))
    await self.last(data)

  async def stream(self, stream: Stream | Relay) -> None:
    if isinstance(stream, Relay):
      kind = stream.headers["Content-Type"]
      await self._start(stream.status, kind, stream.headers)
      async for data in stream.chunks:
        await self._part(data, True)
      await self.last(b"")
      return
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **stream.headers}
    await self._start(200, "text/event-stream; charset=utf-8", headers)
    async for content in stream.events:
      await self._part(event(content), True)
    await self.last(LAST_EVENT)

  async def last(self, data: bytes) -> None:
    # A piece waits until the client took those before. All at once would stay in memory
    # for as long as the client reads nothing.
    first = 0
    while len(data) - first > _PIECE:
      await self._part(data[first : first + _PIECE], True)
      first += _PIECE
    await self._part(data[first:], False)
    self.is_over = True

  async def _start(
    self, code: int, kind: str, headers: Mapping[str, str], length: int | None = None
  ) -> None:
    pairs = {"Content-Type": kind, **headers}
    if length is not None:
      pairs["Content-Length"] = str(length)
    raw = [(k.lower().encode(), v.encode("latin-1")) for k, v in pairs.items()]
    message = {"type": "http.response.start", "status": code, "headers": raw}
    self.status = code
    await self._bounded(message)

  async def _part(self, data: bytes, more: bool) -> None:
    message = {"type": "http.response.body", "body": data, "more_body": more}
    await self._bounded(message)

  async def _bounded(self, message: dict[str, Any]) -> None:
    try:
      async with asyncio.timeout(self._timeout):
        await self._send(message)
    except (OSError, TimeoutError) as error:
      raise _ClientStuck from error


def _error_answer(error: ApiError) -> Answer:
  return Answer(status=error.status, content=error.body(), headers=error.headers)


def request_of(scope: Scope) -> Any:
  """Returns the web framework's view of a request."""
  from starlette.requests import Request

  return Request(scope)


async def _disconnected(receive: Receive) -> None:
  while (await receive())["type"] != "http.disconnect":
    pass
