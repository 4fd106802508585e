"""The record of the best evaluation, and early stopping.

The functions are pure: `judge` returns the next record from the last one and a new
value. The record is part of the run's position, so a resumed run decides exactly as the
interrupted run would have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tunix.utils import checks

# Ends of the names of metrics for which a smaller value is better.
_SMALLER = ("loss", "perplexity")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOptions:
  """Keeps the checkpoint of the best evaluation, and stops a run without improvement.

  The evaluation before the first step does not count, because it measures the given
  model.

  Attributes:
    metric: name of the logged metric that ranks evaluations, such as "loss" or
      "rewards/accuracy"; None: the loss, and in RL rewards/score/mean.
    greater_is_better: True if a larger value of `metric` is better. None: False for
      names that end in "loss" or "perplexity"; required for other names.
    patience: stop after this number of consecutive evaluations without an improvement;
      None: never stop early.
    min_delta: minimum change, in the unit of the metric, that counts as an improvement
      for `patience`. The best checkpoint is always that of the best value.

  Raises:
    ValueError: A value is out of range, or `greater_is_better` is missing.
  """

  metric: str | None = None
  greater_is_better: bool | None = None
  patience: int | None = None
  min_delta: float = 0.0

  def __post_init__(self):
    checks.fields(self, patience=checks.COUNT, min_delta=checks.NOT_NEGATIVE)
    if self.metric is None and self.greater_is_better is not None:
      raise ValueError(
        f"greater_is_better is {self.greater_is_better} and metric is not set. Name "
        "the metric."
      )
    is_named = self.metric is not None and not self.metric.endswith(_SMALLER)
    if is_named and self.greater_is_better is None:
      raise ValueError(
        f"metric is {self.metric!r} and greater_is_better is not set. Set it to true "
        "if a larger value is better, else to false."
      )
    if self.min_delta and self.patience is None:
      raise ValueError(
        f"min_delta is {self.min_delta} and patience is not set, which is the only "
        "user of min_delta. Set patience, or leave min_delta out."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
  """The best evaluation so far; saved as JSON in a checkpoint.

  Attributes:
    metric: name of the metric.
    greater_is_better: True if a larger value is better.
    step: step of the best evaluation; None if no value was finite.
    value: the best value of the metric.
    mark: the value that the next improvement is compared with. It changes with each
      improvement of at least `min_delta` and not with smaller ones, so several small
      improvements count once their sum reaches `min_delta`.
    waited: number of evaluations since `mark` changed.
  """

  metric: str
  greater_is_better: bool
  step: int | None = None
  value: float | None = None
  mark: float | None = None
  waited: int = 0

  def __str__(self) -> str:
    if self.step is None:
      return f"no evaluation gave a finite {self.metric}"
    return f"best {self.metric} {self.value:.5g} at step {self.step}"


def record_for(
  options: BestOptions, main: tuple[str, bool], saved: Best | None
) -> Best:
  """Returns the saved record, or a new one if it is for another metric.

  Args:
    options: the settings.
    main: the main metric of the job, and True if a larger value is better.
    saved: the record of a checkpoint or of the last evaluation; None if there is none.
  """
  metric, greater = main
  if options.metric is not None:
    metric, greater = options.metric, bool(options.greater_is_better)
  if saved is not None and (saved.metric, saved.greater_is_better) == (metric, greater):
    return saved
  return Best(metric=metric, greater_is_better=greater)


def value_of(record: Best, metrics: Mapping[str, float] | None) -> float:
  """Returns the value of the record's metric.

  Args:
    record: the current record.
    metrics: the metrics of an evaluation; None if there was no evaluation data.

  Raises:
    ValueError: There was no evaluation data, or the metric is missing.
  """
  if metrics is None:
    raise ValueError(
      f"best ranks evaluations by {record.metric!r}, and there is no evaluation data. "
      "Pass eval_ds to train, or leave best out of the settings."
    )
  if record.metric not in metrics:
    names = ", ".join(sorted(name for name in metrics if not name.startswith("perf/")))
    raise ValueError(
      f"best.metric is {record.metric!r}; expected a metric of the evaluation: {names}"
    )
  return float(metrics[record.metric])


def judge(before: Best, options: BestOptions, step: int, value: float) -> Best:
  """Returns the record after an evaluation.

  A value that is not finite is never better, so a diverged run stops after `patience`
  evaluations.

  Args:
    before: the record before the evaluation.
    options: the settings.
    step: step of the evaluation.
    value: value of the metric.
  """

  def gain(old: float | None) -> float:
    if not math.isfinite(value):
      return -math.inf
    if old is None:
      return math.inf
    return value - old if before.greater_is_better else old - value

  after = dataclasses.replace(before, waited=before.waited + 1)
  if gain(before.value) > 0:
    after = dataclasses.replace(after, step=step, value=value)
  if gain(before.mark) > 0 and gain(before.mark) >= options.min_delta:
    after = dataclasses.replace(after, mark=value, waited=0)
  return after


def is_over(record: Best, options: BestOptions) -> bool:
  """Returns True if the run must stop early."""
  return options.patience is not None and record.waited >= options.patience
