"""Access checks: the API key, and requests that come from foreign web pages."""

from __future__ import annotations

import hmac
import urllib.parse
from collections.abc import Mapping

from tunix.serve.http.errors import ApiError
from tunix.serve.settings import HttpSettings

# Probes of a load balancer and the page need no key: they return no data of requests.
PROBES = frozenset({"/health", "/ready"})
OPEN_PATHS = frozenset({"/", *PROBES})
# Paths that take the key of a tenant. All others need the administrator's key.
_TENANT_PATHS = frozenset(
  {
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
  }
)
_MODEL_PATHS = "/v1/models/"
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def check(
  settings: HttpSettings,
  path: str,
  headers: Mapping[str, str],
  tenants: Mapping[str, str] | None = None,
) -> str | None:
  """Refuses a request without access.

  Args:
    settings: the server's settings.
    path: path of the URL.
    headers: headers with names in lower case.
    tenants: key of each tenant; None or empty: there are no tenants.

  Returns:
    The name of the tenant whose key was sent; None for every other request.

  Raises:
    ApiError: 401 for a missing or wrong key; 403 for a foreign web page, or for a
      tenant on a path of the administrator.
  """
  if settings.api_key is None and not tenants:
    _check_page(settings, headers)
    return None
  if path in OPEN_PATHS:
    return None
  key = given_key(headers)
  if settings.api_key is not None and _is_same(key, settings.api_key):
    return None
  tenant = tenant_of_key(tenants or {}, key)
  if tenant is None:
    raise wrong_key("send the header Authorization: Bearer KEY")
  if path not in _TENANT_PATHS and not path.startswith(_MODEL_PATHS):
    raise ApiError(
      403,
      f"the key is that of a tenant, and {path[:100]} is a path of the administrator: "
      "send the key of --api_key_file",
      code="administrator_only",
    )
  return tenant


def given_key(headers: Mapping[str, str]) -> str:
  """Returns the key of a request, from X-API-Key or Authorization; empty for none."""
  key = headers.get("x-api-key", "").strip()
  if key:
    return key
  scheme, _, key = headers.get("authorization", "").partition(" ")
  return key.strip() if scheme.lower() == "bearer" else ""


def tenant_of_key(tenants: Mapping[str, str], given: str) -> str | None:
  """Returns the name of the tenant that has a key; None if nobody has it."""
  # All keys are compared: the time must not tell which one matched.
  names = [name for name, key in tenants.items() if _is_same(given, key)]
  return names[0] if names else None


def wrong_key(remedy: str) -> ApiError:
  """Returns the error for a missing or wrong key."""
  return ApiError(
    401,
    f"the API key is missing or wrong: {remedy}",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
  )


def _is_same(candidate: str, key: str) -> bool:
  return hmac.compare_digest(candidate.encode(), key.encode())


def _check_page(settings: HttpSettings, headers: Mapping[str, str]) -> None:
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
