"""Runs the application on a socket, until a signal ends it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tunix.serve.app import make_app
from tunix.serve.context import Grammars, LoadModel
from tunix.serve.settings import ServeSettings
from tunix.utils import optional

# Seconds after `drain_timeout` in which the last answers are sent.
_GRACE = 5
# Connections beyond the requests that run or wait: probes, metrics, idle clients.
_SPARE_CONNECTIONS = 128
_KEEP_ALIVE = 30  # seconds until an idle connection is closed


def make_server(
  app: Any, settings: ServeSettings, on_start: Callable[[str], None] | None = None
) -> Any:
  """Returns a server whose `run()` serves until `should_exit` is True, or a signal.

  After the signal it accepts no connection, lets running requests finish within
  `drain_timeout`, and refuses the others.

  Args:
    app: the application of `make_app`.
    settings: the settings of the application.
    on_start: called with the address, such as "http://127.0.0.1:8000", once clients
      can connect.

  Raises:
    ImportError: the package uvicorn is missing.
  """
  uvicorn: Any = optional.require("uvicorn", "the server", "tunix[serve]")
  context = app.state.context

  class Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
      await super().startup(sockets=sockets)
      if self.started and on_start is not None:
        on_start(_address(self, settings))

    async def shutdown(self, sockets: Any = None) -> None:
      context.start_drain()
      await super().shutdown(sockets=sockets)

  limit = settings.max_concurrent + settings.max_queue + _SPARE_CONNECTIONS
  config = uvicorn.Config(
    app,
    host=settings.host.strip("[]"),
    port=settings.port,
    http="h11",  # it bounds the size of headers
    ws="none",
    lifespan="off",
    log_config=None,
    access_log=False,
    server_header=False,
    proxy_headers=False,
    limit_concurrency=limit,
    timeout_keep_alive=_KEEP_ALIVE,
    timeout_graceful_shutdown=int(settings.drain_timeout) + _GRACE,
  )
  return Server(config)


def serve(
  driver: Any,
  settings: ServeSettings,
  *,
  grammars: Grammars | None = None,
  load_model: LoadModel | None = None,
  on_start: Callable[[str], None] | None = None,
) -> None:
  """Serves until SIGTERM or SIGINT; starts and stops the driver.

  Args:
    driver: the driver of the engine.
    settings: address, access and limits.
    grammars: see `make_app`.
    load_model: see `make_app`.
    on_start: see `make_server`.

  Raises:
    ImportError: a package of the extra `serve` is missing.
    OSError: the address cannot be used.
  """
  app = make_app(driver, settings, grammars=grammars, load_model=load_model)
  server = make_server(app, settings, on_start)
  if not driver.alive:
    driver.start()
  try:
    with _quiet_signals():
      server.run()
  finally:
    driver.stop(timeout=settings.admin_timeout)
  if not server.started:
    raise OSError(f"the server cannot listen on {settings.host}:{settings.port}")


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
  """Keeps the signal that ended uvicorn from ending the process.

  uvicorn raises it again after its shutdown, for the handlers that were there before:
  the driver has yet to be stopped.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  ends = (signal.SIGTERM, signal.SIGINT)
  before = {number: signal.signal(number, lambda *_: None) for number in ends}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _address(server: Any, settings: ServeSettings) -> str:
  port = server.servers[0].sockets[0].getsockname()[1]
  host = settings.host.strip("[]")
  return f"http://{f'[{host}]' if ':' in host else host}:{port}"
