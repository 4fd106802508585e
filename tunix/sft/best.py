"""Which evaluation was the best, and when to stop for want of a better one.

Pure: `judge` makes the next record of the one before and a new value. A record is part
of the run's position, so a resumed run judges as the one that was killed would have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tunix.utils import checks

# What is better when it is smaller, by the end of its name.
_SMALLER = ("loss", "perplexity")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOptions:
  """Keeps the checkpoint of the best evaluation, and stops when none gets better.

  An evaluation before the first step is of the model as it was given: it is no result
  of the run and does not count.

  Attributes:
    metric: of the evaluation, as it is logged ("loss", "rewards/accuracy"); None: the
      loss, in RL rewards/score/mean.
    greater_is_better: of a metric that is named; None: not for names that end in loss
      or perplexity, all others have to say.
    patience: stop after so many evaluations in a row without an improvement; None:
      never.
    min_delta: what counts as an improvement for patience, in the metric's unit; the
      best checkpoint is that of the best value, by however little.

  Raises:
    ValueError: a value out of range, or a metric whose direction nobody says.
  """

  metric: str | None = None
  greater_is_better: bool | None = None
  patience: int | None = None
  min_delta: float = 0.0

  def __post_init__(self):
    checks.fields(self, patience=checks.COUNT, min_delta=checks.NOT_NEGATIVE)
    if self.metric is None and self.greater_is_better is not None:
      raise ValueError(
        f"greater_is_better is {self.greater_is_better} and metric is not set: name "
        "the metric that it speaks of"
      )
    is_named = self.metric is not None and not self.metric.endswith(_SMALLER)
    if is_named and self.greater_is_better is None:
      raise ValueError(
        f"metric is {self.metric!r} and greater_is_better is not set: say whether "
        "more of it is better (true) or less (false)"
      )
    if self.min_delta and self.patience is None:
      raise ValueError(
        f"min_delta is {self.min_delta} and patience is not set, which alone reads it: "
        "give patience, or leave min_delta out"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
  """The best evaluation so far; JSON in a checkpoint.

  Attributes:
    metric: what was compared.
    greater_is_better: how.
    step: of the best evaluation; None: none gave a finite value.
    value: the metric there.
    mark: the value that the next improvement is measured from. It moves with every
      improvement of `min_delta` and not with smaller ones, so that many small steps
      count once they add up to it.
    waited: evaluations since then.
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
  """The record to go on with: `saved`, or a new one where it speaks of another metric.

  Args:
    options: what is asked for.
    main: the metric of the job, and whether more of it is better.
    saved: of a checkpoint, or of the evaluation before; None: there was none.
  """
  metric, greater = main
  if options.metric is not None:
    metric, greater = options.metric, bool(options.greater_is_better)
  if saved is not None and (saved.metric, saved.greater_is_better) == (metric, greater):
    return saved
  return Best(metric=metric, greater_is_better=greater)


def value_of(record: Best, metrics: Mapping[str, float] | None) -> float:
  """The record's metric of an evaluation.

  Raises:
    ValueError: there was no evaluation, or it has no such metric.
  """
  if metrics is None:
    raise ValueError(
      f"best asks for the best {record.metric} and there is nothing to evaluate on: "
      "give train an eval_ds, or leave best out of the settings"
    )
  if record.metric not in metrics:
    there = ", ".join(sorted(name for name in metrics if not name.startswith("perf/")))
    raise ValueError(
      f"best.metric is {record.metric!r}, which the evaluation does not give: it gives "
      f"{there}"
    )
  return float(metrics[record.metric])


def judge(before: Best, options: BestOptions, step: int, value: float) -> Best:
  """The record after an evaluation; its `step` is that evaluation's if it is the best.

  What is not finite is never better: a diverged run waits, and then stops.
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
  """Whether patience is at its end."""
  return options.patience is not None and record.waited >= options.patience
