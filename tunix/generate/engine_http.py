"""JSON over HTTP, bounded in time, with errors that say what to do."""

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

_AT_ONCE = 256  # requests; the engine queues what it cannot run


class Refused(ValueError):
  """The server understood, and will not do it.

  Attributes:
    status: of HTTP, 400 to 499.
  """

  def __init__(self, message: str, status: int):
    super().__init__(message)
    self.status = status


class Client:
  """Asks one server. Safe to use from several threads: each call has a connection."""

  def __init__(self, url: str, timeout_s: float):
    """Takes "http://host:port" and the most seconds that an answer may take.

    Raises:
      ValueError: another kind of address.
    """
    checks.number("timeout_s", timeout_s, checks.POSITIVE)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
      raise ValueError(f"the engine's address is {url!r}: give http://host:port")
    self.url = url.rstrip("/")
    self._parts = parts
    self._timeout_s = timeout_s

  def ask(self, method: str, path: str, body: Any = None) -> Any:
    """The parsed answer; None for an empty one.

    Raises:
      Refused: the server refuses the request, with its own words.
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
    """POSTs all of them at once; the answers in the order of `bodies`.

    Raises: as `ask`, when all have an answer.
    """
    with concurrent.futures.ThreadPoolExecutor(min(len(bodies), _AT_ONCE)) as threads:
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
      parts = []
      while part := response.read1(1 << 20):
        parts.append(part)
        if time.monotonic() > deadline:
          raise TimeoutError
      return response.status, b"".join(parts)
    except TimeoutError as error:
      raise EngineError(
        f"{self.url}{path} did not answer within {self._timeout_s:g} s: the engine "
        "hangs, or raise timeout_s"
      ) from error
    except (OSError, http.client.HTTPException) as error:
      raise EngineError(
        f"{self.url} gives no answer ({type(error).__name__}: {error}): the engine is "
        "dead, or was never there"
      ) from error
    finally:
      connection.close()


def _message(answer: Any) -> str:
  """The words of an error as vLLM and FastAPI write them."""
  if isinstance(answer, dict):
    error = answer.get("error", answer.get("detail", answer))
    return str(error.get("message", error) if isinstance(error, dict) else error)
  return str(answer)
