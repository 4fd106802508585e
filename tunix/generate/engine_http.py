"""JSON over HTTP with a time limit, and errors that name a remedy."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from tunix.generate.engine_rows import EngineError
from tunix.utils import checks

_MAX_CONCURRENT = 256  # requests; the engine queues the ones that it cannot run yet


class Refused(ValueError):
  """The server understood a request and refused it.

  Attributes:
    status: HTTP status, 400 to 499.
  """

  def __init__(self, message: str, status: int):
    super().__init__(message)
    self.status = status


class Client:
  """A client of one server. Threads can share it: each call opens its own connection.

  Attributes:
    url: address of the server, without a slash at the end.
  """

  def __init__(self, url: str, timeout_s: float):
    """Checks the address; no connection is opened yet.

    Args:
      url: "http://host:port" or "https://host:port".
      timeout_s: longest time to wait for an answer, in seconds.

    Raises:
      ValueError: the address has another form.
    """
    checks.number("timeout_s", timeout_s, checks.POSITIVE)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
      raise ValueError(f"url is {url!r}, expected an address: give http://host:port")
    self.url = url.rstrip("/")
    self._parts = parts
    self._timeout_s = timeout_s

  def ask(self, method: str, path: str, body: Any = None) -> Any:
    """Sends one request and returns the parsed JSON; None for an empty answer.

    Raises:
      Refused: the server refuses the request; its message is quoted.
      EngineError: no server, no answer in time, an error inside the server, or an
        answer that is not JSON.
    """
    status, text = self._exchange(method, path, body)
    try:
      answer = json.loads(text) if text else None
    except ValueError as error:
      raise EngineError(
        f"{self.url}{path} answered {text[:200]!r}, which is not JSON: is it the "
        "engine's address?"
      ) from error
    if 400 <= status < 500:
      raise Refused(f"{self.url}{path} refuses: {_message(answer)}", status)
    if status >= 300:
      raise EngineError(f"{self.url}{path} failed ({status}): {_message(answer)}")
    return answer

  def ask_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
    """POSTs all bodies concurrently and returns the answers in the same order.

    Raises:
      Refused: see `ask`; raised when every request has ended.
      EngineError: see `ask`; raised when every request has ended.
    """
    workers = min(len(bodies), _MAX_CONCURRENT)
    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
      return list(threads.map(lambda body: self.ask("POST", path, body), bodies))

  def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
    secure = self._parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    deadline = time.monotonic() + self._timeout_s
    connection = kind(self._parts.netloc, timeout=self._timeout_s)
    data = None if body is None else json.dumps(body).encode()
    try:
      place = self._parts.path.rstrip("/") + path
      connection.request(method, place, data, {"Content-Type": "application/json"})
      response = connection.getresponse()
      # The timeout of the socket applies to one read. A server that sends one byte at a
      # time would never reach it, so the whole answer has a deadline too.
      parts = []
      while part := response.read1(1 << 20):
        parts.append(part)
        if time.monotonic() > deadline:
          raise TimeoutError
      return response.status, b"".join(parts)
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


def _message(answer: Any) -> str:
  """Returns the message of an error answer, in the form of vLLM or FastAPI."""
  if isinstance(answer, dict):
    error = answer.get("error", answer.get("detail", answer))
    return str(error.get("message", error) if isinstance(error, dict) else error)
  return str(answer)
