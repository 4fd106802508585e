"""Profiler: traces some steps of a run with JAX's profiler."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading

import jax

from tunix.utils import checks

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProfilerOptions:
  """The steps to trace, and the level of detail.

  Args:
    log_dir: folder of the trace, which XProf and TensorBoard can read.
    skip_first_n_steps: number of first steps that are not traced: compilation and
      warm-up.
    profiler_steps: number of steps to trace.
    set_profile_options: if True, set the two levels below; if False, keep JAX's levels.
    host_tracer_level: 0 (off) to 3; from 2 on it includes memory.
    python_tracer_level: 0 (off) or 1.

  Raises:
    ValueError: profiler_steps < 1, skip_first_n_steps < 0, or a level is out of range.
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
  """Starts and stops one trace of exactly `profiler_steps` steps.

  Call `maybe_activate(step)` before and `maybe_deactivate(step)` after every step, and
  `close()` at the end, also after an error; or use the profiler as a context manager.
  The trace is then readable even if the run ends early. Only process 0 traces. A
  process can have one trace at a time; a second one is skipped with a warning.

  Args:
    initial_step: number of steps before this run.
    max_step: last step of the run; None: unknown.
    profiler_options: the options; None: nothing is traced.

  Raises:
    ValueError: The run ends before the first traced step. A resumed run logs a warning
      instead, because an earlier part of it may have been traced.
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
    """True while a trace is running."""
    return self._active

  def maybe_activate(self, step: int, *, wait_for: object = None) -> None:
    """Starts the trace before the first step to be traced.

    Args:
      step: number of steps so far.
      wait_for: arrays of earlier steps. The trace starts after they are computed, and
        so does not contain their computations.
    """
    if not self._waiting or step < self._first:
      return
    self._waiting = False
    jax.block_until_ready(wait_for)
    if not Profiler._lock.acquire(blocking=False):
      _log.warning("another profile is running in this process: this one is skipped")
      return
    self._start()

  def maybe_deactivate(self, step: int, *, wait_for: object = None) -> None:
    """Counts a traced step, and stops the trace after the last one.

    Args:
      step: number of steps so far.
      wait_for: arrays of the traced steps. The trace stops after they are computed, and
        so contains their computations.
    """
    if not self._active:
      return
    self._traced += 1
    if self._options is not None and self._traced >= self._options.profiler_steps:
      jax.block_until_ready(wait_for)
      self._stop()
      _log.info("traced %d steps up to step %d", self._traced, step)

  def close(self) -> None:
    """Stops a running trace."""
    if self._active:
      self._stop()
      _log.warning("the run ended during the trace, which has %d steps", self._traced)

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
      # The user has called jax.profiler.start_trace.
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
