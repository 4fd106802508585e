"""Errors of the training service."""

from __future__ import annotations


class TinkerError(Exception):
  """A request that is refused.

  Attributes:
    message: text for people.
    code: short name for programs.
  """

  code = "bad_request"

  def __init__(self, message: str):
    super().__init__(message)
    self.message = message


class NotFoundError(TinkerError, LookupError):
  """There is no such object, or it belongs to another tenant."""

  code = "not_found"


class QuotaError(TinkerError):
  """A limit of the tenant would be passed."""

  code = "quota_exceeded"


class NotServedError(TinkerError):
  """A part of the protocol that this service does not have."""

  code = "not_served"


class ConflictError(TinkerError):
  """The request contradicts an earlier one of the same sequence number."""

  code = "conflict"


class GoneError(TinkerError, LookupError):
  """The result was retrieved and then dropped."""

  code = "gone"


class BusyError(TinkerError):
  """Too many requests of the tenant wait; send the request again later."""

  code = "too_many_requests"


class ServiceFailedError(TinkerError):
  """The service's thread has ended; a restart continues its requests."""

  code = "service_failed"


class RequestFailedError(RuntimeError):
  """A request that was accepted, and failed.

  Attributes:
    category: "user" if the request was wrong, "server" if the service failed.
  """

  def __init__(self, message: str, category: str):
    super().__init__(message)
    self.category = category
