"""The runs of a service, and the thread that computes their requests in turn."""

from __future__ import annotations

import collections
import logging
import pathlib
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from tunix.tinker.errors import ServiceFailedError
from tunix.tinker.protocol.results import Result, stopped_too_often
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state.records import missing
from tunix.tinker.state.runs import Op, Run
from tunix.tinker.state.turns import Turns
from tunix.tinker.work.executor import Executor
from tunix.utils import io

_LOG = logging.getLogger(__name__)
_IDLE = 60.0  # seconds between two looks of an idle thread


class Worker:
  """Computes the requests of all runs, each run's in the order of their numbers.

  Args:
    folder: folder of the runs, which are read from it.
    settings: the service's settings.

  Attributes:
    changed: the lock of the runs; it is notified after each request and result. A
      thread may take it several times.
    stops: True after `stop` was called.
  """

  def __init__(self, folder: pathlib.Path, settings: TinkerSettings):
    self.changed = threading.Condition()
    self.stops = False
    self._folder, self._settings = folder, settings
    self._failure: BaseException | None = None
    self._listeners: list[Callable[[], None]] = []
    self._thread: threading.Thread | None = None
    self._running: Run | None = None  # whose request is computed
    self._runs: dict[str, Run] = {}
    self._tenants = Turns()
    self._models: dict[str, Turns] = collections.defaultdict(Turns)  # by tenant
    folder.mkdir(exist_ok=True)
    io.sweep(folder)
    for path in sorted(folder.iterdir()):
      if (path / "info.json").exists():  # else a kill came before it was written
        self._read(path)

  def _read(self, folder: pathlib.Path) -> None:
    run = Run(folder, self._settings)
    self._runs[run.id] = run

  def start(self, executor: Executor) -> None:
    """Starts the thread."""
    self._thread = threading.Thread(
      target=self._work, args=(executor,), name="tunix tinker", daemon=True
    )
    self._thread.start()

  def stop(self) -> None:
    """Has the thread end after the request that it computes."""
    with self.changed:
      if self._running is not None and not self.stops:
        self._running.stop()
      self.stops = True
      self.changed.notify_all()

  def close(self) -> None:
    """Waits for the end of the thread. Other requests are computed after a restart."""
    self.stop()
    if self._thread is not None:
      self._thread.join()

  def close_files(self) -> None:
    """Closes the journals of the runs."""
    for run in self._runs.values():
      run.close()

  def listen(self, listener: Callable[[], None]) -> None:
    """Has a function called after each result, in any thread."""
    self._listeners.append(listener)

  def ring(self) -> None:
    """Wakes the threads and listeners that wait for a result."""
    with self.changed:
      self.changed.notify_all()
    for listener in self._listeners:
      listener()

  def check_alive(self) -> None:
    """Checks that requests are computed.

    Raises:
      ServiceFailedError: the thread has ended, for example because the disk is full.
    """
    if self._failure is not None:
      raise ServiceFailedError(
        f"the service failed: {self._failure}; expected a running thread. Correct the "
        "cause and restart the server, which continues all requests"
      ) from self._failure

  # The runs.

  def is_run(self, id: str) -> bool:
    """Returns True if there is a run with this id, of any tenant."""
    with self.changed:
      return id in self._runs

  def run(self, tenant: str, id: str) -> Run:
    """Returns a run of a tenant.

    Raises:
      NotFoundError: the tenant has no such run.
    """
    with self.changed:
      run = self._runs.get(id)
    if run is None or run.owner != tenant:
      raise missing("model", id)
    return run

  def runs(self, tenant: str) -> list[Run]:
    """Returns the runs of a tenant."""
    with self.changed:
      return [x for x in self._runs.values() if x.owner == tenant]

  def create(self, info: Mapping[str, Any]) -> None:
    """Adds a new run, whose `info` has its id and owner."""
    folder = self._folder / urllib.parse.quote(info["id"], safe="")
    with self.changed:
      self._runs[info["id"]] = Run.create(folder, info, self._settings)

  def accept(self, tenant: str, id: str, number: int, op: Op) -> None:
    """Writes a request to its run and wakes the thread; see `Run.accept`."""
    with self.changed:
      self.run(tenant, id).accept(number, op)
      self.changed.notify_all()

  # The thread.

  def _work(self, executor: Executor) -> None:
    try:
      while (job := self._next()) is not None:
        self._compute(executor, *job)
    except BaseException as error:  # of the disk: waiting clients must hear of it
      _LOG.exception("the training service failed")
      self._failure = error
      self.ring()

  def _next(self) -> tuple[Run, int, Op, Result | None] | None:
    """Waits for a request; returns it with its run, or None at the end.

    Tenants take turns by tokens, and so do the runs of each tenant: many runs, or large
    requests, bring no larger share.
    """
    with self.changed:
      while not self.stops:
        ready: dict[str, dict[str, tuple[Run, int, Op]]] = {}
        for run in self._runs.values():
          if (request := run.next()) is not None:
            ready.setdefault(run.owner, {})[run.id] = (run, *request)
        if ready:
          owner = self._tenants.next(ready)
          run, number, op = ready[owner][self._models[owner].next(ready[owner])]
          self._tenants.charge(owner, op.tokens)
          self._models[owner].charge(run.id, op.tokens)
          self._running, earlier = run, run.results.get(number)
          if earlier is None and run.begin(number) >= self._settings.max_starts:
            earlier = stopped_too_often(self._settings.max_starts)
          return run, number, op, earlier
        self.changed.wait(_IDLE)
    return None

  def _forget(self, tenant: str) -> None:
    """Drops the results of all but the last unloaded runs; nothing else ends them."""
    # The result of the unload itself stays.
    full = [x for x in self.runs(tenant) if x.is_unloaded and len(x.results) > 1]
    for run in full[: -self._settings.max_models]:
      run.forget()

  def _compute(
    self, executor: Executor, run: Run, number: int, op: Op, earlier: Result | None
  ) -> None:
    result, is_whole = executor.execute(run, op, earlier)
    with self.changed:
      self._running = None
      run.finish(number, result)
      # Repeating these after a restart would be wrong: the checkpoint may be gone.
      if op.kind in ("load_weights", "unload_model") and result.error is None:
        run.write_state(executor.arrays_of(run))
        run.switch()
      if run.is_unloaded:  # a process may have few open files, and runs are many
        run.close()
      if op.kind == "unload_model":
        self._forget(run.owner)
      if not is_whole:
        run.close()
        self._read(run.folder)
    self.ring()
    if is_whole and run.is_due(self._settings.snapshot_steps):
      try:
        run.write_state(executor.arrays_of(run))
        with self.changed:
          run.switch()
      except OSError as error:  # it is tried again after the next request
        _LOG.warning("the state of %s cannot be written: %s", run.id, error)
