"""The metrics of a run: a history to ask, and backends that store them.

    logger = MetricsLogger(MetricsLoggerOptions(log_dir="/tmp/logs"))
    logger.log("", "loss", 2.5, Mode.TRAIN, 7)  # event "train/loss"

A logger hands values to its own backends only. They also go to
`jax.monitoring.record_scalar` for whoever listens there; the logger does not.
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

from tunix.sft.history import History
from tunix.sft.metrics_backends import (
  ConsoleBackend,
  LoggingBackend,
  RewindableBackend,
  TensorboardBackend,
  TextBackend,
  WandbBackend,
)
from tunix.sft.metrics_jsonl import VOLATILE, JsonlBackend
from tunix.sft.metrics_records import Mode, as_number, decode, encode
from tunix.utils import checks, env

__all__ = [
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

# Means of these are geometric: the perplexity of several steps is exp(mean loss).
_GEOMETRIC = frozenset({"perplexity"})


@dataclasses.dataclass(frozen=True)
class MetricsLoggerOptions:
  """What to log to.

  Args:
    log_dir: local folder of the TensorBoard and JSON-lines files.
    project_name: project in Weights & Biases.
    run_name: name of the run there; W&B invents one when empty.
    flush_every_n_steps: steps between two flushes of TensorBoard's files (JSON lines
      are written line by line).
    backend_factories: functions that make the backends, in place of the default ones;
      an empty sequence means none.

  Raises:
    ValueError: an empty log_dir without backend_factories; flush_every_n_steps < 1.
  """

  log_dir: str | os.PathLike[str]
  _: dataclasses.KW_ONLY
  project_name: str = "tunix"
  run_name: str = ""
  flush_every_n_steps: int = 100
  backend_factories: Sequence[BackendFactory] | None = None

  def __post_init__(self):
    checks.fields(self, flush_every_n_steps=checks.COUNT)
    if not str(self.log_dir) and self.backend_factories is None:
      raise ValueError("log_dir is empty: name a folder, or give backend_factories")

  def create_backends(self) -> list[LoggingBackend]:
    """The backends of this process: none but on process 0.

    By default TensorBoard and JSON lines, and Weights & Biases when WANDB_* is set.

    Raises:
      OSError: log_dir cannot be made.
    """
    if jax.process_index() != 0:
      return []
    if self.backend_factories is not None:
      return [factory() for factory in self.backend_factories]
    backends: list[LoggingBackend] = [
      JsonlBackend(self.log_dir),
      TensorboardBackend(self.log_dir, self.flush_every_n_steps),
    ]
    if env.wandb_requested():
      backends.append(WandbBackend(self.project_name, self.run_name, self.log_dir))
    return backends


class MetricsLogger:
  """Logs scalars, remembers them, and can be part of a checkpoint.

  Args:
    metrics_logger_options: what to log to; only the history is kept when None.
  """

  def __init__(self, metrics_logger_options: MetricsLoggerOptions | None = None):
    options = metrics_logger_options
    self._backends = options.create_backends() if options is not None else []
    self._history: dict[tuple[str, str, str], _Series] = {}

  def log(
    self,
    metrics_prefix: str,
    metric_name: str,
    scalar_value: Any,
    mode: Mode | str,
    step: int,
  ) -> None:
    """Logs one value under "prefix/mode/name" ("mode/name" for an empty prefix).

    A JAX array makes the caller wait for it: see `metrics_buffer` for what is
    computed by the running step.

    Raises:
      ValueError: an unknown mode, or a value with more than one element.
      TypeError: the value is no number.
    """
    key = (metrics_prefix, _mode(mode), metric_name)
    event = _event(key)
    value = as_number(event, scalar_value)
    self._history.setdefault(key, _Series()).add(int(step), value)
    for backend in self._backends:
      backend.log_scalar(event, value, step=step)
    jax.monitoring.record_scalar(event, value, step=int(step))

  def log_config(self, config: Mapping[str, Any]) -> None:
    """Hands the settings of the run to the backends that show them; call it before the
    first value is logged.

    Args:
      config: values that JSON has, by key.
    """
    for backend in self._backends:
      if isinstance(backend, TextBackend):
        backend.log_config(config)

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    """Hands completions to the backends that show them; see `tunix.rl.samples`."""
    for backend in self._backends:
      if isinstance(backend, TextBackend):
        backend.log_samples(groups, step)

  def metric_exists(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> bool:
    """Whether anything was logged under these names."""
    return (metrics_prefix, _mode(mode), metric_name) in self._history

  def get_metric(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> float:
    """Mean over all steps, the geometric mean for "perplexity"; constant cost.

    Raises:
      ValueError: nothing was logged under these names.
    """
    series = self._series(metrics_prefix, metric_name, mode)
    if metric_name in _GEOMETRIC:
      return float(np.exp(series.log_total / series.count))
    return series.total / series.count

  def get_last_metric(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> float:
    """The newest value.

    Raises:
      ValueError: nothing was logged under these names.
    """
    return self._series(metrics_prefix, metric_name, mode).last

  def get_metric_history(
    self, metrics_prefix: str, metric_name: str, mode: Mode | str
  ) -> np.ndarray:
    """All values that this process logged, oldest first, as float64.

    A resumed run has the earlier ones in `metrics.jsonl` only; means go on over both.

    Raises:
      ValueError: nothing was logged under these names.
    """
    series = self._series(metrics_prefix, metric_name, mode)
    return np.array(series.values, dtype=np.float64)

  @property
  def history(self) -> History:
    """All that this process logged, as a table; see `tunix.sft.history`."""
    shown = {_event(key): series for key, series in self._history.items()}
    return History({name: (x.steps, x.values) for name, x in shown.items() if x.values})

  def state(self) -> dict[str, Any]:
    """Sums of the history and the backends' positions, as JSON.

    Everything logged so far is on disk when it returns, and its size does not grow
    with the age of the run.
    """
    positions = {
      name: backend.position()
      for name, backend in self._named_backends()
      if isinstance(backend, RewindableBackend)
    }
    history = [[*key, *series.state()] for key, series in self._history.items()]
    return {"history": history, "backends": positions}

  def restore(self, state: dict[str, Any] | None) -> None:
    """Goes back to a `state()`: what was logged after it is taken back.

    None means a run from the beginning: metrics files that an earlier run left in
    the folder are moved aside (`metrics.jsonl.1`, ...), never deleted; what this logger
    has logged stays, for several runs may share it. Backends are matched by class; one
    that the state does not know appends.
    """
    if state is None and self._history:
      return
    for name, backend in self._named_backends():
      if not isinstance(backend, RewindableBackend):
        continue
      if state is None:
        backend.rewind(None)
      elif name in state["backends"]:
        backend.rewind(state["backends"][name])
    rows = [] if state is None else state["history"]
    self._history = {
      (prefix, mode, name): _Series.restored(sums) for prefix, mode, name, *sums in rows
    }

  def flush(self) -> None:
    """Everything logged is with its backend, as far as that has `flush()`."""
    for backend in self._backends:
      if hasattr(backend, "flush"):
        backend.flush()  # pyright: ignore[reportAttributeAccessIssue]

  def close(self) -> None:
    """Closes the backends. Logging again opens them again; the history stays."""
    for backend in self._backends:
      backend.close()

  def _series(self, prefix: str, name: str, mode: Mode | str) -> _Series:
    key = (prefix, _mode(mode), name)
    if key not in self._history:
      known = sorted(_event(key) for key in self._history)
      raise ValueError(f"no metric {_event(key)!r} was logged; there are {known}")
    return self._history[key]

  def _named_backends(self) -> list[tuple[str, LoggingBackend]]:
    names: dict[str, int] = {}
    out = []
    for backend in self._backends:
      kind = type(backend).__name__
      names[kind] = names.get(kind, 0) + 1
      out.append((kind if names[kind] == 1 else f"{kind}#{names[kind]}", backend))
    return out


class _Series:
  """The values of one metric, with running sums."""

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
      f"mode {text!r} is unknown: use one of {[str(known) for known in Mode]}"
    )
  return text


def _event(key: tuple[str, str, str]) -> str:
  return "/".join(part for part in key if part)
