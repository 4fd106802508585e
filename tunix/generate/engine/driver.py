"""A thread that steps an engine, so that other threads only submit and wait."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from jax.sharding import Mesh

from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineDead
from tunix.utils import mesh as mesh_lib

PauseMode = Literal["abort", "wait", "keep"]
T = TypeVar("T")


class Driver:
  """Steps an engine in a thread of its own while the engine has work.

  Args:
    engine: the engine. From `start` to `stop`, other threads may use only `submit`,
      `cancel`, `stats` and attributes; they use everything else through `call`.
    mesh: mesh that is current in the thread; None: no mesh.

  Attributes:
    engine: the engine.
    mesh: the mesh of the thread.
    degraded: always None here; see `Replicas.degraded`.
    failure: exception that ended the thread, None if none did. Every open request
      receives `EngineDead` before `failure` is set.
    is_paused: True between `pause` and `resume`.
  """

  degraded: str | None = None

  def __init__(self, engine: Engine, mesh: Mesh | None = None):
    self.engine, self.mesh = engine, mesh
    self.failure: BaseException | None = None
    self._calls: list[tuple[Callable[[Engine], Any], concurrent.futures.Future]] = []
    self._changed = threading.Condition()
    self._thread: threading.Thread | None = None
    self._stops = self._frozen = self._holds_back = False
    engine.on_submit = self._wake

  @property
  def alive(self) -> bool:
    """True while the thread runs."""
    return self._thread is not None and self._thread.is_alive()

  @property
  def is_paused(self) -> bool:
    return self._frozen or self._holds_back

  def start(self) -> None:
    """Starts the thread.

    Raises:
      RuntimeError: it was started already.
    """
    if self._thread is not None:
      raise RuntimeError("the driver was started already: make a new one")
    self._thread = threading.Thread(target=self._run, name="tunix engine", daemon=True)
    self._thread.start()

  def stop(self, timeout: float) -> None:
    """Ends the thread, and the requests that are still open.

    Args:
      timeout: seconds to wait for the thread, which ends after its launch.

    Raises:
      TimeoutError: the launch did not end in time. The thread is a daemon, so it does
        not keep the process alive.
    """
    with self._changed:
      self._stops = True
      self._changed.notify_all()
    thread = self._thread
    if thread is None:
      return
    thread.join(timeout)
    if thread.is_alive():
      raise TimeoutError(f"the engine did not end its launch within {timeout:g} s")

  def call(self, function: Callable[[Engine], T], timeout: float) -> T:
    """Runs `function(engine)` in the engine's thread, between two launches.

    Args:
      function: the function; its result is returned, its exception raised.
      timeout: seconds to wait.

    Raises:
      TimeoutError: the function had no result in time. If it had not begun, it never
        runs.
      EngineDead: the thread does not run.
      RuntimeError: this is the engine's thread, which would wait for itself.
    """
    if threading.current_thread() is self._thread:
      raise RuntimeError(
        "a call waits for the engine's thread, and this is that thread"
      )
    future: concurrent.futures.Future = concurrent.futures.Future()
    with self._changed:
      self._check_alive()
      self._calls.append((function, future))
      self._changed.notify_all()
    try:
      return future.result(timeout)
    except concurrent.futures.TimeoutError:
      if future.cancel():
        raise TimeoutError(
          f"the engine did not come to the call within {timeout:g} s: its launch is "
          "not over yet. The call was dropped"
        ) from None
      if future.done():  # the function itself raised it, or it has just ended
        return future.result()
      raise TimeoutError(
        f"the call did not end within {timeout:g} s. It runs on in the engine's thread"
      ) from None

  def pause(self, mode: PauseMode = "keep", timeout: float = 600.0) -> None:
    """Pauses the engine; requests that arrive meanwhile wait.

    Args:
      mode: "keep": running completions stop between two launches and go on later.
        "abort": open requests end as "cancelled". "wait": running completions end
        first, and waiting ones do not start. Calling `resume` during this ends it.
      timeout: seconds to wait until the engine is paused.

    Raises:
      TimeoutError: the engine was not paused in time; it goes on.
      ValueError: the mode is unknown.
      EngineDead: the thread does not run.
    """
    if mode not in ("keep", "abort", "wait"):
      raise ValueError(f"mode is {mode!r}, expected keep, abort or wait")
    if mode == "wait":
      self._pause_after_running(timeout)
      return

    def freeze(engine: Engine) -> None:
      if mode == "abort":
        engine.cancel_all()
      self._frozen = True

    self.call(freeze, timeout)

  def _pause_after_running(self, timeout: float) -> None:
    until = time.monotonic() + timeout

    def hold(engine: Engine) -> None:
      engine.hold_back(True)
      self._holds_back = True

    def running(engine: Engine) -> bool:
      return engine.has_work  # also counts preempted completions

    self.call(hold, timeout)
    try:
      while self._holds_back and self.call(running, max(0, until - time.monotonic())):
        time.sleep(0.01)
    except TimeoutError as error:
      self.resume()
      raise TimeoutError(
        f"completions were still running after {timeout:g} s: pause with abort or "
        "keep, or wait longer"
      ) from error

  def resume(self) -> None:
    """Goes on after `pause`."""

    def thaw(engine: Engine) -> None:
      engine.hold_back(False)
      # Set again, because a `pause` that was queued before this call has run since.
      self._frozen = self._holds_back = False

    with self._changed:
      self._check_alive()
      self._frozen = self._holds_back = False
      self._calls.append((thaw, concurrent.futures.Future()))
      self._changed.notify_all()

  def _wake(self) -> None:
    with self._changed:
      self._changed.notify_all()

  def _check_alive(self) -> None:
    if self.failure is not None:
      raise EngineDead(f"the engine failed: {self.failure}") from self.failure
    if self._stops:
      raise EngineDead("the engine's thread was stopped: make a new driver")
    if not self.alive:
      raise EngineDead("the engine's thread does not run: start the driver")

  def _run(self) -> None:
    try:
      with mesh_lib.use_mesh(self.mesh):
        while self._once():
          pass
      self.engine.close()
    except BaseException as error:
      self.engine.close()  # nobody may wait for an engine without a thread
      self.failure = error
    with self._changed:
      calls, self._calls = self._calls, []
    for _, future in calls:
      if future.set_running_or_notify_cancel():
        future.set_exception(EngineDead("the engine's thread has ended"))

  def _once(self) -> bool:
    """Runs the queued calls and one launch; waits if there is nothing to do."""
    with self._changed:
      if self._stops:
        return False
      calls, self._calls = self._calls, []
    for function, future in calls:
      if not future.set_running_or_notify_cancel():
        continue  # its caller does not wait any more
      try:
        future.set_result(function(self.engine))
      except Exception as error:  # it belongs to the caller
        future.set_exception(error)
    # If a launch inside a call failed, `step` must raise, even during a pause.
    is_frozen = self._frozen and self.engine.is_alive
    if not is_frozen and self.engine.step():
      return True
    with self._changed:
      is_idle = self._frozen or not self.engine.has_arrivals
      if is_idle and not (self._calls or self._stops):
        # Bounded, so that an arrival between the look and the wait is not missed.
        self._changed.wait(timeout=0.05 if not self._frozen else 1.0)
    return True
