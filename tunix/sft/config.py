"""What a trainer is told: cadence, limits, where things go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tunix.perf.metrics import PerfMetricsOptions
from tunix.sft.best import BestOptions
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.profiler import ProfilerOptions
from tunix.utils import checks

Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
  """When checkpoints are written and how many are kept.

  Attributes:
    save_every_n_steps: every n steps; None: by time alone.
    min_interval_secs: without `save_every_n_steps`, at most one in this many seconds;
      None: 180.
    max_to_keep: older ones are deleted; None keeps all.
    asynchronous: write in the background while training goes on.
    timeout_secs: how long processes wait for each other when saving.
  """

  save_every_n_steps: int | None = None
  min_interval_secs: int | None = None
  max_to_keep: int | None = 3
  asynchronous: bool = True
  timeout_secs: int = 600

  def __post_init__(self):
    checks.fields(
      self,
      save_every_n_steps=checks.COUNT,
      max_to_keep=checks.COUNT,
      timeout_secs=checks.COUNT,
      min_interval_secs=checks.NOT_NEGATIVE,
    )
    seconds = self.min_interval_secs
    if self.save_every_n_steps is not None and seconds is not None:
      raise ValueError(
        f"save_every_n_steps is {self.save_every_n_steps} and min_interval_secs "
        f"{seconds}: choose one cadence"
      )

  @property
  def interval_secs(self) -> int:
    """`min_interval_secs`, or what is taken without it."""
    return 180 if self.min_interval_secs is None else self.min_interval_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """Settings of a training run.

  Attributes:
    eval_every_n_steps: evaluate after every n optimizer steps; None: only before the
      first step and after the last.
    best: keep the checkpoint of the best evaluation besides the newest, and stop when
      evaluations get no better; None: neither.
    max_steps: stop after this many optimizer steps; None: when the data ends.
    gradient_accumulation_steps: micro-batches drawn for one optimizer step.
    checkpoint_root_directory: where checkpoints go; None: none are written.
    checkpointing_options: cadence and number of checkpoints: CheckpointOptions, or
      orbax's CheckpointManagerOptions.
    metrics_logging_options: backends and folder of the metrics; None: history only.
    profiler_options: trace some steps; None: none.
    data_sharding_axis: mesh axes that split the batch dimension.
    offload_optimizer: keep the optimizer's state in the host's memory, and bring it to
      the device for the update alone.
    max_inflight_computations: steps dispatched to the device and not yet finished; 0:
      no limit.
    metrics_prefix: put before every metric's name.
    pbar_description: label of the progress bar, and of the lines that are written to
      standard error where that is no terminal; None: neither.
    learning_rate: number or optax schedule (steps -> rate). Without an optimizer, a
      default AdamW runs at it; with one, it is only what the metric reports.
    num_train_steps: another name of max_steps.
    perf_metrics_options: note what the run does when, as metrics and as a trace file;
      None: not.
  """

  eval_every_n_steps: int | None = None
  best: BestOptions | None = None
  max_steps: int | None = None
  gradient_accumulation_steps: int | None = None
  checkpoint_root_directory: str | None = None
  checkpointing_options: Any = None
  metrics_logging_options: MetricsLoggerOptions | None = None
  profiler_options: ProfilerOptions | None = None
  data_sharding_axis: tuple[str, ...] = ("fsdp",)
  offload_optimizer: bool = False
  max_inflight_computations: int = 2
  metrics_prefix: str = ""
  pbar_description: str | None = "Training"
  learning_rate: float | Schedule | None = None
  num_train_steps: int | None = None
  perf_metrics_options: PerfMetricsOptions | None = None

  def __post_init__(self):
    checks.fields(
      self,
      eval_every_n_steps=checks.COUNT,
      max_steps=checks.COUNT,
      num_train_steps=checks.COUNT,
      gradient_accumulation_steps=checks.COUNT,
      learning_rate=checks.NOT_NEGATIVE,
      max_inflight_computations=checks.NOT_NEGATIVE,
    )
    if self.num_train_steps is not None:
      if self.max_steps not in (None, self.num_train_steps):
        raise ValueError(
          f"max_steps {self.max_steps} and num_train_steps {self.num_train_steps} are "
          "two names of one setting: give one of them"
        )
      object.__setattr__(self, "max_steps", self.num_train_steps)
    if self.best is not None and not isinstance(self.best, BestOptions):
      raise TypeError(
        f"best is a {type(self.best).__name__}: expected a tunix.sft.best.BestOptions, "
        "or None"
      )
    perf = self.perf_metrics_options
    if perf is not None and not isinstance(perf, PerfMetricsOptions):
      raise TypeError(
        f"perf_metrics_options is a {type(perf).__name__}: expected a "
        "tunix.perf.metrics.PerfMetricsOptions, or None"
      )

  @property
  def log_dir(self) -> Any:
    """The folder of the metrics; None without one."""
    options = self.metrics_logging_options
    return None if options is None else options.log_dir

  @property
  def micro_batches(self) -> int:
    """Micro-batches of one optimizer step."""
    return self.gradient_accumulation_steps or 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingInput:
  """One micro-batch of token rows. Arrays may be numpy or JAX.

  Attributes:
    input_tokens: int32 [B, T].
    input_mask: [B, T], 1 (or a weight) on tokens that are trained.
    images: passed on to losses that take them.
    positions: int32 [B, T] rotary positions; None: counted.
    segment_ids: int32 [B, T] of packed rows, 0 on padding; None: a row is one example,
      padded on the right (padding on the left needs them).
    loss_weights: [B, T], multiplied with the mask.
  """

  input_tokens: Any
  input_mask: Any
  images: Any = None
  positions: Any = None
  segment_ids: Any = None
  loss_weights: Any = None
