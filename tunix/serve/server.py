"""Runs the application on a socket, until a signal ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tunix.data.images import ImageReader
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.replicas import Replicas
from tunix.serve.app import More, make_app
from tunix.serve.http import connections
from tunix.serve.openai.context import Grammars, LoadModel
from tunix.serve.settings import HttpSettings, ServeSettings
from tunix.utils import optional

_LOG = logging.getLogger(__name__)
# Seconds after `drain_timeout` in which the last answers are sent, and then those in
# which threads end.
_GRACE = _LAST = 5
_STOP = 30  # seconds that the engine's thread gets to finish its launch
_LOOK = 0.2  # seconds between two looks for the signal
_KEEP_ALIVE = 30  # seconds until an idle connection is closed


def make_server(
  app: Any, settings: HttpSettings, on_start: Callable[[str], None] | None = None
) -> Any:
  """Returns a server whose `run()` serves until `should_exit` is True, or a signal.

  After the signal it accepts no connection, lets running requests finish within
  `drain_timeout`, and refuses the others.

  Args:
    app: the application of `make_app` or `make_router`.
    settings: the settings of the application.
    on_start: called with the address, such as "http://127.0.0.1:8000", once clients
      can connect.

  Raises:
    ImportError: the package uvicorn is missing.
    OSError: the address cannot be used.
  """
  uvicorn: Any = optional.require("uvicorn", "the server", "tunix[serve]")
  context = app.state.context

  listener = _listen(settings)

  class Server(uvicorn.Server):
    def run(self, sockets: list[socket.socket] | None = None) -> None:
      super().run(sockets=sockets or [listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
      address = _address(listener)
      await super().startup(sockets=sockets)
      if self.started and on_start is not None:
        on_start(address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
      context.start_drain()
      await super().shutdown(sockets=sockets)

  config = uvicorn.Config(
    app,
    http=connections.protocol(settings),
    ws="none",
    lifespan="on",
    log_config=None,
    access_log=False,
    server_header=False,
    proxy_headers=False,
    timeout_keep_alive=_KEEP_ALIVE,
    timeout_graceful_shutdown=int(settings.drain_timeout) + _GRACE,
  )
  return Server(config)


def serve(
  driver: Driver | Replicas,
  settings: ServeSettings,
  *,
  grammars: Grammars | None = None,
  load_model: LoadModel | None = None,
  images: ImageReader | None = None,
  on_start: Callable[[str], None] | None = None,
  more: More | None = None,
  on_stop: Callable[[], None] = lambda: None,
  ends_process: bool = False,
) -> None:
  """Serves until SIGTERM or SIGINT; starts and stops the driver.

  Args:
    driver: the driver of the engine.
    settings: address, access and limits.
    grammars: see `make_app`.
    load_model, images: see `make_app`.
    on_start: see `make_server`.
    more: see `make_app`.
    on_stop: called after the last answer, in a thread, while the driver stops.
    ends_process: end the process 10 s after `drain_timeout`, whatever its threads
      compute. For programs that do nothing else.

  Raises:
    ImportError: a package of the extra `serve` is missing.
    OSError: the address cannot be used.
  """
  is_over, stopping = threading.Event(), threading.Thread(target=on_stop)
  with contextlib.ExitStack() as ends:  # called in the reverse order
    ends.callback(is_over.set)
    ends.callback(stopping.join)
    ends.callback(driver.stop, timeout=_STOP)
    ends.callback(stopping.start)
    app = make_app(
      driver,
      settings,
      grammars=grammars,
      load_model=load_model,
      images=images,
      more=more,
    )
    server = make_server(app, settings, on_start)
    if ends_process:
      limit = settings.drain_timeout + _GRACE + _LAST
      watch = threading.Thread(
        target=_end_in_time, args=(server, limit, is_over), daemon=True
      )
      watch.start()
    if not driver.alive:
      driver.start()
    run_until_signal(server)


def _end_in_time(server: Any, seconds: float, is_over: threading.Event) -> None:
  """Ends the process some seconds after the signal: a compilation cannot be stopped."""
  while not server.should_exit:
    if is_over.wait(_LOOK):
      return
  if not is_over.wait(seconds):
    _LOG.warning("threads run %g s after the signal; the process ends", seconds)
    os._exit(0)


def run_until_signal(server: Any) -> None:
  """Runs a server of `make_server` until SIGTERM or SIGINT, and then returns."""
  with _quiet_signals():
    server.run()


def check_address(settings: HttpSettings) -> None:
  """Checks that the server can listen, before a program loads its model.

  Raises:
    OSError: the address cannot be used.
  """
  _listen(settings).close()


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
  """Keeps the signal that ended uvicorn from ending the process.

  uvicorn raises the signal again after its shutdown. The default handler would end the
  process before the driver is stopped.
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


def _listen(settings: HttpSettings) -> socket.socket:
  # uvicorn exits the process if it cannot bind.
  host = settings.host.strip("[]")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    return socket.create_server((host, settings.port), family=family)
  except OSError as error:
    raise OSError(
      error.errno,
      f"the server cannot listen on {host}, port {settings.port}: {error.strerror}. "
      "Choose another port, or end the program that has it",
    ) from error


def _address(listener: socket.socket) -> str:
  host, port = listener.getsockname()[:2]
  return f"http://{f'[{host}]' if ':' in host else host}:{port}"
