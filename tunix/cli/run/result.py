"""How a run of the command ended, in numbers and in words, and how to go on from it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from tunix.cli.build.data import RunData
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings.run import RunSettings
from tunix.sft.best import Best


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """How a run ended.

  Attributes:
    steps: optimizer steps done.
    ended_by: data, max_steps or early_stopping; None of runs of before.
    best: the best evaluation: metric, step, value, and how long patience has waited;
      None where training.best is not set.
    train_loss: of the first and the last step, in sft nats per token; not in RL.
    eval_loss: before the first and after the last step; None without evaluation data.
    train_accuracy, eval_accuracy: likewise, the share of pairs of which the chosen
      completion is preferred; dpo, orpo and reward only.
    train_margin, eval_margin: likewise, between the rewards of good and of bad
      completions; kto only.
    train_reward, eval_reward: mean rewards likewise, of the first and the last batch of
      rollouts; RL only.
    export: folder of the exported model or adapter; None without an export.
    export_step: whose weights they are.
  """

  steps: int
  ended_by: str | None = None
  best: dict[str, Any] | None = None
  train_loss: tuple[float, float] | None = None
  eval_loss: tuple[float, float] | None = None
  train_accuracy: tuple[float, float] | None = None
  eval_accuracy: tuple[float, float] | None = None
  train_margin: tuple[float, float] | None = None
  eval_margin: tuple[float, float] | None = None
  train_reward: tuple[float, float] | None = None
  eval_reward: tuple[float, float] | None = None
  export: str | None
  export_step: int | None = None

  def __str__(self) -> str:
    parts = [f"{self.steps} steps"]
    for field in dataclasses.fields(self):
      pair = getattr(self, field.name)
      if field.name.startswith(("train_", "eval_")) and pair is not None:
        what = field.name.replace("_", " ")
        parts.append(f"{what} {pair[0]:.4f} -> {pair[1]:.4f}")
    if self.best is not None:
      parts.append(str(Best(**self.best)))
    if self.best is not None and self.ended_by == "early_stopping":
      parts.append(f"stopped early: no better one in {self.best['waited']} evaluations")
    if self.export is not None:
      is_last = self.export_step in (None, self.steps)
      which = "" if is_last else f"step {self.export_step} "
      parts.append(f"{which}exported to {self.export}")
    return "; ".join(parts)


def ends_of(job: str, file: pathlib.Path) -> dict[str, tuple[float, float]]:
  """{"eval_loss": (first value, last value)} of what a job tells, off its metrics."""
  return {
    f"{mode}_{what}": pair
    for what, name in JOBS[job].results.items()
    for mode, pair in _first_and_last(file, name).items()
  }


def _first_and_last(file: pathlib.Path, name: str) -> dict[str, tuple[float, float]]:
  """{mode: (first value, last value)} of a metrics file."""
  ends: dict[str, tuple[float, float]] = {}
  if not file.is_file():
    return ends
  with file.open() as lines:
    for line in lines:
      if f'"{name}"' not in line:
        continue
      record = json.loads(line)
      if name in record:
        value = float(record[name])
        ends[record["mode"]] = (ends.get(record["mode"], (value,))[0], value)
  return ends


def how_to_go_on(config: RunSettings, data: RunData, result: Result) -> str:
  """What trains longer than a run that is finished."""
  if result.ended_by == "early_stopping":
    return "raise training.best.patience to go on"
  # A schedule's length is fixed when the run begins, and so are the epochs.
  if config.schedule.name is None and _ended_by_max_steps(config, data, result.steps):
    return "raise training.max_steps to go on"
  if result.export is None or config.export_kind == "adapter":
    return "to train longer, use another output_dir"
  return (
    f"to train longer, start from it with --model.path={result.export} and another "
    "output_dir"
  )


def _ended_by_max_steps(config: RunSettings, data: RunData, steps: int) -> bool:
  """Whether there was more data when the run ended."""
  limit = config.training.max_steps
  if limit is None or steps < limit:
    return False
  unlimited = dataclasses.replace(config.training, max_steps=None)
  count = JOBS[config.job].count_steps
  most = count(dataclasses.replace(config, training=unlimited), data.reports["train"])
  # With max_steps alone the data is repeated; without that key it would be read once.
  return config.data.num_epochs is None or most is None or most > steps
