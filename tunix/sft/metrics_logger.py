"""The metrics of a run: a history in memory, and backends that store them.

    logger = MetricsLogger(MetricsLoggerOptions(log_dir="/tmp/logs"))
    logger.log("", "loss", 2.5, Mode.TRAIN, 7)  # event "train/loss"

A logger passes values to its own backends only. It also passes them to
`jax.monitoring.record_scalar`, for other listeners, and does not listen there itself.
"""

from __future__ import annotations

import array
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.sft.metrics.backends import (
  BACKENDS,
  ConsoleBackend,
  LoggingBackend,
  RewindableBackend,
  TensorboardBackend,
  TextBackend,
  WandbBackend,
)
from tunix.sft.metrics.history import History
from tunix.sft.metrics.jsonl import VOLATILE, JsonlBackend
from tunix.sft.metrics.records import Mode, as_number, decode, encode
from tunix.utils import checks

__all__ = [
  "BACKENDS",
  "VOLATILE",
  "BackendFactory",
  "ConsoleBackend",
  "JsonlBackend",
  "LoggingBackend",
  "MetricsLogger",
  "MetricsLoggerOptions",
  "Mode",
  "TensorboardBackend",
  "WandbBackend",
]

BackendFactory = Callable[[], LoggingBackend]

# Metrics with a geometric mean: the perplexity of several steps is exp(mean loss).
_GEOMETRIC = frozenset({"perplexity"})


@dataclasses.dataclass(frozen=True)
class MetricsLoggerOptions:
  """The backends of a MetricsLogger.

  Args:
    log_dir: local folder of the TensorBoard and JSON-lines files.
    project_name: project in Weights & Biases.
    run_name: name of the run in Weights & Biases, which invents one if it is empty.
    flush_every_n_steps: steps between two flushes of TensorBoard's files. JSON lines
      are written line by line.
    backends: a choice for names of `metrics_backends.BACKENDS`: True uses the backend,
      False does not. A missing name, or None, takes the default: JSON lines and
      TensorBoard are used, Weights & Biases if a WANDB_* variable is set, and the
      console is not.
    backend_factories: functions that make the backends, instead of `backends`. An empty
      sequence means no backend.

  Raises:
    ValueError: log_dir is empty and there are no backend_factories; backends has an
      unknown name; or flush_every_n_steps < 1.
  """

  log_dir: str | os.PathLike[str]
  _: dataclasses.KW_ONLY
  project_name: str = "tunix"
  run_name: str = ""
  flush_every_n_steps: int = 100
  backends: Mapping[str, bool | None] = dataclasses.field(default_factory=dict)
  backend_factories: Sequence[BackendFactory] | None = None

  def __post_init__(self):
    checks.fields(self, flush_every_n_steps=checks.COUNT)
    if not str(self.log_dir) and self.backend_factories is None:
      raise ValueError("log_dir is empty. Name a folder, or give backend_factories.")
    if unknown := sorted(self.backends.keys() - BACKENDS.keys()):
      raise ValueError(
        f"backends has the name {unknown[0]!r}; expected names of {list(BACKENDS)}. "
        "Give a backend of your own with backend_factories."
      )

  def create_backends(self) -> list[LoggingBackend]:
    """Returns the backends of this process; only process 0 has any.

    Raises:
      OSError: log_dir cannot be made.
    """
    if jax.process_index() != 0:
      return []
    if self.backend_factories is not None:
      return [factory() for factory in self.backend_factories]
    backends = []
    for name, kind in BACKENDS.items():
      choice = self.backends.get(name)
      if kind.is_default() if choice is None else choice:
        backends.append(kind.make(self))
    return backends


