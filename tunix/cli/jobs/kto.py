"""The job kto: training on labeled completions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from tunix.cli.jobs import preference
from tunix.cli.jobs.job import Job, Loaded
from tunix.cli.jobs.preference_settings import PreferenceRun, ResponseSettings, Unusable
from tunix.cli.make import data as build_data
from tunix.cli.make.data import RunData
from tunix.data.records import LABELLED, Kind
from tunix.data.scan import Report
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.utils.setting import model_setting

# The range of n_D desirable_weight / (n_U undesirable_weight) that the paper recommends
# (arXiv:2402.01306, section 4.2).
_BALANCE = (1.0, 4 / 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOSettings(ResponseSettings):
  """Settings of the job kto.

  Attributes:
    beta: strength of the pull toward the reference.
    desirable_weight, undesirable_weight: weights of the two labels in the loss. The
      paper recommends desirable_weight n_D / (undesirable_weight n_U) between 1 and 4/3
      for n_D desirable and n_U undesirable completions.
    reference: folder of the reference. null: the model itself before the training (with
      adapters the same weights without them, else a second copy).
  """

  config_class = KTOConfig

  beta: float = 0.1
  desirable_weight: float = 1.0
  undesirable_weight: float = 1.0
  unusable: Unusable = "error"
  reference: str | None = model_setting("reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTORun(PreferenceRun):
  """Settings of a run of the job kto."""

  records: ClassVar[Kind] = LABELLED

  job: Literal["kto"] = "kto"
  preference: KTOSettings = KTOSettings()


def _build_data(config: Any, tokenizer: TokenizerAdapter, scans: Any = None) -> RunData:
  """Builds the data, and refuses data with one label only.

  Raises:
    FileNotFoundError, ValueError: As for `build_data.build_data`; or all
      completions have one label, from which KTO would only learn to raise, or to lower,
      the probability of every completion.
  """
  data = build_data.build_data(config, tokenizer, scans)
  report: Report = data.reports["train"]
  if not report.desirable or not report.undesirable:
    label = "true" if report.desirable else "false"
    raise ValueError(
      f"{config.data.train}: all {report.kept} completions have the label {label}; "
      "expected both labels. Add completions of the other one, or train on desirable "
      "completions alone with the job sft."
    )
  return data


def balance_note(config: KTORun, report: Report) -> str | None:
  """Returns advice about unbalanced labels; None if they are balanced.

  Args:
    config: settings with the weights of the two labels.
    report: counts of the training data.
  """
  settings = config.preference
  assert report.desirable
  share = report.desirable / report.undesirable
  ratio = settings.desirable_weight * share / settings.undesirable_weight
  low, high = _BALANCE
  if low <= ratio <= high:
    return None
  name = "undesirable_weight" if share > 1 else "desirable_weight"
  value = share if share > 1 else 1 / share
  return (
    f"desirable completions weigh {ratio:.2f} times as much as undesirable ones; "
    f"KTO's paper recommends 1 to 1.33. Set preference.{name}={value:.3g} (and the "
    "other weight to 1) for a ratio of 1"
  )


def _notes(config: KTORun, data: RunData) -> list[str]:
  note = balance_note(config, data.reports["train"])
  return [] if note is None else [note]


def _build(run: Loaded) -> KTOTrainer:
  return KTOTrainer(
    run.model,
    run.models.reference(run.config.preference.reference),
    run.optimizer,
    preference.trainer_config(run),
    metrics_logger=run.logger(),
  )


def _example(config: Any) -> dict[str, np.ndarray]:
  """Returns a global batch of labeled completions of full length, for `tunix plan`."""
  limits, rows = config.preference, config.training.global_batch_size
  lengths = {
    "prompt": limits.max_prompt_length,
    "completion": limits.max_response_length,
  }
  batch = {
    "labels": np.arange(rows) % 2 == 0,
    "weights": np.ones(rows, np.float32),
  }
  for name, length in lengths.items():
    batch[f"{name}_ids"] = np.zeros((rows, length), np.int32)
    batch[f"{name}_mask"] = np.ones((rows, length), np.int32)
  return batch


KTO = Job(
  summary="KTO, which trains on completions labeled good or bad",
  records=(LABELLED,),
  first_values=preference.FIRST_VALUES,
  settings=KTORun,
  data=_build_data,
  build=_build,
  results={"loss": "loss", "margin": "rewards/margin"},
  batch=preference.describe_batch,
  length=preference.ROW_LENGTH,
  notes=_notes,
  example=_example,
)
