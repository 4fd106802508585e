"""`tunix route`: passes HTTP requests on to several running servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.settings.options import Section
from tunix.serve import router
from tunix.serve.settings import HttpSettings, RouteSettings
from tunix.utils import optional

_PORT = 8080
# Requests that a server with default settings works on.
_CONCURRENT = HttpSettings.max_concurrent


def main(argv: Sequence[str]) -> None:
  """Runs `tunix route` until SIGTERM or Ctrl-C.

  Raises:
    FileNotFoundError: there is no such file of options or keys.
    OSError: the address cannot be used.
    ImportError: the extra `serve` is not installed.
    ValueError: a malformed address, a number out of range; or an address that other
      machines can reach, without an API key.
  """
  values = parser().read(argv)
  for package in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    optional.require(package, "the router", "tunix[serve]")
  hosts = values.build(RouteSettings)
  count = len(hosts.urls)
  most = _CONCURRENT * count
  settings = values.build(HttpSettings, port=_PORT, max_concurrent=most)
  if hosts.host_key is None:
    hosts = dataclasses.replace(hosts, host_key=settings.api_key)
  ready = f"routing to {count} servers at"
  router.route(settings, hosts, lambda address: print(ready, address, flush=True))


def parser() -> Parser:
  """Returns the parser of the arguments."""
  defaults = {"port": f"{_PORT}", "max_concurrent": f"{_CONCURRENT} for each server"}
  return Parser(
    "tunix route",
    "passes HTTP requests on to servers of tunix serve",
    Section(RouteSettings, defaults={"host_key": "the key of clients"}),
    Section(HttpSettings, defaults=defaults),
  )
