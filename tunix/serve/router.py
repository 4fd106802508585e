"""An HTTP router over several servers: it passes requests on and answers back.

A request goes to the host that received the longest prefix of its prompt. If that host
fails before the first byte of its answer, the request goes to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import Any

from tunix.serve import status
from tunix.serve.app import application
from tunix.serve.http.bodies import Answer, Call, Relay, to_json
from tunix.serve.http.errors import ApiError
from tunix.serve.http.gate import Gate
from tunix.serve.http.hosts import Host, HostError, Hosts, digests_of
from tunix.serve.metrics import Metrics
from tunix.serve.openai.running import Clock, DrainDeadline
from tunix.serve.server import make_server, run_until_signal
from tunix.serve.settings import HttpSettings, RouteSettings

_PASSED = (
  *("content-type", "retry-after", "x-ignored-fields", "cache-control"),
  *("x-accel-buffering", "content-security-policy", "x-content-type-options"),
)
# A host that answers so has not begun the request, and another one may take it.
_ELSEWHERE = (429, 503)


class RouteContext:
  """The parts of a router.

  Attributes:
    settings: address, access and limits of the router itself.
    hosts: the hosts.
    gate: limits on running and waiting requests.
    drain: time at which a shutdown ends running requests.
    metrics: metrics of the router.
  """

  def __init__(self, settings: HttpSettings, route: RouteSettings):
    self.settings, self.hosts = settings, Hosts(route)
    self.gate = Gate(
      settings.max_concurrent,
      settings.max_queue,
      settings.queue_timeout,
      settings.retry_after,
    )
    self.drain = DrainDeadline()
    self.metrics = Metrics(self._gauges)
    self.retries = 0

  def _gauges(self) -> dict[str, float]:
    return {
      "router_hosts": len(list(self.hosts)),
      "router_hosts_ready": sum(host.problem is None for host in self.hosts),
      "router_retries": self.retries,
      "requests_running": self.gate.running,
      "requests_waiting": self.gate.waiting,
    }

  def clock(self) -> Clock:
    """Returns the time of a call that begins now."""
    settings = self.settings
    return Clock(settings.request_timeout, self.drain, settings.retry_after)

  def start_drain(self) -> None:
    """Refuses new requests; those that run have `drain_timeout` left."""
    if self.drain.at is None:
      self.drain.at = time.monotonic() + self.settings.drain_timeout
      self.gate.drain()


def make_router(settings: HttpSettings, route: RouteSettings) -> Any:
  """Returns the ASGI application of a router; it needs the lifespan protocol.

  Args:
    settings: address, access and limits of the router.
    route: the hosts.

  Raises:
    ImportError: a package of the extra `serve` is missing.
  """
  context = RouteContext(settings, route)

  @contextlib.asynccontextmanager
  async def lifespan() -> AsyncIterator[None]:
    async with context.hosts:
      yield

  routes: dict[tuple[str, str], Any] = {
    (method, path): functools.partial(_forward, method, path)
    for method, path in _FORWARDED
  }
  routes |= {("POST", path): _refuse for path in _OF_HOSTS}
  routes |= {
    ("GET", "/health"): _health,
    ("GET", "/ready"): _ready,
    ("GET", "/metrics"): status.metrics,
  }
  return application(routes, context, lifespan)


def route(
  settings: HttpSettings,
  route: RouteSettings,
  on_start: Callable[[str], None] | None = None,
) -> None:
  """Routes until SIGTERM or SIGINT.

  Args:
    settings: address, access and limits of the router.
    route: the hosts.
    on_start: called with the address once clients can connect.

  Raises:
    ImportError: a package of the extra `serve` is missing.
    OSError: the address cannot be used.
  """
  run_until_signal(make_server(make_router(settings, route), settings, on_start))


_FORWARDED = (
  ("GET", "/"),
  ("GET", "/v1/models"),
  ("GET", "/v1/models/{model:path}"),
  ("GET", "/tokenizer_info"),
  ("POST", "/v1/completions"),
  ("POST", "/v1/chat/completions"),
  ("POST", "/inference/v1/generate"),
  ("POST", "/tokenize"),
  ("POST", "/detokenize"),
)
_OF_HOSTS = (
  *("/pause", "/resume", "/update_weights"),
  *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


async def _refuse(call: Call, context: RouteContext) -> Answer:
  raise ApiError(404, "the router passes no administration on: send it to each host")


async def _health(call: Call, context: RouteContext) -> Answer:
  return Answer(content={"status": "ok"})


async def _ready(call: Call, context: RouteContext) -> Answer:
  problems = context.hosts.problems
  problem = "the router is shutting down" if context.gate.is_draining else None
  if len(problems) == len(list(context.hosts)):
    problem = problem or f"no host is ready: {'; '.join(problems)}"
  return status.state(problem, "; ".join(problems) or None)


async def _forward(
  method: str, path: str, call: Call, context: RouteContext
) -> Answer | Relay:
  """Passes a request on to one host after the other until one answers.

  Raises:
    ApiError: no host answers, the router is full, or the time is over.
  """
  if path.endswith("{model:path}"):
    path = _model_path(call.query["model"])
  clock, hosts, tried = context.clock(), context.hosts, set()
  data, digests = await asyncio.to_thread(_read, path, call)
  refusal: Answer | None = None
  problems: list[str] = []
  async with contextlib.AsyncExitStack() as stack:
    await stack.enter_async_context(context.gate.entered())
    while host := hosts.choose(digests, tried):
      context.retries += bool(tried)
      tried.add(host.number)
      hosts.record(digests, host)
      async with contextlib.AsyncExitStack() as attempt:
        attempt.enter_context(_counted(host))
        try:
          answer = await _ask(context, host, method, path, data, clock, attempt)
        except HostError as error:
          problems.append(str(error))
          continue
        if isinstance(answer, Answer):
          if answer.status not in _ELSEWHERE:
            return answer
          refusal = answer
          continue
        stack.push_async_exit(attempt.pop_all())
        return dataclasses.replace(answer, close=stack.pop_all().aclose)
  if refusal is not None:
    return refusal
  raise ApiError(
    503,
    f"no host answers: {'; '.join(problems or hosts.problems)}",
    code="no_host",
    headers={"Retry-After": str(context.settings.retry_after)},
  )


def _model_path(model: str) -> str:
  """Returns the path of a model.

  Raises:
    ApiError: the name would lead to another route of the host, with the router's key.
  """
  if {".", ".."} & set(model.replace("\\", "/").split("/")):
    raise ApiError(
      404, f"the model is {model[:100]!r}: GET /v1/models has the names of the models"
    )
  return f"/v1/models/{urllib.parse.quote(model)}"


def _read(path: str, call: Call) -> tuple[bytes, list[bytes]]:
  """Returns the body for the host, and the digests of the prompt."""
  return to_json(call.body), digests_of(path, call.body)


@contextlib.contextmanager
def _counted(host: Host):
  host.running += 1
  try:
    yield
  finally:
    host.running -= 1


async def _ask(
  context: RouteContext,
  host: Host,
  method: str,
  path: str,
  data: bytes,
  clock: Clock,
  stack: contextlib.AsyncExitStack,
) -> Answer | Relay:
  """Returns a host's answer: a stream once its first bytes are there, or all of it.

  Args:
    context: the router.
    host: the host.
    method, path, data: the request.
    clock: time limit of the call.
    stack: closes the connection to the host.

  Raises:
    HostError: the host failed before it answered.
    ApiError: the time is over.
  """
  hosts = context.hosts
  request = hosts.client.build_request(
    method,
    f"{host.url}{path}",
    content=data if method == "POST" else None,
    headers={"Content-Type": "application/json"} if method == "POST" else None,
  )
  bounded = functools.partial(_bounded, hosts, host, clock)
  response = await bounded(hosts.client.send(request, stream=True))
  stack.push_async_callback(response.aclose)
  headers = {k.title(): v for k, v in response.headers.items() if k in _PASSED}
  kind = headers.pop("Content-Type", "application/octet-stream")
  code = response.status_code
  if code == 401:  # the client's key was right: it is the router's that is not
    raise HostError(f"{host.url} refuses the router's key for the hosts")
  if not kind.startswith("text/event-stream"):
    content = await bounded(response.aread())
    return Answer(status=code, content=content, media_type=kind, headers=headers)
  parts = response.aiter_raw()
  first = await bounded(_next(parts))

  async def chunks() -> AsyncIterator[bytes]:
    part = first
    while part is not None:
      yield part
      try:
        part = await bounded(_next(parts))
      except HostError as error:
        raise ApiError(
          502,
          f"the host failed in the middle of its answer: {error}",
          code="host_failed",
        ) from error

  headers["Content-Type"] = kind
  return Relay(status=code, headers=headers, chunks=chunks(), close=response.aclose)


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
  return await anext(parts, None)


async def _bounded(hosts: Hosts, host: Host, clock: Clock, work: Any) -> Any:
  """Waits for a host until it fails, is lost, or the time of the call is over.

  Raises:
    HostError: the host failed, or does not answer checks any more.
    ApiError: the time is over.
  """
  task = asyncio.ensure_future(work)
  try:
    async with host.wait():
      while not task.done():
        # Short looks, as a shutdown shortens the time that is left.
        await asyncio.wait({task}, timeout=min(1.0, clock.left()))
        if not task.done():
          clock.check()
      return task.result()
  except hosts.http.TransportError as error:
    problem = f"{host.url} failed: {str(error) or type(error).__name__}"
    hosts.lose(host, problem)
    raise HostError(problem) from error
  except TimeoutError as error:
    raise HostError(f"{host.url} does not answer: {host.problem}") from error
  finally:
    task.cancel()
