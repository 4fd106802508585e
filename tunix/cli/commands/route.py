"""`tunix route`: passes HTTP requests on to several running servers."""

from __future__ import annotations

from collections.abc import Sequence

from tunix.cli.commands.parts import arguments
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.commands.serve import KEY, read_key
from tunix.serve import router
from tunix.serve.settings import RouteSettings, ServeSettings
from tunix.utils import optional

# Requests that a server with default settings works on.
_CONCURRENT = 64


def main(argv: Sequence[str]) -> None:
  """Runs `tunix route` until SIGTERM or Ctrl-C.

  Raises:
    FileNotFoundError: there is no such key file.
    OSError: the address cannot be used.
    ImportError: the extra `serve` is not installed.
    ValueError: a malformed address, a number out of range; or an address that other
      machines can reach, without an API key.
  """
  args = parser().parse_args(argv)
  for package in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    optional.require(package, "the router", "tunix[serve]")
  key = read_key(args.api_key_file)
  hosts = RouteSettings(
    urls=tuple(args.urls),
    host_key=key if args.host_key_file is None else read_key(args.host_key_file),
    check_interval=args.check_interval,
    max_lead=args.max_lead,
  )
  most = args.max_concurrent
  settings = ServeSettings(
    host=args.host,
    port=args.port,
    api_key=key,
    max_concurrent=_CONCURRENT * len(args.urls) if most is None else most,
    max_queue=args.max_queue,
    proxies=tuple(args.proxy or ()),
    drain_timeout=args.drain_timeout,
  )
  ready = f"routing to {len(args.urls)} servers at"
  router.route(settings, hosts, lambda address: print(ready, address, flush=True))


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser("tunix route", "passes HTTP requests on to servers of tunix serve")
  add = made.add_argument
  add("urls", metavar="URL", nargs="+", help="address such as http://10.0.0.2:8000")
  add("--host", default="127.0.0.1", help="any other than a local one needs a key")
  add("--port", type=int, default=8080, help="0: a free one, which is printed")
  add(
    "--api_key_file",
    metavar="FILE",
    help=f"file with the API key of clients; default: the variable {KEY}, else no key",
  )
  add(
    "--host_key_file",
    metavar="FILE",
    help="file with the API key of the servers; default: the key of clients",
  )
  add(
    "--max_lead",
    type=int,
    default=8,
    help="requests that the server with the prefix may have beyond the least busy one",
  )
  add("--check_interval", type=float, default=2.0, help="seconds between two checks")
  add("--max_concurrent", type=int, help="requests that run; default: 64 per server")
  arguments.add_admission(made)
  return made
