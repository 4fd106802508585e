"""Backends that store metrics: TensorBoard, Weights & Biases, the console.

`BACKENDS` is the table of all backends. A new backend is a class, an entry there and,
for the command, a field of `tunix.cli.settings.run.LoggingSettings`. The packages of
the backends are imported when the first value is written.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TextIO, runtime_checkable

from tunix.sft.metrics.jsonl import JsonlBackend
from tunix.sft.metrics.records import Record, StepRecords, as_number, split_event
from tunix.utils import env, optional


@runtime_checkable
class LoggingBackend(Protocol):
  """An object that stores scalars.

  A backend may have further methods: those of RewindableBackend and TextBackend, and
  `flush()`, which writes buffered values when a run ends. Logging can continue after a
  flush.
  """

  def log_scalar(self, event: str, value: object, **kwargs: object) -> None:
    """Takes one value of `event` ("prefix/mode/name"); `step` is a keyword."""

  def close(self) -> None:
    """Writes buffered values and closes files."""


@runtime_checkable
class RewindableBackend(LoggingBackend, Protocol):
  """A backend that a resumed run continues without gaps and without repetitions."""

  def position(self) -> dict[str, Any]:
    """Returns its place as JSON, after everything before it was stored."""
    ...

  def rewind(self, position: dict[str, Any] | None) -> None:
    """Drops everything after a position; None: the run starts from the beginning."""


@runtime_checkable
class TextBackend(LoggingBackend, Protocol):
  """A backend that also shows settings and completions."""

  def log_config(self, config: Mapping[str, Any]) -> None:
    """Takes the settings of the run by key, before its first value."""

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    """Takes completions with their rewards, see `tunix.rl.experience.samples`."""


_SAMPLE_FIELDS = ("text", "reward", "advantage", "tokens", "finish_reason")


def _sample_rows(groups: Sequence[Mapping[str, Any]], step: int) -> list[list[Any]]:
  """Returns a row for each completion: step, prompt, and `_SAMPLE_FIELDS`."""
  return [
    [step, _as_text(group["prompt"]), *(row.get(name) for name in _SAMPLE_FIELDS)]
    for group in groups
    for row in group["completions"]
  ]


def _as_text(value: object) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_markdown(config: Mapping[str, Any]) -> str:
  """Returns lines with four leading spaces, which TensorBoard shows verbatim."""
  return "\n".join(f"    {key}: {_as_text(value)}" for key, value in config.items())


class TensorboardBackend:
  """Writes event files for TensorBoard.

  It uses the record writer of tensorboardX, because the queue of its `SummaryWriter` is
  not empty after a flush: a checkpoint's position would be ahead of the file.

  Args:
    log_dir: folder of the event files.
    flush_every_n_steps: steps between two flushes to disk.
  """

  def __init__(self, log_dir: str | os.PathLike[str], flush_every_n_steps: int = 100):
    self._log_dir = str(log_dir)
    self._flush_every = flush_every_n_steps
    self._writer: Any = None
    self._purge_step: int | None = None
    self._config: Mapping[str, Any] | None = None  # not written yet
    self._last_step = -1
    self._flushed_step = 0

  def log_scalar(self, event: str, value: object, **kwargs: Any) -> None:
    """Takes one value; of the keywords only `step` is read."""
    step = int(kwargs.get("step") or 0)
    point = {"tag": event, "simple_value": as_number(event, value)}
    self._write(step, summary={"value": [point]})
    self._last_step = max(self._last_step, step)
    if step - self._flushed_step >= self._flush_every:
      self._writer.flush()
      self._flushed_step = step

  def log_config(self, config: Mapping[str, Any]) -> None:
    # Written with the first value: `rewind`, which comes before it, hides older events.
    self._config = config

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    names = ("step", "prompt", *_SAMPLE_FIELDS)
    for number, row in enumerate(_sample_rows(groups, step)):
      self._write_text(f"samples/{number}", _as_markdown(dict(zip(names, row))), step)

  def _write_text(self, tag: str, text: str, step: int) -> None:
    tensor = {
      "dtype": "DT_STRING",
      "string_val": [text.encode("utf-8", "replace")],
      "tensor_shape": {"dim": [{"size": 1}]},
    }
    shown = {"plugin_data": {"plugin_name": "text"}}
    point = {"tag": f"{tag}/text_summary", "metadata": shown, "tensor": tensor}
    self._write(step, summary={"value": [point]})

  def position(self) -> dict[str, Any]:
    """Returns the last step written; everything up to it is on disk."""
    self.flush()
    return {"step": self._last_step}

  def rewind(self, position: dict[str, Any] | None) -> None:
    """Makes TensorBoard hide all events after the position (None: all events)."""
    self.close()
    folder = pathlib.Path(self._log_dir)
    old = folder.is_dir() and any(folder.glob("events.out.tfevents.*"))
    self._last_step = -1 if position is None else int(position["step"])
    self._flushed_step = max(self._last_step, 0)
    self._purge_step = self._last_step + 1 if old else None

  def flush(self) -> None:
    """Writes buffered events to the file."""
    if self._writer is not None:
      self._writer.flush()

  def close(self) -> None:
    """Writes buffered events and closes the file; logging again starts another file."""
    writer, self._writer = self._writer, None
    if writer is not None:
      writer.close()

  def _write(self, step: int, **content: object) -> None:
    purpose, package = "logging to TensorBoard", "tensorboardX"
    proto = optional.require("tensorboardX.proto.event_pb2", purpose, package)
    if self._writer is None:
      files = optional.require("tensorboardX.event_file_writer", purpose, package)
      os.makedirs(self._log_dir, exist_ok=True)
      # tensorboardX names files by the second, and would overwrite one of this second.
      suffix = f".{os.getpid()}.{time.monotonic_ns()}"
      prefix = os.path.join(self._log_dir, "events")
      self._writer = files.EventsWriter(prefix, filename_suffix=suffix)
      if self._purge_step is not None:
        start = {"status": proto.SessionLog.START}
        purge, self._purge_step = self._purge_step, None
        self._write(purge, session_log=start)
      if self._config is not None:
        config, self._config = self._config, None
        self._write_text("configuration", _as_markdown(config), 0)
    event = proto.Event(wall_time=time.time(), step=step, **content)
    self._writer.write_event(event)


class WandbBackend:
  """Sends metrics to a Weights & Biases run.

  A trainer starts it before its first step, so that a server that does not answer ends
  the run at once. Otherwise it starts with the first value.

  The values of a step are sent together and steps in ascending order, because W&B drops
  values of earlier steps. A resumed run continues the W&B run of the checkpoint, which
  keeps the values that it already has.

  Args:
    project_name: the W&B project.
    run_name: name shown for the run; W&B invents one if it is empty.
    log_dir: folder for W&B's local files; None: W&B's default.
    project, name: the same two under W&B's names; they take precedence.
  """

  def __init__(
    self,
    project_name: str = "tunix",
    run_name: str = "",
    log_dir: str | os.PathLike[str] | None = None,
    *,
    project: str | None = None,
    name: str | None = None,
  ):
    self._settings: dict[str, Any] = {
      "project": project or project_name,
      "name": name or run_name or None,
    }
    if log_dir is not None:
      self._settings["dir"] = str(log_dir)
    self._records = StepRecords(2)
    # Rows of completions by step; each table is sent with the values of its step.
    self._tables: dict[int, list[list[Any]]] = {}
    self._run: Any = None
    self._run_id: str | None = None

  def log_config(self, config: Mapping[str, Any]) -> None:
    self._settings["config"] = dict(config)

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    self._tables[step] = _sample_rows(groups, step)

  def log_scalar(self, event: str, value: object, **kwargs: Any) -> None:
    step = int(kwargs.get("step") or 0)
    self._send(self._records.add(step, None, event, as_number(event, value)))

  def position(self) -> dict[str, Any]:
    return {"run_id": self._run_id, "open": self._records.state()}

  def rewind(self, position: dict[str, Any] | None) -> None:
    """Continues the W&B run of the position; None starts a new one.

    Raises:
      RuntimeError: W&B does not start the run; the message has the remedy.
    """
    run_id = None if position is None else position["run_id"]
    if run_id != self._run_id:
      self._finish()
    self._run_id = run_id
    self._records.load([] if position is None else position["open"])
    self._open()

  def flush(self) -> None:
    self._send(self._records.release_all())

  def close(self) -> None:
    self.flush()
    self._finish()

  def _send(self, records: list[Record]) -> None:
    for record in records:
      run, values = self._open(), dict[str, Any](record.values)
      for step in [step for step in self._tables if step <= record.step]:
        values["samples"] = self._table(self._tables.pop(step))
      run.log(values, step=record.step)

  def _table(self, rows: list[list[Any]]) -> Any:
    wandb = optional.require("wandb", "logging to Weights & Biases", "wandb")
    return wandb.Table(columns=["step", "prompt", *_SAMPLE_FIELDS], data=rows)

  def _open(self) -> Any:
    if self._run is None:
      wandb = optional.require("wandb", "logging to Weights & Biases", "wandb")
      try:
        self._run = wandb.init(id=self._run_id, resume="allow", **self._settings)
      except wandb.Error as error:
        reason = " ".join(str(error).split())[:200]
        raise RuntimeError(
          f"W&B does not start a run of project {self._settings['project']!r} "
          f"({reason}): log in with `wandb login`, or set WANDB_MODE=offline and call "
          "`wandb sync` later, or switch it off (WANDB_MODE=disabled, "
          "logging.wandb=false)"
        ) from error
      self._run_id = self._run.id
    return self._run

  def _finish(self) -> None:
    run, self._run = self._run, None
    if run is not None:
      run.finish()


class ConsoleBackend:
  """Prints one line for each step and mode, when the next step begins.

  Args:
    stream: the file to print to; None: standard output.
  """

  def __init__(self, stream: TextIO | None = None):
    self._stream = stream
    self._records = StepRecords(1)

  def log_scalar(self, event: str, value: object, **kwargs: Any) -> None:
    mode, key = split_event(event)
    step = int(kwargs.get("step") or 0)
    self._print(self._records.add(step, mode, key, as_number(event, value)))

  def close(self) -> None:
    self._print(self._records.release_all())

  flush = close

  def _print(self, records: list[Record]) -> None:
    for record in records:
      values = " ".join(f"{key}={value:.5g}" for key, value in record.values.items())
      where = f"step {record.step}" + (f" {record.mode}" if record.mode else "")
      print(f"{where} {values}", file=self._stream or sys.stdout, flush=True)


class BackendKind(NamedTuple):
  """An entry of `BACKENDS`.

  Attributes:
    make: function from MetricsLoggerOptions to the backend.
    is_default: tells whether the backend is used if the options do not choose.
  """

  make: Callable[[Any], LoggingBackend]
  is_default: Callable[[], bool]


BACKENDS: dict[str, BackendKind] = {
  "jsonl": BackendKind(lambda o: JsonlBackend(o.log_dir), lambda: True),
  "tensorboard": BackendKind(
    lambda o: TensorboardBackend(o.log_dir, o.flush_every_n_steps), lambda: True
  ),
  "wandb": BackendKind(
    lambda o: WandbBackend(o.project_name, o.run_name, o.log_dir), env.wandb_requested
  ),
  "console": BackendKind(lambda o: ConsoleBackend(), lambda: False),
}