class MetricsLogger:
  """Logs scalars, keeps their history, and can be part of a checkpoint.

  Args:
    metrics_logger_options: the backends; None: only the history is kept.
  """

  def __init__(self, metrics_logger_options: MetricsLoggerOptions | None = None):
    options = metrics_logger_options
    self._backends = options.create_backends() if options is not None else []
    self._history: dict[tuple[str, str, str], _Series] = {}

  def log(
    self,
    metrics_prefix: str,
    metric_name: str,
    scalar_value: object,
    mode: Mode | str,
    step: int,
  ) -> None:
    """Logs one value under "prefix/mode/name" ("mode/name" for an empty prefix).

    If the value is a JAX array, the call waits until the array is computed; see
    `metrics_buffer` for values of the running step.

    Raises:
      ValueError: The mode is unknown, or the value has more than one element.
      TypeError: The value is no number.
    """
    key = (metrics_prefix, _mode(mode), metric_name)
    event = _event(key)
    value = as_number(event, scalar_value)
    self._history.setdefault(key, _Series()).add(int(step), value)
    for backend in self._backends:
      backend.log_scalar(event, value, step=step)
    jax.monitoring.record_scalar(event, value, step=int(step))

  def log_config(self, config: Mapping[str, Any]) -> None:
    """Passes the settings of the run to every TextBackend.

    Call it before the first value is logged.

    Args:
      config: JSON values by key.
    """
    for backend in self._text_backends():
      backend.log_config(config)

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    """Passes completions to every TextBackend; see `tunix.rl.experience.samples`."""
    for backend in self._text_backends():
      backend.log_samples(groups, step)

  def metric_exists(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> bool:
    """Returns True if a value was logged under these names."""
    return (metrics_prefix, _mode(mode), metric_name) in self._history

  def get_metric(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> float:
    """Returns the mean over all steps, for "perplexity" the geometric mean.

    The mean is kept while logging, so the call takes constant time.

    Raises:
      ValueError: No value was logged under these names.
    """
    series = self._series(metrics_prefix, metric_name, mode)
    if metric_name in _GEOMETRIC:
      return float(np.exp(series.log_total / series.count))
    return series.total / series.count

  def get_last_metric(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> float:
    """Returns the newest value.

    Raises:
      ValueError: No value was logged under these names.
    """
    return self._series(metrics_prefix, metric_name, mode).last

  def get_metric_history(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> np.ndarray:
    """Returns all values that this process logged, the oldest first, as float64.

    In a resumed run earlier values are in `metrics.jsonl` only; means include them.

    Raises:
      ValueError: No value was logged under these names.
    """
    series = self._series(metrics_prefix, metric_name, mode)
    return np.array(series.values, dtype=np.float64)

  def is_complete(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> bool:
    """Returns True if `get_metric_history` has all values of the run.

    It lacks those before a checkpoint that this process has restored.

    Raises:
      ValueError: No value was logged under these names.
    """
    series = self._series(metrics_prefix, metric_name, mode)
    return len(series.values) == series.count

  @property
  def history(self) -> History:
    """The values that this process logged, see `tunix.sft.metrics.history`."""
    shown = {_event(key): series for key, series in self._history.items()}
    return History({name: (x.steps, x.values) for name, x in shown.items() if x.values})

  def state(self) -> dict[str, Any]:
    """Returns the sums of the history and the positions of the backends, as JSON.

    All values logged so far are on disk when it returns. The size of the state does not
    grow with the number of steps.
    """
    backends = self._rewindable_backends()
    positions = {name: backend.position() for name, backend in backends.items()}
    history = [[*key, *series.state()] for key, series in self._history.items()]
    return {"history": history, "backends": positions}

  def restore(self, state: dict[str, Any] | None) -> None:
    """Returns to a `state()`, and drops the values that were logged after it.

    None starts a run from the beginning: metrics files of an earlier run in the folder
    are renamed (`metrics.jsonl.1`, ...), never deleted. Values that this logger has
    already logged then stay, because several runs may share a logger.

    Args:
      state: a result of `state()`. Backends are matched by class; a backend that is
        missing from the state appends to its files.
    """
    if state is None and self._history:
      return
    for name, backend in self._rewindable_backends().items():
      if state is None:
        backend.rewind(None)
      elif name in state["backends"]:
        backend.rewind(state["backends"][name])
    rows = [] if state is None else state["history"]
    self._history = {
      (prefix, mode, name): _Series.restored(sums) for prefix, mode, name, *sums in rows
    }

  def flush(self) -> None:
    """Calls `flush()` of every backend that has it."""
    for backend in self._backends:
      if hasattr(backend, "flush"):
        backend.flush()  # pyright: ignore[reportAttributeAccessIssue]

  def close(self) -> None:
    """Closes the backends; logging again opens them again. The history stays."""
    for backend in self._backends:
      backend.close()

  def _series(self, prefix: str, name: str, mode: Mode | str) -> _Series:
    key = (prefix, _mode(mode), name)
    if key not in self._history:
      events = sorted(_event(key) for key in self._history)
      raise ValueError(
        f"the metric {_event(key)!r} was not logged; expected one of {events}"
      )
    return self._history[key]

  def _text_backends(self) -> list[TextBackend]:
    return [backend for backend in self._backends if isinstance(backend, TextBackend)]

  def _rewindable_backends(self) -> dict[str, RewindableBackend]:
    """Returns the backends that have a position, by class name ("X", "X#2", ...)."""
    named: dict[str, RewindableBackend] = {}
    counts: dict[str, int] = {}
    for backend in self._backends:
      kind = type(backend).__name__
      counts[kind] = counts.get(kind, 0) + 1
      if isinstance(backend, RewindableBackend):
        named[kind if counts[kind] == 1 else f"{kind}#{counts[kind]}"] = backend
    return named


class _Series:
  """The values of one metric, and the sums that its means need."""

  def __init__(self):
    self.steps, self.values = array.array("q"), array.array("d")
    self.count, self.total, self.log_total, self.last = 0, 0.0, 0.0, math.nan

  def add(self, step: int, value: float) -> None:
    self.steps.append(step)
    self.values.append(value)
    self.count += 1
    self.total += value
    self.log_total += _safe_log(value)
    self.last = value

  def state(self) -> list[float | str]:
    return [self.count, *map(encode, (self.total, self.log_total, self.last))]

  @classmethod
  def restored(cls, sums: Sequence[Any]) -> _Series:
    series = cls()
    series.count = sums[0]
    series.total, series.log_total, series.last = map(decode, sums[1:])
    return series


def _safe_log(value: float) -> float:
  if value > 0:
    return math.log(value)
  return -math.inf if value == 0 else math.nan


def _mode(mode: Mode | str) -> str:
  text = str(mode)
  if text not in tuple(Mode):
    raise ValueError(
      f"mode is {text!r}; expected one of {[str(choice) for choice in Mode]}"
    )
  return text


def _event(key: tuple[str, str, str]) -> str:
  return "/".join(part for part in key if part)
