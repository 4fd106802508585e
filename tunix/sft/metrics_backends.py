"""Where metrics go besides JSON lines: TensorBoard, Weights & Biases, the console.

The packages behind them are imported when the first value is written.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO, runtime_checkable

from tunix.sft.metrics_records import Record, StepRecords, as_number, split_event
from tunix.utils import optional


@runtime_checkable
class LoggingBackend(Protocol):
  """Anything that takes scalars.

  A backend that can go back also has `position() -> dict` (JSON-able, everything
  before it safely stored) and `rewind(position | None)`; then a resumed run leaves
  neither gaps nor doubles in it. One that holds values back may have `flush()`, which
  is called when a run ends and may go on later.
  """

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    """Takes one value of `event` ("prefix/mode/name"); `step` is a keyword."""
    ...

  def close(self) -> None:
    """Writes out what is held back."""
    ...


@runtime_checkable
class RewindableBackend(LoggingBackend, Protocol):
  """A backend that a resumed run can continue where a checkpoint was taken."""

  def position(self) -> dict[str, Any]: ...

  def rewind(self, position: dict[str, Any] | None) -> None: ...


@runtime_checkable
class TextBackend(LoggingBackend, Protocol):
  """A backend that takes more than scalars."""

  def log_config(self, config: Mapping[str, Any]) -> None:
    """The settings of the run by key; called before its first value."""
    ...

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    """Completions with their rewards, as `tunix.rl.samples.groups_of` makes them."""
    ...


_SAMPLE_FIELDS = ("text", "reward", "advantage", "tokens", "finish_reason")


def _sample_rows(groups: Sequence[Mapping[str, Any]], step: int) -> list[list[Any]]:
  """A row for every completion: step, prompt, and `_SAMPLE_FIELDS`."""
  return [
    [step, _as_text(group["prompt"]), *(row.get(name) for name in _SAMPLE_FIELDS)]
    for group in groups
    for row in group["completions"]
  ]


def _as_text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_markdown(config: Mapping[str, Any]) -> str:
  """TensorBoard shows four spaces in front of a line as it is."""
  return "\n".join(f"    {key}: {_as_text(value)}" for key, value in config.items())


class TensorboardBackend:
  """Event files for TensorBoard.

  Written by this thread through tensorboardX's record writer: its `SummaryWriter` has a
  queue that a flush does not wait for.

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

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    """Notes one value; `step` is the keyword that counts."""
    step = int(kwargs.get("step") or 0)
    point = {"tag": event, "simple_value": as_number(event, value)}
    self._write(step, summary={"value": [point]})
    self._last_step = max(self._last_step, step)
    if step - self._flushed_step >= self._flush_every:
      self._writer.flush()
      self._flushed_step = step

  def log_config(self, config: Mapping[str, Any]) -> None:
    # With the first value: a run that is put back hides what was written before.
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
    """The last step written, after it is on disk."""
    if self._writer is not None:
      self._writer.flush()
    return {"step": self._last_step}

  def rewind(self, position: dict[str, Any] | None) -> None:
    """TensorBoard hides what was written after the position (None: everything)."""
    self.close()
    folder = pathlib.Path(self._log_dir)
    old = folder.is_dir() and any(folder.glob("events.out.tfevents.*"))
    self._last_step = -1 if position is None else int(position["step"])
    self._flushed_step = max(self._last_step, 0)
    self._purge_step = self._last_step + 1 if old else None

  def flush(self) -> None:
    """Everything is in the file."""
    if self._writer is not None:
      self._writer.flush()

  def close(self) -> None:
    """Flushes and closes the file; logging again begins another one."""
    writer, self._writer = self._writer, None
    if writer is not None:
      writer.close()

  def _write(self, step: int, **content: Any) -> None:
    purpose, package = "logging to TensorBoard", "tensorboardX"
    proto = optional.require("tensorboardX.proto.event_pb2", purpose, package)
    if self._writer is None:
      files = optional.require("tensorboardX.event_file_writer", purpose, package)
      os.makedirs(self._log_dir, exist_ok=True)
      # tensorboardX names files by the second and overwrites: make names unique.
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
  """A Weights & Biases run, begun with the first value that is sent.

  Values of a step are sent together, in the order of steps: W&B drops what comes
  for an earlier step. A resumed run continues the W&B run of the checkpoint, which
  keeps the values it already has.

  Args:
    project_name: the W&B project.
    run_name: name shown for the run; W&B invents one when empty.
    log_dir: folder for W&B's local files; W&B's own default when None.
    project, name: what W&B calls the first two; they go before them.
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
    self._tables: dict[int, list[list[Any]]] = {}  # wait for the values of their step
    self._run: Any = None
    self._run_id: str | None = None

  def log_config(self, config: Mapping[str, Any]) -> None:
    self._settings["config"] = dict(config)

  def log_samples(self, groups: Sequence[Mapping[str, Any]], step: int) -> None:
    self._tables[step] = _sample_rows(groups, step)

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    step = int(kwargs.get("step") or 0)
    self._send(self._records.add(step, None, event, as_number(event, value)))

  def position(self) -> dict[str, Any]:
    return {"run_id": self._run_id, "open": self._records.state()}

  def rewind(self, position: dict[str, Any] | None) -> None:
    """Continues the run that the position names; None begins a new one."""
    run_id = None if position is None else position["run_id"]
    if run_id != self._run_id:
      self._finish()
    self._run_id = run_id
    self._records.load([] if position is None else position["open"])

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
      self._run = wandb.init(id=self._run_id, resume="allow", **self._settings)
      self._run_id = self._run.id
    return self._run

  def _finish(self) -> None:
    run, self._run = self._run, None
    if run is not None:
      run.finish()


class ConsoleBackend:
  """One line of text per step and mode, printed when the next step begins.

  Args:
    stream: where to print; standard output when None.
  """

  def __init__(self, stream: TextIO | None = None):
    self._stream = stream
    self._records = StepRecords(1)

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    mode, key = split_event(event)
    step = int(kwargs.get("step") or 0)
    self._print(self._records.add(step, mode, key, as_number(event, value)))

  def flush(self) -> None:
    self._print(self._records.release_all())

  def close(self) -> None:
    self.flush()

  def _print(self, records: list[Record]) -> None:
    for record in records:
      values = " ".join(f"{key}={value:.5g}" for key, value in record.values.items())
      where = f"step {record.step}" + (f" {record.mode}" if record.mode else "")
      print(f"{where} {values}", file=self._stream or sys.stdout, flush=True)
