"""The servers behind a router: their state, and the choice of one for a prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from tunix.generate.engine import prefix_routing
from tunix.generate.engine.prefix_routing import Digest, PrefixIndex
from tunix.serve.http.bodies import to_json
from tunix.serve.settings import RouteSettings
from tunix.utils import optional

# Bytes of a block of a prompt, and blocks that are compared: 64 tokens, 256 KiB.
_BLOCK = 256
_MOST_BLOCKS = 1024
# Digests that are remembered: prompts of 32 MiB together, in about 30 MB of memory.
_DIGESTS = 2**17
# Below the time after which a server closes an idle connection (30 s).
_KEEP_ALIVE = 10.0


class HostError(Exception):
  """A host gave no answer that can be passed on."""


class Host:
  """One server behind the router.

  Attributes:
    url: its address.
    number: its number among the hosts.
    problem: why it gets no requests; None: it is ready.
    running: number of requests that it works on for this router.
  """

  def __init__(self, url: str, number: int):
    self.url, self.number = url.rstrip("/"), number
    self.problem: str | None = "not checked yet"
    self.running = 0
    self.failed_checks = 0
    self._waits: set[asyncio.Timeout] = set()

  @contextlib.asynccontextmanager
  async def wait(self) -> AsyncIterator[None]:
    """Bounds a wait for the host until `end_waits`; then it raises TimeoutError."""
    scope = asyncio.timeout(None)
    self._waits.add(scope)
    try:
      async with scope:
        yield
    finally:
      self._waits.discard(scope)

  def end_waits(self) -> None:
    """Ends the waits that run."""
    at = asyncio.get_running_loop().time()
    for scope in self._waits:
      if not scope.expired():
        scope.reschedule(at)


class Hosts:
  """All hosts.

  Use it as an asynchronous context manager: it checks the hosts while it is open.

  Args:
    settings: addresses and limits.

  Attributes:
    client: the HTTP client.
    http: the package of the client.

  Raises:
    ImportError: the package httpx is missing.
  """

  def __init__(self, settings: RouteSettings):
    self.http: Any = optional.require("httpx", "the router", "tunix[serve]")
    self._settings = settings
    self._hosts = [Host(url, number) for number, url in enumerate(settings.urls)]
    self._index = PrefixIndex(_DIGESTS)
    self.client: Any = None

  def __iter__(self):
    return iter(self._hosts)

  async def __aenter__(self) -> Hosts:
    s, headers = self._settings, {"Accept-Encoding": "identity"}
    if s.host_key is not None:
      headers["Authorization"] = f"Bearer {s.host_key}"
    self.client = self.http.AsyncClient(
      headers=headers,
      # Connections have a bound here; answers are bounded by `Host.wait`.
      timeout=self.http.Timeout(None, connect=s.check_timeout),
      limits=self.http.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE),
      trust_env=False,  # a proxy of the environment is not for the hosts
    )
    await self._check_all()
    self._watch = asyncio.create_task(self._check_for_ever())
    return self

  async def __aexit__(self, *error: object) -> None:
    self._watch.cancel()
    await asyncio.gather(self._watch, return_exceptions=True)
    await self.client.aclose()

  def choose(self, digests: Sequence[Digest], tried: Collection[int]) -> Host | None:
    """Returns a ready host for a prompt, or None.

    Args:
      digests: digests of the prompt, see `digests_of`.
      tried: numbers of hosts that are left out.
    """
    able = [h for h in self._hosts if h.problem is None and h.number not in tried]
    if not able:
      return None
    loads = {host.number: host.running for host in able}
    lengths = self._index.lengths(digests, loads)
    most = min(loads.values()) + self._settings.max_lead
    return self._hosts[prefix_routing.choose(lengths, loads, most)]

  def record(self, digests: Sequence[Digest], host: Host) -> None:
    """Records that a host receives a prompt."""
    self._index.record(digests, host.number)

  def lose(self, host: Host, problem: str) -> None:
    """Takes a host out until a check succeeds, and forgets what its cache held."""
    if host.problem is None:
      self._index.forget(host.number)
    host.problem = problem

  @property
  def problems(self) -> list[str]:
    """Says of each host that is not ready why it is not."""
    return [f"{h.url}: {h.problem}" for h in self._hosts if h.problem is not None]

  async def _check_for_ever(self) -> None:
    while True:
      await asyncio.sleep(self._settings.check_interval)
      await self._check_all()

  async def _check_all(self) -> None:
    await asyncio.gather(*map(self._check, self._hosts))

  async def _check(self, host: Host) -> None:
    s = self._settings
    try:
      async with asyncio.timeout(s.check_timeout):
        answer = await self.client.get(f"{host.url}/ready")
      content = answer.json()
      reason = content.get("reason") if isinstance(content, dict) else None
    except (self.http.TransportError, TimeoutError, ValueError) as error:
      host.failed_checks += 1
      problem = str(error) or type(error).__name__
      self.lose(host, f"GET /ready failed within {s.check_timeout:g} s: {problem}")
      if host.failed_checks >= s.max_failed_checks:
        host.end_waits()
      return
    host.failed_checks = 0
    is_ready = answer.status_code == 200
    host.problem = None if is_ready else f"GET /ready: {answer.status_code}, {reason}"


def digests_of(path: str, body: dict[str, Any]) -> list[Digest]:
  """Returns the digests of the blocks of a request's prompt.

  Args:
    path: path of the route. Prompts of different routes share nothing.
    body: the request. Its prompt may be malformed: the host says so.
  """
  prompt = body.get("prompt", body.get("token_ids"))
  if "messages" in body:
    # A template writes the tools first.
    messages = body["messages"]
    rows = messages if isinstance(messages, list) else [messages]
    prompt = [body.get("tools"), *rows]
  if prompt is None:
    return []
  # Without its end, so that the next turn of a conversation begins with this one.
  data = to_json(prompt)[:-1][: _BLOCK * _MOST_BLOCKS]
  whole = len(data) // _BLOCK
  blocks = (data[n * _BLOCK : (n + 1) * _BLOCK] for n in range(whole))
  return prefix_routing.chained(to_json([path, body.get("model")]), blocks)
