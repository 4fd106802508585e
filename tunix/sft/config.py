"""Settings of a training run, and the default batch type."""

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
from tunix.utils.setting import setting

Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
  """The cadence of checkpoints, and the number of checkpoints that are kept.

  Attributes:
    save_every_n_steps: write a checkpoint after every n steps; None: by time alone.
    min_interval_secs: minimum number of seconds between two checkpoints, if
      `save_every_n_steps` is not set; None: 180.
    max_to_keep: number of checkpoints to keep, the newest ones; None: all of them.
    asynchronous: write checkpoints in the background, during the next steps.
    timeout_secs: maximum number of seconds that a process waits for the others when
      saving.
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
        f"save_every_n_steps is {self.save_every_n_steps} and min_interval_secs is "
        f"{seconds}; expected one of them. Choose one cadence."
      )

  @property
  def interval_secs(self) -> int:
    """`min_interval_secs`, with the default of 180 for None."""
    return 180 if self.min_interval_secs is None else self.min_interval_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
  """Settings of a training run.

  Attributes:
    eval_every_n_steps: evaluate after every n optimizer steps, and in any case before
      the first step and after the last; None: only then.
    best: keep the checkpoint of the best evaluation in addition to the newest ones, and
      stop a run without improvement; None: neither.
    max_steps: stop after this number of optimizer steps; None: at the end of the data.
    gradient_accumulation_steps: number of micro-batches in a global batch; None: 1.
    checkpoint_root_directory: folder of the checkpoints; None: no checkpoint is
      written.
    checkpointing_options: cadence and number of checkpoints, as CheckpointOptions or
      orbax's CheckpointManagerOptions.
    metrics_logging_options: backends of the metrics; None: metrics are only kept in
      memory.
    profiler_options: steps to trace with JAX's profiler; None: no step.
    data_sharding_axis: mesh axes that split the batch dimension.
    offload_optimizer: keep the optimizer's state in host memory, and copy it to the
      device for the update only.
    max_inflight_computations: maximum number of steps that are dispatched to the device
      and not yet finished; 0: no limit.
    metrics_prefix: text before the name of every metric.
    pbar_description: label of the progress bar, and of the lines that replace it if
      standard error is no terminal; None: no bar and no lines.
    learning_rate: number or optax schedule (steps -> rate). Without an optimizer, it is
      the rate of a default AdamW; with one, it is only reported as a metric.
    num_train_steps: another name of max_steps.
    perf_metrics_options: record the time of each phase of the run, as metrics and as a
      trace file; None: do not.
  """

  eval_every_n_steps: int | None = setting(None, may_change=True)
  best: BestOptions | None = setting(None, may_change=True)
  max_steps: int | None = setting(None, may_change=True)
  gradient_accumulation_steps: int | None = setting(None, python_only=True)
  checkpoint_root_directory: str | None = setting(None, python_only=True)
  checkpointing_options: Any = setting(None, python_only=True)
  metrics_logging_options: MetricsLoggerOptions | None = setting(None, python_only=True)
  profiler_options: ProfilerOptions | None = setting(None, may_change=True)
  data_sharding_axis: tuple[str, ...] = setting(("fsdp",), python_only=True)
  offload_optimizer: bool = setting(False, may_change=True)
  max_inflight_computations: int = setting(2, may_change=True)
  metrics_prefix: str = setting("", python_only=True)
  pbar_description: str | None = setting("Training", python_only=True)
  learning_rate: float | Schedule | None = None
  num_train_steps: int | None = setting(None, python_only=True)
  perf_metrics_options: PerfMetricsOptions | None = setting(None, may_change=True)

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
          f"max_steps is {self.max_steps} and num_train_steps is "
          f"{self.num_train_steps}; expected one of these two names of one setting"
        )
      object.__setattr__(self, "max_steps", self.num_train_steps)
    if self.best is not None and not isinstance(self.best, BestOptions):
      raise TypeError(
        f"best is {checks.type_of(self.best)}; expected a tunix.sft.best.BestOptions "
        "or None"
      )
    perf = self.perf_metrics_options
    if perf is not None and not isinstance(perf, PerfMetricsOptions):
      raise TypeError(
        f"perf_metrics_options is {checks.type_of(perf)}; expected a "
        "tunix.perf.metrics.PerfMetricsOptions or None"
      )

  @property
  def log_dir(self) -> Any:
    """The folder of the metrics; None without `metrics_logging_options`."""
    options = self.metrics_logging_options
    return None if options is None else options.log_dir

  @property
  def micro_batches(self) -> int:
    """The number of micro-batches of one optimizer step."""
    return self.gradient_accumulation_steps or 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingInput:
  """A micro-batch of B rows of T tokens, as NumPy or JAX arrays.

  Attributes:
    input_tokens: int32 [B, T].
    input_mask: [B, T], 1 (or a weight) on trained tokens and 0 on others.
    images: an argument of models and losses that take images.
    positions: int32 [B, T] rotary positions; None: 0, 1, 2, ... in each segment.
    segment_ids: int32 [B, T], numbers of the examples in a packed row, 0 on padding.
      None: each row is one example with padding on the right. Rows with padding on the
      left need segment_ids.
    loss_weights: [B, T], factors of the mask.
  """

  input_tokens: Any
  input_mask: Any
  images: Any = None
  positions: Any = None
  segment_ids: Any = None
  loss_weights: Any = None
