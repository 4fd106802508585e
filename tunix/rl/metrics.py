"""What is logged of rollouts, and how long each phase of a step takes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix.perf.trace import NoopTracer
from tunix.rl.common import Rollouts


class Mean(NamedTuple):
  """A mean, and how much it is over: completions, tokens, groups."""

  value: float
  weight: float


# What is no mean of a collection, and how several collections' come together.
_EXTREMES: dict[str, Callable[..., float]] = {
  "rewards/score/max": max,
  "rewards/score/min": min,
  "completions/max_length": max,
  "completions/min_length": min,
}


def of_rollouts(rollouts: Rollouts) -> dict[str, Mean]:
  """Rewards, lengths and how the groups look; NaN-free: what failed is counted.

  Names: rewards/score/{mean,max,min}, rewards/<function>, rewards/failed (share of
  rows without a reward), completions/{mean,max,min}_length, completions/truncated
  (share), groups/all_equal (share of groups whose rewards are one number).
  """
  total, lengths = rollouts.rewards.total, rollouts.tokens.lengths
  out = _spread("rewards/score/{}", total[np.isfinite(total)])
  for name, values in rollouts.rewards.by_function.items():
    known = values[np.isfinite(values)]
    if known.size:
      out[f"rewards/{name}"] = _mean(known)
  out["rewards/failed"] = _mean(~np.isfinite(total))
  out |= _spread("completions/{}_length", lengths)
  out["completions/truncated"] = _mean(rollouts.tokens.truncated)
  if rollouts.tokens.group_size > 1:
    out["groups/all_equal"] = _mean(all_equal(rollouts.raw))
  return out


def all_equal(scores: np.ndarray) -> np.ndarray:
  """bool [P]: groups [P, G] from which nothing can be learnt: the valid scores are
  one number, or there are fewer than two."""
  low = np.where(np.isfinite(scores), scores, np.inf).min(1)
  high = np.where(np.isfinite(scores), scores, -np.inf).max(1)
  return low >= high


def mean_of(parts: Sequence[Mapping[str, Mean]]) -> dict[str, float]:
  """Means over several collections of rollouts; extremes stay extremes.

  Args:
    parts: what `of_rollouts` gave, and what else was measured.
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
  """Seconds by phase since they were last taken: `with phases("rollout"): ...`.

  Every run has these few; what a tracer notes besides is more, and is asked for.

  Args:
    tracer: notes the phases as well.
  """

  def __init__(self, tracer: NoopTracer) -> None:
    self._tracer = tracer
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, name: str, role: str | None = None) -> Iterator[None]:
    """Around a phase; `role` is whose devices do nothing but it."""
    start = time.perf_counter()
    try:
      with self._tracer.span(name, role):
        yield
    finally:
      spent = time.perf_counter() - start
      self._seconds[name] = self._seconds.get(name, 0.0) + spent

  def take(self) -> dict[str, float]:
    """perf/<phase>_sec, and all of them; what is nested counts twice."""
    out = {f"perf/{name}_sec": value for name, value in self._seconds.items()}
    self._seconds = {}
    return out
