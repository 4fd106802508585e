"""Access checks: the API key, and requests that come from foreign web pages."""

from __future__ import annotations

import hmac
import urllib.parse
from collections.abc import Mapping

from tunix.serve.errors import ApiError
from tunix.serve.settings import ServeSettings

# Probes of a load balancer and the page need no key: they return no data of requests.
PROBES = frozenset({"/health", "/ready"})
OPEN_PATHS = frozenset({"/", *PROBES})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def check(settings: ServeSettings, path: str, headers: Mapping[str, str]) -> None:
  """Refuses a request without access.

  Args:
    settings: the server's settings.
    path: path of the URL.
    headers: headers with names in lower case.

  Raises:
    ApiError: 401 for a missing or wrong key; 403 for a foreign web page.
  """
  if settings.api_key is None:
    _check_page(settings, headers)
  elif path not in OPEN_PATHS:
    _check_key(settings.api_key, headers.get("authorization", ""))


def _check_key(key: str, header: str) -> None:
  scheme, _, given = header.partition(" ")
  is_same = hmac.compare_digest(given.strip().encode(), key.encode())
  if scheme.lower() != "bearer" or not is_same:
    raise ApiError(
      401,
      "the API key is missing or wrong: send the header Authorization: Bearer KEY",
      code="invalid_api_key",
      headers={"WWW-Authenticate": "Bearer"},
    )


def _check_page(settings: ServeSettings, headers: Mapping[str, str]) -> None:
  """Refuses requests that a web page of another site sends.

  A browser on this machine can reach the server from any page. The header Origin names
  the page's site. The header Host shows a name that an attacker resolves to 127.0.0.1.
  """
  host = headers.get("host", "")
  name = _parts(f"//{host}").hostname
  if host and name not in {*_LOCAL_NAMES, settings.host}:
    raise ApiError(
      403,
      f"the header Host is {host[:100]!r}, expected localhost or 127.0.0.1: set an API "
      "key to serve other names",
      code="foreign_host",
    )
  origin = headers.get("origin")
  if origin is not None and _parts(origin).netloc != host:
    raise ApiError(
      403,
      f"the header Origin is {origin[:100]!r}, expected this server's own address: set "
      "an API key to serve other pages",
      code="foreign_origin",
    )


def _parts(url: str) -> urllib.parse.SplitResult:
  """Returns the parts of a URL; none of one that is malformed."""
  try:
    return urllib.parse.urlsplit(url)
  except ValueError:  # such as half of an IPv6 address
    return urllib.parse.urlsplit("")
