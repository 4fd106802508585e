"""Errors as OpenAI's API writes them."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

from tunix.generate.engine.request import EngineDead, RequestError

_TYPES = {
  401: "authentication_error",
  403: "permission_error",
  404: "not_found_error",
  429: "rate_limit_error",
}


class ApiError(Exception):
  """An error that is returned to the client.

  Attributes:
    status: HTTP status.
    message: text for people.
    param: field of the request that is wrong, or None.
    code: short name for programs, or None.
    headers: further headers of the answer.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status, self.message = status, message
    self.param, self.code = param, code
    self.headers = dict(headers or {})

  def body(self) -> dict[str, Any]:
    """Returns the JSON of the answer."""
    default = "invalid_request_error" if self.status < 500 else "server_error"
    return {
      "error": {
        "message": self.message,
        "type": _TYPES.get(self.status, default),
        "param": self.param,
        "code": self.code,
      }
    }


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
  """Returns an error 400 about one field."""
  return ApiError(400, message, param=param, code=code)


def shutting_down(retry_after: int) -> ApiError:
  """Returns the error of a server that is about to exit."""
  return ApiError(
    503,
    "the server is shutting down: send the request to another one",
    code="shutting_down",
    headers={"Retry-After": str(retry_after)},
  )


def as_api_error(error: BaseException) -> ApiError | None:
  """Returns the error of the API for an error of the engine; None for other errors."""
  if isinstance(error, ApiError):
    return error
  if isinstance(error, EngineDead):
    return ApiError(
      503, f"{error}. Send the request again, or restart the server", code="engine_dead"
    )
  if isinstance(error, RequestError):
    return ApiError(500, str(error), code="request_failed")
  if isinstance(error, TimeoutError | queue.Empty):
    return ApiError(504, str(error) or "a wait took too long", code="timeout")
  return None
