"""Requests, bodies and answers as the routes see them, without any web framework."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, ClassVar

from tunix.serve.http.errors import ApiError, bad
from tunix.utils import checks

# The three arguments of an ASGI application.
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One HTTP request.

  Attributes:
    body: JSON object of the body; empty if there was none.
    query: parameters of the URL.
    size: bytes of the body.
    tenant: name of the tenant whose key was sent; None: no tenant's key.
  """

  body: dict[str, Any] = dataclasses.field(default_factory=dict)
  query: Mapping[str, str] = dataclasses.field(default_factory=dict)
  size: int = 0
  tenant: str | None = None


async def _nothing() -> None:
  pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """An answer that is sent as a whole.

  Attributes:
    status: HTTP status.
    content: an object to write as JSON, or bytes.
    media_type: type of bytes.
    headers: further headers.
    close: called when the client has the answer, or has gone.
  """

  status: int = 200
  content: Any = None
  media_type: str = "application/json"
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  close: Callable[[], Awaitable[None]] = _nothing

  def data(self) -> bytes:
    """Returns the body."""
    return self.content if isinstance(self.content, bytes) else to_json(self.content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
  """An answer of server-sent events.

  Attributes:
    events: JSON objects, one for each event.
    close: frees what the events need; it is called whatever happens.
    headers: further headers.
  """

  events: AsyncIterator[Any]
  close: Callable[[], Awaitable[None]]
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relay:
  """An answer whose bytes are passed on as they arrive.

  Attributes:
    status: HTTP status.
    headers: headers, with the content type.
    chunks: the bytes.
    close: frees what the bytes need; it is called whatever happens.
  """

  status: int
  headers: Mapping[str, str]
  chunks: AsyncIterator[bytes]
  close: Callable[[], Awaitable[None]]


Handler = Callable[[Call], Awaitable[Answer | Stream]]

# Time between two large bodies, in units of the time that the first one took.
_PAUSE = 4

LAST_EVENT = b"data: [DONE]\n\n"


# Ends of a line to `str.splitlines`, by which clients split a stream, and not to JSON.
# JSON has them inside strings only, where an escape stands for the same character.
_LINE_ENDS = {c.encode(): b"\\u%04x" % ord(c) for c in "\u0085\u2028\u2029"}


def event(content: object) -> bytes:
  """Returns one server-sent event, which is one line of text."""
  data = to_json(content)
  for character, escape in _LINE_ENDS.items():
    data = data.replace(character, escape)
  return b"data: " + data + b"\n\n"


def to_json(content: object) -> bytes:
  """Writes JSON; NaN and infinity, which JSON does not have, are errors here."""
  text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
  # Half of a surrogate pair, which a template or a client may have put into a text.
  return text.encode("utf-8", "replace")


def read_json(data: bytes) -> dict[str, Any]:
  """Parses the body of a request.

  Raises:
    ApiError: the body is no JSON object.
  """
  try:
    content = json.loads(data, parse_constant=_refuse, parse_float=_finite)
    if b"\\u" in data:  # an escape may be half of a character, which no text has
      json.dumps(content, ensure_ascii=False).encode()
  # Numbers of thousands of digits and bytes outside UTF-8 are ValueErrors as well.
  except (ValueError, RecursionError) as error:
    raise bad(None, f"the body is no valid JSON: {error}", "invalid_json") from error
  if not isinstance(content, dict):
    raise bad(None, f"the body is {checks.type_of(content)}, expected a JSON object")
  return content


class LargeBodies:
  """Parses large bodies in a thread, one after the other, a fifth of the time at most.

  Parsing holds the interpreter's lock, and a token needs it many times on its way to a
  client. Without the pauses, a client that sends one large body after the other delays
  the tokens of all others.
  """

  _of_loop: ClassVar[Any] = weakref.WeakKeyDictionary()

  def __init__(self) -> None:
    self._turn, self._next = asyncio.Lock(), 0.0

  @classmethod
  def here(cls) -> LargeBodies:
    """Returns the one of the running event loop, whose routes share it."""
    return cls._of_loop.setdefault(asyncio.get_running_loop(), cls())

  async def read(self, data: bytes) -> dict[str, Any]:
    """Returns `read_json(data)`, and raises as it does."""
    async with self._turn:
      await asyncio.sleep(max(0.0, self._next - time.monotonic()))
      start = time.monotonic()
      try:
        return await asyncio.to_thread(read_json, data)
      finally:
        now = time.monotonic()
        self._next = now + _PAUSE * (now - start)


def _refuse(constant: str) -> Any:
  raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"the number {text[:40]} is too large")
  return value


async def read_body(
  headers: Mapping[str, str], receive: Receive, most: int
) -> bytes | None:
  """Reads a body; None if the client went away.

  Raises:
    ApiError: 413 if it is too large, before all of it is read.
  """
  too_large = ApiError(413, f"the body is larger than {most} bytes", code="too_large")
  length = headers.get("content-length", "0")
  if not (length.isascii() and length.isdigit()) or int(length[:20]) > most:
    raise too_large
  parts, size = [], 0
  while True:
    message = await receive()
    if message["type"] == "http.disconnect":
      return None
    parts.append(message.get("body", b""))
    size += len(parts[-1])
    if size > most:
      raise too_large
    if not message.get("more_body", False):
      return b"".join(parts)
