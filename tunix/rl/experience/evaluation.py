"""Evaluation on held-out prompts: mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from tunix.rl import metrics
from tunix.rl.common import Rollouts
from tunix.utils.metric import Metric

METRICS = (
  Metric(
    "pass@<k>",
    "share",
    "prompts of which at least one of k completions passes (unbiased estimate), for k "
    "of 1, 2, 4, ...",
    "eval",
    "if `algorithm.pass_threshold` is set",
  ),
)


def pass_at_k(passed: np.ndarray, k: int) -> float:
  """Estimates the probability that at least one of k completions of a prompt passes.

  The result is the mean over prompts of 1 - C(n - c, k) / C(n, k), where c of the n
  completions pass. It is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374).

  Args:
    passed: bool [P, n].
    k: from 1 to n.

  Raises:
    ValueError: k is out of range.
  """
  n = passed.shape[1]
  if not 1 <= k <= n:
    raise ValueError(f"k is {k}: it must be from 1 to the {n} completions of a prompt")
  # Python integers have no size limit; C(n, k) can exceed a float from n = 1030 on.
  whole = math.comb(n, k)
  missed = [math.comb(n - int(c), k) / whole for c in passed.sum(1)]
  return 1.0 - math.fsum(missed) / len(missed)


def summary(batches: Iterable[Rollouts], threshold: float | None) -> dict[str, float]:
  """Computes the metrics of all batches: those of rollouts, pass@1, pass@2, pass@4, ...

  A prompt with a completion whose reward failed is left out of pass@k. The metric
  rewards/failed counts it.

  Args:
    batches: the rollouts of the evaluation.
    threshold: reward from which a completion passes; None computes no pass@k.

  Raises:
    ValueError: there are no batches.
  """
  if not (rollouts := list(batches)):
    raise ValueError(
      "the evaluation data has no batches: pass data that can be iterated more than "
      "once (a list, a Grain dataset), not a generator that is used up"
    )
  out = metrics.mean_of([metrics.of_rollouts(batch) for batch in rollouts])
  totals = np.concatenate([batch.totals for batch in rollouts])
  return out | ({} if threshold is None else passes(totals, threshold))


def passes(totals: np.ndarray, threshold: float) -> dict[str, float]:
  """Returns pass@1, pass@2, pass@4, ... of the prompts whose rewards are all known.

  Args:
    totals: float64 [P, n], the rewards; not finite for a completion without one.
    threshold: reward from which a completion passes.
  """
  passed = totals[np.isfinite(totals).all(1)] >= threshold
  if not len(passed):
    return {}
  most = passed.shape[1].bit_length()
  return {f"pass@{2**i}": pass_at_k(passed, 2**i) for i in range(most)}
