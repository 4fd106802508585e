"""The result of a run, and the advice on how to train longer."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.cli.jobs.table import JOBS
from tunix.cli.make import data as build_data, model_folders
from tunix.cli.make.data import RunData
from tunix.cli.run.folder import export_of
from tunix.cli.settings import keys
from tunix.cli.settings.run import RunSettings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.sft.best import Best
from tunix.sft.metrics.history import History
from tunix.sft.metrics.jsonl import METRICS_FILE, TIMINGS_FILE
from tunix.sft.metrics.records import split_event
from tunix.utils import terminal, text_files

# "train_loss", "eval_loss", "train_accuracy", ...: the metrics of all jobs.
_METRICS = tuple(
  dict.fromkeys(
    f"{mode}_{name}"
    for job in JOBS.values()
    for name in job.results
    for mode in ("train", "eval")
  )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The result of a finished run.

  Attributes:
    steps: optimizer steps of the run.
    ended_by: "data", "max_steps" or "early_stopping"; None in folders of old versions.
    best: the best evaluation: metric, step, value, and evaluations since then; None if
      training.best is not set.
    metrics: {"train_loss": (first value, last value), "eval_loss": ..., ...} of the
      job's metrics (`Job.results`). Training metrics are of the first and last step (in
      RL, batch of rollouts), evaluation metrics of the first and last evaluation.
    export: folder of the exported model or adapter; None without an export.
    export_step: step of the exported weights.
    notes: notes from the start of the run, and its warnings (`TrainResult.notes`).
  """

  steps: int
  ended_by: str | None = None
  best: dict[str, Any] | None = None
  metrics: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
  export: str | None
  export_step: int | None = None
  notes: Sequence[str] = ()

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> Result:
    """Reads the values of `to_json`."""
    metrics = {
      name: tuple(pair)
      for name, pair in values.items()
      if name in _METRICS and pair is not None
    }
    rest = {name: value for name, value in values.items() if name not in _METRICS}
    return cls(metrics=metrics, **rest)

  def to_json(self) -> dict[str, Any]:
    """Returns the values of result.json; metrics of other jobs are None."""
    return {
      "steps": self.steps,
      "ended_by": self.ended_by,
      "best": self.best,
      **{name: self.metrics.get(name) for name in _METRICS},
      "export": self.export,
      "export_step": self.export_step,
      "notes": list(self.notes),
    }

  def __str__(self) -> str:
    parts = [terminal.counted(self.steps, "step")]
    parts += [
      f"{name.replace('_', ' ')} {first:.4f} -> {last:.4f}"
      for name, (first, last) in self.metrics.items()
    ]
    if self.best is not None:
      parts.append(str(Best(**self.best)))
      if self.ended_by == "early_stopping":
        waited = terminal.counted(self.best["waited"], "evaluation")
        parts.append(f"stopped early: no better one in {waited}")
    if self.export is not None:
      is_last = self.export_step in (None, self.steps)
      which = "" if is_last else f"step {self.export_step} "
      parts.append(f"{which}exported to {self.export}")
    return "; ".join([*parts, *self.notes])


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobResult(Result):
  """The result of a job, with objects for the rest of a Python program.

  Attributes:
    output_dir: folder of the run; None if nothing was kept.
    history: metrics of all steps by "mode/metric": `history["train/loss"].values`.
    tokenizer: tokenizer of the run.
    trainer: trainer or RL learner of the run, closed; None if the run in output_dir had
      finished before.
    trained: the trained model; None as for `trainer`. See `model`.
  """

  output_dir: str | None
  history: History = dataclasses.field(repr=False)
  tokenizer: TokenizerAdapter = dataclasses.field(repr=False)
  trainer: Any = dataclasses.field(default=None, repr=False)
  trained: Transformer | None = dataclasses.field(default=None, repr=False)

  @functools.cached_property
  def model(self) -> Transformer:
    """The trained model, or the exported one if the run had finished before.

    Raises:
      FileNotFoundError: the run had finished before, without an export.
    """
    if self.trained is not None:
      return self.trained
    assert self.output_dir is not None
    return model_folders.load_model(*export_of(self.output_dir, None))


def read_history(logs: pathlib.Path) -> History:
  """Reads the metrics of all steps, also of earlier processes, from their JSON lines.

  Args:
    logs: folder of `metrics.jsonl` and `timings.jsonl`. Without these files (the run
      has logged nothing) the history is empty.
  """
  columns: dict[str, tuple[list[int], list[float]]] = {}
  for file in (logs / METRICS_FILE, logs / TIMINGS_FILE):
    for line in text_files.lines(file.read_text()) if file.is_file() else ():
      record = json.loads(line)
      step, mode = record.pop("step"), record.pop("mode")
      for metric, value in record.items():
        steps, values = columns.setdefault(f"{mode}/{metric}", ([], []))
        steps.append(step)
        values.append(float(value))  # "NaN" too
  return History(columns)


def by_mode(history: History) -> History:
  """Returns a trainer's history under the names of `JobResult.history`."""
  named = {"/".join(filter(None, split_event(e))): history[e] for e in history}
  return History(named)


def ends(job: str, history: History) -> dict[str, tuple[float, float]]:
  """Returns `Result.metrics` of a job.

  Args:
    job: name of the job.
    history: metrics by "mode/metric".
  """
  series = {}
  for name, metric in JOBS[job].results.items():
    for mode in ("train", "eval"):
      if (event := f"{mode}/{metric}") in history:
        values = history[event].values
        series[f"{mode}_{name}"] = float(values[0]), float(values[-1])
  return {name: series[name] for name in _METRICS if name in series}


def how_to_train_longer(config: RunSettings, data: RunData, result: Result) -> str:
  """Returns the advice on how to train longer than a finished run."""
  if result.ended_by == "early_stopping":
    return "raise training.best.patience to go on"
  # The length of a schedule and the number of epochs are fixed when the run begins.
  if config.schedule.name is None and _ended_by_max_steps(config, data, result.steps):
    return "raise training.max_steps to go on"
  if result.export is None or config.export_kind == "adapter":
    return "to train longer, use another output_dir"
  return (
    f"to train longer, start from it with --model.path={result.export} and another "
    "output_dir"
  )


def _ended_by_max_steps(config: RunSettings, data: RunData, steps: int) -> bool:
  """Returns True if training.max_steps ended the run before its data."""
  limit = config.training.max_steps
  if limit is None or steps < limit:
    return False
  unlimited = keys.with_value(config, "training.max_steps", None)
  most = build_data.count_steps(unlimited, data.reports["train"])
  # With max_steps alone the data is repeated; without that key it would be read once.
  return config.data.num_epochs is None or most is None or most > steps
