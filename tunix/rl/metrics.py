"""Metrics of rollouts, and the seconds that each phase of a step takes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix.perf import trace
from tunix.perf.metrics import PerfMetricsConfig, PerfMetricsOptions
from tunix.perf.trace import NoopTracer
from tunix.rl.common import Rollouts
from tunix.rl.config import RLTrainingConfig
from tunix.utils import checks
from tunix.utils.metric import SAME, Metric

_SEVERAL = "if a batch has several prompts, each with several completions"
_GREEDY = "if `rl.schedule` is greedy"
_JUDGED = "if a reward function is a judge"
_STAMPED = "if the rollouts carry the version of each token"
METRICS = (
  Metric(
    "rewards/score/mean",
    "of the reward",
    "mean reward of a completion, summed over the reward functions",
    known_as="`rewards/score/mean`, `rewards/sum`",
  ),
  Metric("rewards/score/max", "of the reward", "highest reward", known_as=SAME),
  Metric("rewards/score/min", "of the reward", "lowest reward", known_as=SAME),
  Metric(
    "rewards/score/prompt_p25",
    "of the reward",
    "lower quartile over the prompts of a batch: mean reward of a prompt's completions",
    condition=_SEVERAL,
  ),
  Metric(
    "rewards/score/prompt_p75",
    "of the reward",
    "upper quartile over the prompts of a batch: mean reward of a prompt's completions",
    condition=_SEVERAL,
  ),
  Metric(
    "rewards/<function>",
    "of the reward",
    "mean of one reward function; `reward_model` is the reward model",
    known_as=SAME,
  ),
  Metric(
    "rewards/failed", "share", "completions without a reward, which are not trained on"
  ),
  Metric(
    "completions/mean_length",
    "tokens",
    "mean length of a completion, end token included",
    known_as="`completions/mean_length`, in PPO `generation/completions/mean_length`",
  ),
  Metric("completions/max_length", "tokens", "longest completion", known_as=SAME),
  Metric("completions/min_length", "tokens", "shortest completion", known_as=SAME),
  Metric("completions/truncated", "share", "completions cut at the token limit"),
  Metric(
    "groups/all_equal",
    "share",
    "groups whose rewards are all equal, so that they give no gradient",
    condition="if a prompt has several completions",
  ),
  Metric(
    "staleness/mean",
    "updates",
    "mean age of the trained tokens: optimizer updates between the weights that drew "
    "a token and the weights that the update starts from",
    "train",
    _STAMPED,
  ),
  Metric(
    "staleness/max",
    "updates",
    "largest age of a trained token",
    "train",
    _STAMPED,
  ),
  Metric("perf/rollout_sec", "s", "sampling of the completions"),
  Metric(
    "perf/data_wait_sec",
    "s",
    "time in which the learner waited for rollouts; perf/rollout_sec and "
    "perf/rewards_sec are then times of the threads that sample",
    condition="if `rl.schedule` is lagged or greedy",
  ),
  Metric(
    "perf/engine_idle_sec",
    "s",
    "time in which the engine had nothing to draw, because all prompts that may be "
    "sampled are finished or wait for environments and rewards",
    "train",
    _GREEDY,
  ),
  Metric(
    "perf/queue_age_sec",
    "s",
    "mean time between the end of a prompt's completions and the update that uses them",
    "train",
    _GREEDY,
  ),
  Metric(
    "perf/episodes_in_flight",
    "completions",
    "completions that were started and not finished when an update took its batch",
    "train",
    _GREEDY,
  ),
  Metric("perf/rewards_sec", "s", "reward functions and reward model"),
  Metric(
    "perf/judge_prompt_tokens",
    "tokens",
    "prompts of the questions that judges answered since the last line; answers from a "
    "cache cost nothing. With several processes, those of process 0",
    condition=_JUDGED,
  ),
  Metric(
    "perf/judge_answer_tokens",
    "tokens",
    "answers of judges, counted as their prompts are",
    condition=_JUDGED,
  ),
  Metric(
    "perf/scoring_sec", "s", "log-probabilities and values before the update", "train"
  ),
  Metric("perf/update_sec", "s", "all updates on the completions", "train"),
  Metric("perf/sync_sec", "s", "transfer of the weights to the rollout", "train"),
)


class Mean(NamedTuple):
  """A mean and the number of completions, tokens or groups that it covers."""

  value: float
  weight: float


# Metrics that are combined over several batches by a function other than the mean.
_EXTREMES: dict[str, Callable[..., float]] = {
  "rewards/score/max": max,
  "rewards/score/min": min,
  "completions/max_length": max,
  "completions/min_length": min,
  "staleness/max": max,
}


def of_rollouts(rollouts: Rollouts) -> dict[str, Mean]:
  """Computes the metrics of one batch of rollouts. No value is NaN.

  Names: rewards/score/{mean,max,min}, rewards/score/prompt_{p25,p75} (quartiles over
  the prompts of a group's mean reward), rewards/<function>, rewards/failed (share of
  rows without a reward), completions/{mean,max,min}_length, completions/truncated
  (share), groups/all_equal (share of groups whose rewards are all the same).
  """
  total = rollouts.rewards.total
  out = _spread("rewards/score/{}", total[np.isfinite(total)])
  for name, values in rollouts.rewards.by_function.items():
    finite = values[np.isfinite(values)]
    if finite.size:
      out[f"rewards/{name}"] = _mean(finite)
  out["rewards/failed"] = _mean(~np.isfinite(total))
  out |= _spread("completions/{}_length", rollouts.lengths)
  out["completions/truncated"] = _mean(rollouts.truncated)
  if rollouts.group_size > 1:
    out["groups/all_equal"] = _mean(all_equal(rollouts.totals))
    out |= _quartiles(rollouts.totals)
  return out


def staleness(versions: np.ndarray, mask: np.ndarray, step: int) -> dict[str, Mean]:
  """Returns the mean and the largest age of the trained tokens; {} if there are none.

  Args:
    versions: int32 [B, R], optimizer updates of the weights that drew each token.
    mask: bool [B, R], True on tokens that are trained.
    step: optimizer updates of the weights that the next update starts from.

  Raises:
    ValueError: a token comes from weights that are newer than `step`.
  """
  ages = step - versions[mask]
  if ages.size and ages.min() < 0:
    raise ValueError(
      f"versions has {step - ages.min()} and the policy has made {step} updates: "
      f"expected at most {step}. A version is the number of optimizer updates of the "
      "weights, see PolicyVersion.step"
    )
  spread = _spread("staleness/{}", ages)
  return {name: spread[name] for name in ("staleness/mean", "staleness/max") if spread}


def all_equal(scores: np.ndarray) -> np.ndarray:
  """Returns bool [P]: True for a group in [P, G] that gives no gradient.

  A group gives none if its valid scores are all the same, or if it has fewer than two.
  """
  low = np.where(np.isfinite(scores), scores, np.inf).min(1)
  high = np.where(np.isfinite(scores), scores, -np.inf).max(1)
  return low >= high


def mean_of(parts: Sequence[Mapping[str, Mean]]) -> dict[str, float]:
  """Combines the metrics of several batches: weighted means; extremes stay extremes.

  Args:
    parts: results of `of_rollouts` and other means by name.
  """
  out = {}
  for name in dict.fromkeys(name for part in parts for name in part):
    means = [part[name] for part in parts if name in part]
    if name in _EXTREMES:
      out[name] = _EXTREMES[name](mean.value for mean in means)
    else:
      total = math.fsum(mean.value * mean.weight for mean in means)
      out[name] = total / math.fsum(mean.weight for mean in means)
  return out


def _quartiles(totals: np.ndarray) -> dict[str, Mean]:
  """Returns the quartiles over prompts of the mean reward; {} below two prompts."""
  is_finite = np.isfinite(totals)
  counts = is_finite.sum(1)
  means = np.where(is_finite, totals, 0.0).sum(1)[counts > 0] / counts[counts > 0]
  if means.size < 2:
    return {}
  return {
    f"rewards/score/prompt_p{percent}": Mean(
      float(np.percentile(means, percent)), means.size
    )
    for percent in (25, 75)
  }


def _mean(values: np.ndarray) -> Mean:
  return Mean(float(values.mean()), values.size)


def _spread(name: str, values: np.ndarray) -> dict[str, Mean]:
  if not values.size:
    return {}
  kinds: dict[str, Any] = {"mean": np.mean, "max": np.max, "min": np.min}
  return {
    name.format(kind): Mean(float(fn(values)), values.size)
    for kind, fn in kinds.items()
  }


class Phases:
  """Measures seconds by phase: `with phases("rollout"): ...`.

  Every run logs these few numbers. A tracer, which is optional, records more.

  Args:
    tracer: records the phases as spans; None: nothing does.

  Attributes:
    seconds: seconds by phase since the last `take`.
  """

  def __init__(self, tracer: NoopTracer | None = None) -> None:
    self._tracer = NoopTracer() if tracer is None else tracer
    self.seconds: dict[str, float] = {}
    self._others: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, name: str, role: str | None = None) -> Iterator[None]:
    """Measures a phase.

    Args:
      name: the phase.
      role: the role whose devices do nothing else in this phase.
    """
    start = time.perf_counter()
    try:
      with self._tracer.span(name, role):
        yield
    finally:
      self.add(name, time.perf_counter() - start)

  def add(self, name: str, seconds: float) -> None:
    """Adds seconds that were measured elsewhere."""
    self.seconds[name] = self.seconds.get(name, 0.0) + seconds

  def note(self, name: str, value: float) -> None:
    """Sets another number that depends on timing, logged as perf/<name>."""
    self._others[name] = value

  def take(self) -> dict[str, float]:
    """Returns perf/<phase>_sec of every phase and resets all phases to 0.

    A phase inside another one is counted in both.
    """
    out = {f"perf/{name}_sec": value for name, value in self.seconds.items()}
    out |= {f"perf/{name}": value for name, value in self._others.items()}
    self.seconds, self._others = {}, {}
    return out


def make_tracer(
  config: RLTrainingConfig, perf_config: PerfMetricsConfig | None
) -> NoopTracer:
  """Returns the tracer of a run; it records nothing unless tracing is configured.

  Raises:
    TypeError: `perf_config` is not a PerfMetricsConfig.
  """
  if perf_config is not None and not isinstance(perf_config, PerfMetricsConfig):
    raise TypeError(
      f"perf_config is {checks.type_of(perf_config)}: expected a "
      "tunix.perf.metrics.PerfMetricsConfig, or None"
    )
  options = config.perf_metrics_options
  if perf_config is None:
    return trace.make_tracer(options, config.log_dir)
  options, export_fn = options or PerfMetricsOptions(), perf_config.custom_export_fn
  return trace.make_tracer(options, config.log_dir, export_fn)
