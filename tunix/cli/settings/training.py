"""The sections of a run that say how it trains: optimizer, schedule, training."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.sft.config import TrainingConfig
from tunix.utils import checks
from tunix.utils.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """An optax optimizer by name.

  Attributes:
    name: a function of optax or optax.contrib that takes a learning rate. muon
      orthogonalises the matrices of each layer; all other parameters get Adam.
    args: its other arguments: {b2: 0.95, weight_decay: 0.1}. Others keep the defaults
      of optax: the weight_decay of adamw is 1e-4.
    decay_targets: parameters with weight decay: the last parts of their names, or
      regular expressions for whole names; [".*"]: all. null: matrices, embeddings and
      adapters, but no norms, biases and other vectors.
  """

  name: str = "adamw"
  args: dict[str, Any] = dataclasses.field(default_factory=dict)
  decay_targets: tuple[str, ...] | None = None

  def __post_init__(self):
    checks.fields(self)
    for target in self.decay_targets or ():
      checks.pattern("decay_targets", target)
    if "learning_rate" in self.args:
      raise ValueError("args.learning_rate is set. Give training.learning_rate instead")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
  """An optax schedule by name; without a name the learning rate is constant.

  Attributes:
    name: a schedule of optax. null: a constant rate without a warm-up. For a warm-up
      choose warmup_cosine_decay_schedule with schedule.args.warmup_steps, or
      warmup_constant_schedule.
    args: arguments of the schedule. Defaults: the peak (or first) value is
      training.learning_rate, the length is the number of steps of the run, and the
      first and the last value are 0.
  """

  name: str | None = None
  args: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.args and self.name is None:
      raise ValueError(
        f"args {sorted(self.args)} are set and schedule.name is not. Name the optax "
        "schedule that takes them"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(TrainingConfig):
  """Steps, sizes of batches, evaluation.

  Attributes:
    learning_rate: learning rate; null: the default of the job, for all weights or for
      adapters.
    max_steps: optimizer steps; null: until data.num_epochs are over.
    global_batch_size: rows of one optimizer step, over all devices. In RL, prompts of
      one batch of rollouts.
    eval_batch_size: rows (in RL prompts) that are evaluated at once; null: as
      micro_batch_size.
    eval_every_n_steps: evaluates after every n optimizer steps, in addition to the
      evaluations before the first step and after the last.
    max_grad_norm: largest global norm of the gradients, which are scaled down to it;
      null: never scaled.
  """

  global_batch_size: int = 8
  eval_batch_size: int | None = setting(None, may_change=True)
  max_grad_norm: float | None = 1.0

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      global_batch_size=checks.COUNT,
      eval_batch_size=checks.COUNT,
      max_grad_norm=checks.POSITIVE,
    )

  @property
  def eval_rows(self) -> int:
    """Rows (in RL prompts) of one batch of the evaluation."""
    return self.eval_batch_size or self.global_batch_size

  @property
  def batch_rows(self) -> dict[str, int]:
    """Rows of batches by key, for keys that count rows.

    Empty in RL, where the rows follow from prompts and completions of each, and the
    learner checks them.
    """
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchSettings(TrainingSettings):
  """TrainingSettings for a trainer that draws micro-batches.

  Attributes:
    micro_batch_size: rows that are computed at once, over all devices; null: the whole
      global batch. It changes memory and speed, not results.
  """

  micro_batch_size: int | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, micro_batch_size=checks.COUNT)
    if self.global_batch_size % self.micro_rows:
      raise ValueError(
        f"global_batch_size is {self.global_batch_size}; expected a multiple of "
        f"training.micro_batch_size, which is {self.micro_rows}. Change one of them"
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

  @property
  def batch_rows(self) -> dict[str, int]:
    """Rows of batches by key."""
    return {
      "training.micro_batch_size": self.micro_rows,
      "training.eval_batch_size": self.eval_rows,
    }
