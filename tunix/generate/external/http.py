"""JSON and bytes over HTTP with a time limit, and errors that name a remedy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.generate.external.rows import EngineError
from tunix.utils import checks

_JSON, _BYTES = "application/json", "application/octet-stream"
_MAX_CONCURRENT = 256  # requests; the engine queues the ones that it cannot run yet


class Refused(ValueError):
  """The server understood a request and refused it.

  Attributes:
    status: HTTP status, 400 to 499.
    code: short name of the error in an answer of OpenAI's form; None: it has none.
  """

  def __init__(self, message: str, status: int, code: str | None = None):
    super().__init__(message)
    self.status, self.code = status, code


class Client:
  """A client of one server. Threads can share it: each call opens its own connection.

  Attributes:
    url: address of the server, without a slash at the end.
  """

  def __init__(
    self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None
  ):
    """Checks the address; no connection is opened yet.

    Args:
      url: "http://host:port" or "https://host:port".
      timeout_s: longest time to wait for an answer, in seconds.
      headers: further headers of each request.

    Raises:
      ValueError: the address has another form.
    """
    checks.number("timeout_s", timeout_s, checks.POSITIVE)
    try:
      parts = urllib.parse.urlsplit(url)
      is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
      is_address &= parts.port is None or parts.port > 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
      is_address = False
    if not is_address:
      raise ValueError(f"url is {url!r}, expected an address: give http://host:port")
    self.url = url.rstrip("/")
    self._parts = parts
    self._timeout_s = timeout_s
    self._headers = dict(headers or {})

  def ask(self, method: str, path: str, body: object = None) -> Any:
    """Sends one request and returns the parsed JSON; None for an empty answer.

    Raises:
      Refused: the server refuses the request; its message is quoted.
      EngineError: no server, no answer in time, an error inside the server, or an
        answer that is not JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    return self._parsed(path, *self._exchange(method, path, data, _JSON))

  def send(self, path: str, data: object) -> Any:
    """POSTs bytes (an object with a buffer) and returns the parsed JSON; see `ask`."""
    return self._parsed(path, *self._exchange("POST", path, data, _BYTES))

  def events(self, path: str, body: object) -> Iterator[Any]:
    """POSTs a body and yields the server-sent events of the answer, parsed from JSON.

    The time limit applies to each read. Closing the iterator closes the connection.

    Raises:
      Refused: see `ask`.
      EngineError: see `ask`; also if an event is an error, or the answer ends before
        its last event, [DONE].
    """
    with self._opened("POST", path, json.dumps(body).encode(), _JSON) as response:
      if response.status >= 300:
        self._parsed(path, response.status, response.read())
      for line in response:
        name, _, data = line.partition(b":")
        if name != b"data" or not data.strip():
          continue
        if data.strip() == b"[DONE]":
          return
        event = self._parsed(path, response.status, data)
        if isinstance(event, dict) and event.get("error"):
          raise EngineError(f"{self.url}{path} failed: {_message(event)}")
        yield event
    raise EngineError(
      f"{self.url}{path} ended before its answer was complete. Check that the engine "
      "is running"
    )

  def ask_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
    """POSTs all bodies concurrently and returns the answers in the same order.

    Raises:
      Refused: see `ask`; raised when every request has ended.
      EngineError: see `ask`; raised when every request has ended.
    """
    workers = min(len(bodies), _MAX_CONCURRENT)
    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
      return list(threads.map(lambda body: self.ask("POST", path, body), bodies))

  def _parsed(self, path: str, status: int, data: bytes) -> Any:
    try:
      answer = json.loads(data) if data else None
    except ValueError as error:
      raise EngineError(
        f"{self.url}{path} answered {data[:200]!r}, which is not JSON: is it the "
        "engine's address?"
      ) from error
    if 400 <= status < 500:
      text = f"{self.url}{path} refuses: {_message(answer)}"
      raise Refused(text, status, _code(answer))
    if status >= 300:
      raise EngineError(f"{self.url}{path} failed ({status}): {_message(answer)}")
    return answer

  def _exchange(
    self, method: str, path: str, data: object, kind: str
  ) -> tuple[int, bytes]:
    deadline = time.monotonic() + self._timeout_s
    with self._opened(method, path, data, kind) as response:
      # The timeout of the socket applies to one read. A server that sends one byte at a
      # time would never reach it, so the whole answer has a deadline too.
      parts = []
      while part := response.read1(1 << 20):
        parts.append(part)
        if time.monotonic() > deadline:
          raise TimeoutError
      return response.status, b"".join(parts)

  @contextlib.contextmanager
  def _opened(
    self, method: str, path: str, data: Any, kind: str
  ) -> Iterator[http.client.HTTPResponse]:
    """Sends a request; errors of the connection become EngineError."""
    secure = self._parts.scheme == "https"
    opened = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = opened(self._parts.netloc, timeout=self._timeout_s)
    try:
      place = self._parts.path.rstrip("/") + path
      headers = {"Content-Type": kind, **self._headers}
      connection.request(method, place, data, headers)
      yield connection.getresponse()
    except TimeoutError as error:
      raise EngineError(
        f"{self.url}{path} did not answer within {self._timeout_s:g} s. Check that the "
        "engine does not hang, or raise timeout_s"
      ) from error
    except (OSError, http.client.HTTPException) as error:
      raise EngineError(
        f"{self.url} gives no answer ({type(error).__name__}: {error}). Check the "
        "address, and that the engine is running"
      ) from error
    finally:
      connection.close()


def _code(answer: object) -> str | None:
  error = answer.get("error") if isinstance(answer, dict) else None
  return error.get("code") if isinstance(error, dict) else None


def _message(answer: object) -> str:
  """Returns the message of an error answer, in the form of vLLM or FastAPI."""
  if isinstance(answer, dict):
    error = answer.get("error", answer.get("detail", answer))
    return str(error.get("message", error) if isinstance(error, dict) else error)
  return str(answer)
