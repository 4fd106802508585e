"""Traces a few steps of a run with JAX's profiler."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from typing import Any

import jax

from tunix.utils import checks

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProfilerOptions:
  """Which steps to trace, and how closely.

  Args:
    log_dir: folder of the trace (read it with XProf or TensorBoard).
    skip_first_n_steps: steps left out at the start, for compilation and warm-up.
    profiler_steps: number of steps to trace.
    set_profile_options: whether to set the two levels below; False leaves JAX's own.
    host_tracer_level: 0 (off) to 3; 2 also shows memory.
    python_tracer_level: 0 (off) or 1.

  Raises:
    ValueError: profiler_steps < 1, skip_first_n_steps < 0, or a level out of range.
  """

  log_dir: str | os.PathLike[str]
  skip_first_n_steps: int
  profiler_steps: int
  _: dataclasses.KW_ONLY
  set_profile_options: bool = True
  host_tracer_level: int = 2
  python_tracer_level: int = 1

  def __post_init__(self):
    checks.fields(
      self,
      profiler_steps=checks.COUNT,
      skip_first_n_steps=checks.NOT_NEGATIVE,
      host_tracer_level=checks.Range(0, 3),
      python_tracer_level=checks.Range(0, 1),
    )


class Profiler:
  """Starts and stops one trace, around exactly `profiler_steps` steps.

  Call `maybe_activate(step)` before and `maybe_deactivate(step)` after every step, and
  `close()` in any case (or use it as a context manager): a run that ends early or
  fails still leaves a readable trace. Process 0 only; a process has one trace at a
  time, a second one is skipped with a warning.

  Args:
    initial_step: steps done before this run.
    max_step: step at which the run ends; None if open.
    profiler_options: None traces nothing.

  Raises:
    ValueError: the run ends before the first traced step. A resumed run only says
      so: it was the earlier part that was to be traced.
  """

  _lock = threading.Lock()

  def __init__(
    self,
    initial_step: int,
    max_step: int | None,
    profiler_options: ProfilerOptions | None,
  ):
    self._options = profiler_options
    self._waiting = profiler_options is not None and jax.process_index() == 0
    self._active = False
    self._traced = 0
    if profiler_options is None:
      return
    self._first = initial_step + profiler_options.skip_first_n_steps
    if max_step is not None and self._first >= max_step:
      message = (
        f"no step would be traced: skip_first_n_steps="
        f"{profiler_options.skip_first_n_steps} from step {initial_step} leaves none "
        f"before max_steps={max_step}; skip fewer steps or run longer"
      )
      if initial_step == 0:
        raise ValueError(message)
      _log.warning("%s", message)
      self._waiting = False

  @property
  def active(self) -> bool:
    """Whether a trace is running."""
    return self._active

  def maybe_activate(self, step: int, *, wait_for: Any = None) -> None:
    """Starts the trace if `step` is the first to be traced.

    Args:
      step: steps done so far.
      wait_for: arrays of earlier steps, waited for just before the trace starts, so
        that their computations do not run into it.
    """
    if not self._waiting or step < self._first:
      return
    self._waiting = False
    jax.block_until_ready(wait_for)
    if not Profiler._lock.acquire(blocking=False):
      _log.warning("another profile is running in this process: this one is skipped")
      return
    self._start()

  def maybe_deactivate(self, step: int, *, wait_for: Any = None) -> None:
    """Counts a traced step, and stops the trace after the last one.

    Args:
      step: steps done so far.
      wait_for: arrays that the traced steps compute, waited for before the trace
        stops, so that it contains them.
    """
    if not self._active:
      return
    self._traced += 1
    if self._options is not None and self._traced >= self._options.profiler_steps:
      jax.block_until_ready(wait_for)
      self._stop()
      _log.info("traced %d steps up to step %d", self._traced, step)

  def close(self) -> None:
    """Stops a trace that still runs."""
    if self._active:
      self._stop()
      _log.warning("the run ended in the profile: it has %d steps", self._traced)

  def __enter__(self) -> Profiler:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _start(self) -> None:
    assert self._options is not None
    options = None
    if self._options.set_profile_options:
      options = jax.profiler.ProfileOptions()
      options.host_tracer_level = self._options.host_tracer_level
      options.python_tracer_level = self._options.python_tracer_level
    try:
      jax.profiler.start_trace(str(self._options.log_dir), profiler_options=options)
    except RuntimeError as error:
      # Somebody called jax.profiler.start_trace outside of this class.
      Profiler._lock.release()
      _log.warning("the profile is skipped: %s", error)
      return
    self._active = True

  def _stop(self) -> None:
    self._active = False
    try:
      jax.profiler.stop_trace()
    finally:
      Profiler._lock.release()
