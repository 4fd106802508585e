"""The keys of a run's configuration, with their types, defaults and ranges.

`base_config.yaml` says what each key means; a test keeps the two equal. Checks here
need no device and no file, so that a wrong value fails before anything is imported.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from tunix.cli.convert import at_least, defaults, flatten
from tunix.cli.schema_jobs import check_job
from tunix.cli.schema_mesh import check_mesh
from tunix.cli.schema_preference import DistillKeys, PreferenceKeys
from tunix.cli.schema_rl import (
  RL_JOBS,
  AlgorithmKeys,
  RewardKeys,
  RlKeys,
  RolloutKeys,
  SamplesKeys,
)
from tunix.generate import chat_template

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelKeys:
  """Which model, and how it computes."""

  path: str | None = None
  name: str | None = None
  args: dict[str, Any] = dataclasses.field(default_factory=dict)
  dtype: Dtype | None = None
  param_dtype: Dtype | None = None
  remat: Literal["none", "block", "dots"] | None = None
  scan_layers: bool | None = None
  attention: Literal["auto", "plain", "blockwise", "splash", "cudnn"] | None = None
  quantise: Literal["nf4", "int4", "int8"] | None = None

  def __post_init__(self):
    if self.path is not None and self.name is not None:
      raise ValueError(
        f"model.path is {self.path!r} and model.name {self.name!r}: give a "
        "checkpoint's folder or a preset to start from scratch, not both"
      )
    if self.args and self.name is None:
      raise ValueError(
        f"model.args {sorted(self.args)} change fields of a preset, and model.name is "
        "not set: a checkpoint brings its own sizes"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerKeys:
  """Text to tokens."""

  path: str | None = None
  chat_template: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraKeys:
  """Low-rank adapters; without a rank the whole model is trained."""

  rank: int | None = None
  alpha: float | None = None
  targets: tuple[str, ...] | None = None
  dtype: Dtype | None = None
  dropout: float | None = None
  rslora: bool | None = None
  dora: bool | None = None
  rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
  alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    at_least(1, lora__rank=self.rank)
    if self.dropout is not None and not 0 <= self.dropout < 1:
      raise ValueError(f"lora.dropout is {self.dropout}: it must lie in [0, 1)")
    if self.alpha is not None and not self.alpha > 0:
      raise ValueError(f"lora.alpha is {self.alpha}: it must be positive")
    if self.targets is not None and not self.targets:
      raise ValueError(
        "lora.targets is empty: name modules, or null for all linear ones"
      )
    for field in dataclasses.fields(self):
      name = field.name
      if self.rank is None and getattr(self, name) not in (None, {}):
        raise ValueError(
          f"lora.{name} is set and lora.rank is not, so nothing would be adapted: set "
          "lora.rank (8, for example)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataKeys:
  """Records, and how they become rows of tokens."""

  train: str | None = None
  eval: str | None = None
  max_length: int = 1024
  packing: bool = False
  shuffle: bool = True
  num_epochs: int | None = None
  overlong: Literal["error", "truncate", "drop"] = "error"
  chat: bool | None = None
  template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  scan_limit: int | None = None
  num_threads: int = 1

  def __post_init__(self):
    at_least(2, data__max_length=self.max_length)
    at_least(1, data__num_epochs=self.num_epochs, data__scan_limit=self.scan_limit)
    at_least(0, data__num_threads=self.num_threads)
    chat_template.check_variables(self.template_args, "data.template_args")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKeys:
  """An optax optimizer by name."""

  name: str = "adamw"
  args: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if "learning_rate" in self.args:
      raise ValueError(
        "optimizer.args.learning_rate is set: give training.learning_rate instead"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleKeys:
  """An optax schedule by name; without one the rate is constant."""

  name: str | None = None
  args: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.args and self.name is None:
      raise ValueError(
        f"schedule.args {sorted(self.args)} are set and schedule.name is not: name the "
        "optax schedule that takes them"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingKeys:
  """Steps and batches."""

  learning_rate: float | None = None
  max_steps: int | None = None
  global_batch_size: int = 8
  micro_batch_size: int | None = None
  eval_batch_size: int | None = None
  eval_every_n_steps: int | None = None
  max_grad_norm: float | None = 1.0

  def __post_init__(self):
    if self.learning_rate is not None and not 0 <= self.learning_rate < math.inf:
      raise ValueError(
        f"training.learning_rate is {self.learning_rate}: it must be a number from 0 up"
      )
    if self.max_grad_norm is not None and not self.max_grad_norm > 0:
      raise ValueError(
        f"training.max_grad_norm is {self.max_grad_norm}: it must be positive, or null "
        "for no clipping"
      )
    at_least(
      1,
      training__max_steps=self.max_steps,
      training__global_batch_size=self.global_batch_size,
      training__micro_batch_size=self.micro_batch_size,
      training__eval_batch_size=self.eval_batch_size,
      training__eval_every_n_steps=self.eval_every_n_steps,
    )
    if self.global_batch_size % self.micro_rows:
      raise ValueError(
        f"training.global_batch_size {self.global_batch_size} is no multiple of "
        f"training.micro_batch_size {self.micro_rows}: change one of them"
      )

  @property
  def micro_rows(self) -> int:
    """Rows of one micro-batch."""
    return self.micro_batch_size or self.global_batch_size

  @property
  def eval_rows(self) -> int:
    """Rows of one batch of the evaluation."""
    return self.eval_batch_size or self.micro_rows

  @property
  def micro_batches(self) -> int:
    """Micro-batches of one optimizer step."""
    return self.global_batch_size // self.micro_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
  """When the run is saved."""

  every_n_steps: int | None = None
  min_interval_secs: int | None = None
  max_to_keep: int | None = 3
  asynchronous: bool = True

  def __post_init__(self):
    at_least(
      1,
      checkpoint__every_n_steps=self.every_n_steps,
      checkpoint__max_to_keep=self.max_to_keep,
    )
    at_least(0, checkpoint__min_interval_secs=self.min_interval_secs)
    if self.every_n_steps is not None and self.min_interval_secs is not None:
      raise ValueError(
        f"checkpoint.every_n_steps is {self.every_n_steps} and "
        f"checkpoint.min_interval_secs {self.min_interval_secs}: choose one cadence"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingKeys:
  """Where metrics go besides logs/metrics.jsonl."""

  tensorboard: bool = True
  wandb: bool | None = None
  console: bool = False
  progress_bar: bool = True
  project_name: str = "tunix"
  run_name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportKeys:
  """What is written when training has ended."""

  kind: Literal["auto", "full", "merged", "adapter", "none"] = "auto"
  dtype: Dtype | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """All keys of a run. Sections are checked alone, then against each other.

  Raises:
    ValueError: a value out of range, or keys that contradict each other; the message
      begins with the key.
  """

  job: Literal["sft", "dpo", "orpo", "kto", "reward", "distill", "grpo", "ppo"] = "sft"
  output_dir: str | None = None
  seed: int = 0
  dataset_name: str | None = None
  model: ModelKeys = ModelKeys()
  tokenizer: TokenizerKeys = TokenizerKeys()
  lora: LoraKeys = LoraKeys()
  data: DataKeys = DataKeys()
  optimizer: OptimizerKeys = OptimizerKeys()
  schedule: ScheduleKeys = ScheduleKeys()
  training: TrainingKeys = TrainingKeys()
  preference: PreferenceKeys = dataclasses.field(default=PreferenceKeys())
  distill: DistillKeys = dataclasses.field(default=DistillKeys())
  rollout: RolloutKeys = dataclasses.field(default=RolloutKeys())
  algorithm: AlgorithmKeys = dataclasses.field(default=AlgorithmKeys())
  rl: RlKeys = dataclasses.field(default=RlKeys())
  reward: RewardKeys = dataclasses.field(default=RewardKeys())
  samples: SamplesKeys = dataclasses.field(default=SamplesKeys())
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)
  checkpoint: CheckpointKeys = CheckpointKeys()
  logging: LoggingKeys = LoggingKeys()
  export: ExportKeys = ExportKeys()
  compilation_cache: str | None = None

  def __post_init__(self):
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed is {self.seed}: it must be from 0 to 2**32 - 1")
    self._check_dataset_name()
    self._check_export()
    if self.training.eval_every_n_steps is not None and self.data.eval is None:
      raise ValueError(
        f"training.eval_every_n_steps is {self.training.eval_every_n_steps} and "
        "data.eval is not set: name a file to evaluate on"
      )
    check_job(self.job, flatten(self), defaults(type(self)))
    check_mesh(self.mesh, self.batch_rows)

  def _check_dataset_name(self) -> None:
    if self.dataset_name is None:
      return
    if self.data.train not in (None, self.dataset_name):
      raise ValueError(
        f"dataset_name is {self.dataset_name!r} and data.train {self.data.train!r}, "
        "two names of one setting: give one of them"
      )
    data = dataclasses.replace(self.data, train=self.dataset_name)
    object.__setattr__(self, "data", data)
    object.__setattr__(self, "dataset_name", None)

  def _check_export(self) -> None:
    if self.model.quantise is not None and self.lora.rank is None:
      raise ValueError(
        f"model.quantise is {self.model.quantise!r} and lora.rank is not set: "
        "quantised weights are not trained themselves, set lora.rank (8, for example)"
      )
    needs_lora = self.export.kind in ("merged", "adapter")
    if needs_lora and self.lora.rank is None:
      raise ValueError(
        f"export.kind is {self.export.kind!r} and lora.rank is not set, so there is no "
        "adapter: use 'full', or train with LoRA"
      )
    if self.export.kind == "full" and self.lora.rank is not None:
      raise ValueError(
        "export.kind is 'full' and lora.rank is set: use 'merged' (a whole model) or "
        "'adapter'"
      )
    if self.export.kind == "none" and self.export.dtype is not None:
      raise ValueError(
        f"export.dtype is {self.export.dtype!r} and export.kind 'none': nothing would "
        "be written"
      )
    if self.export.kind == "adapter" and self.job == "reward":
      raise ValueError(
        "export.kind is 'adapter' and job is 'reward': the head of scores is no part "
        "of an adapter, use 'merged'"
      )
    if self.export_kind == "adapter" and self.export.dtype is not None:
      raise ValueError(
        f"export.dtype is {self.export.dtype!r} and an adapter keeps its own "
        "(lora.dtype): set export.kind to 'merged', or leave it out"
      )

  @property
  def is_rl(self) -> bool:
    """Whether the job samples its own answers."""
    return self.job in RL_JOBS

  @property
  def is_on_policy(self) -> bool:
    """Whether a student writes responses that a teacher judges."""
    return self.job == "distill" and self.distill.on_policy_fraction is not None

  @property
  def batch_rows(self) -> dict[str, int]:
    """Rows of batches by key, where they are stated. In RL they follow from prompts and
    completions of each, and the learner checks them."""
    if self.is_rl:
      return {}
    keys = self.training
    return {
      "training.micro_batch_size": keys.micro_rows,
      "training.eval_batch_size": keys.eval_rows,
    }

  @property
  def export_kind(self) -> str:
    """What is exported, "auto" decided."""
    if self.export.kind != "auto":
      return self.export.kind
    if self.lora.rank is None:
      return "full"
    return "merged" if self.job == "reward" else "adapter"
