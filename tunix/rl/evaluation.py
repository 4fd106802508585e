"""Evaluation on held-out prompts: mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from tunix.rl import metrics
from tunix.rl.common import Rollouts


def pass_at_k(passed: np.ndarray, k: int) -> float:
  """Mean over prompts of the chance that k of its completions hold one that passes.

  1 - C(n - c, k) / C(n, k) with c of n passing, the unbiased estimator of Chen et al.
  2021 (arXiv:2107.03374).

  Args:
    passed: bool [P, n].
    k: at most n.

  Raises:
    ValueError: k is out of range.
  """
  n = passed.shape[1]
  if not 1 <= k <= n:
    raise ValueError(f"k is {k}: it must be from 1 to the {n} completions of a prompt")
  whole = math.comb(n, k)
  missed = [math.comb(n - int(c), k) / whole for c in passed.sum(1)]
  return 1.0 - math.fsum(missed) / len(missed)


def summary(batches: Iterable[Rollouts], threshold: float | None) -> dict[str, float]:
  """Metrics over all batches: those of rollouts, pass@1, pass@2, pass@4, ...

  Prompts with a completion whose reward failed are left out of pass@k, and counted in
  rewards/failed.

  Raises:
    ValueError: there were no batches.
  """
  if not (every := list(batches)):
    raise ValueError(
      "the evaluation data gave no batch: pass something that can be iterated anew "
      "(a list, a Grain dataset), not a spent generator"
    )
  out = metrics.mean_of([metrics.of_rollouts(rollouts) for rollouts in every])
  scores = np.concatenate([rollouts.raw for rollouts in every])
  scores = scores[np.isfinite(scores).all(1)]
  if threshold is not None and len(scores):
    k = 1
    while k <= scores.shape[1]:
      out[f"pass@{k}"] = pass_at_k(scores >= threshold, k)
      k *= 2
  return out
