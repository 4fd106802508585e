"""Signs in the metrics that a run does not learn, each with the keys to change."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from tunix.sft.metrics_logger import MetricsLogger, Mode

# Values of a metric from which on a sign is read: batches of rollouts, or steps.
_BATCHES, _STEPS = 4, 12


class _Sign(NamedTuple):
  """A sign that a run does not learn.

  Attributes:
    least: values of the metric that have to be there.
    holds: function of the means of the metric over its first quarter, its last quarter
      and all values, which returns True if the sign is there.
    text: note for the user, a template of the means `first`, `last` and `mean`.
  """

  least: int
  holds: Callable[[float, float, float], bool]
  text: str


# Metric -> sign.
_SIGNS = {
  "groups/all_equal": _Sign(
    _BATCHES,
    lambda first, last, mean: min(mean, last) >= 0.5,
    "{mean:.0%} of the groups had equal rewards, which teach nothing; raise "
    "algorithm.num_generations, choose prompts that the model solves sometimes, or use "
    "algorithm.dynamic_sampling of dapo",
  ),
  "completions/truncated": _Sign(
    _BATCHES,
    lambda first, last, mean: mean >= 0.5,
    "{mean:.0%} of the completions were cut at the token limit; raise "
    "rollout.max_tokens_to_generate (in episodes of several turns episode.max_tokens)",
  ),
  "rewards/score/mean": _Sign(
    _STEPS,  # the quarters of a few batches are one noisy value each
    lambda first, last, mean: first > 0 and last < first / 2,
    "the mean reward fell from {first:.3g} to {last:.3g}; lower "
    "training.learning_rate, or set algorithm.beta",
  ),
  "perplexity": _Sign(
    _STEPS,
    lambda first, last, mean: last > 1.05 and last > 0.99 * first,  # 1: all is known
    "the perplexity did not fall: {first:.4g} in the first steps, {last:.4g} in the "
    "last ones; raise training.learning_rate, or look at the trained tokens with "
    "`tunix data show`",
  ),
  "rewards/accuracy": _Sign(
    _STEPS,
    lambda first, last, mean: last < 0.55,
    "the accuracy of the last steps is {last:.2f}, and 0.5 is chance; raise "
    "training.learning_rate, train longer, or check which answers are chosen",
  ),
}


def notes(
  logger: MetricsLogger, prefix: str, without: Collection[str] = ()
) -> dict[str, str]:
  """Returns a note for each sign in the training metrics, by the name of the metric.

  A metric whose first values this process lacks, because the run was resumed, gives no
  note: the notes compare the first values with the last ones.

  Args:
    logger: holds the metrics that this process has logged.
    prefix: prefix of the metrics.
    without: metrics that are no sign in this run.
  """
  out = {}
  for metric, sign in _SIGNS.items():
    key = (prefix, metric, Mode.TRAIN)
    if metric in without or not logger.metric_exists(*key):
      continue
    if not logger.is_complete(*key):
      continue
    x = logger.get_metric_history(*key)
    if len(x) < sign.least or not np.isfinite(x).all():
      continue
    quarter = len(x) // 4
    first, last = float(np.mean(x[:quarter])), float(np.mean(x[-quarter:]))
    mean = float(np.mean(x))
    if sign.holds(first, last, mean):
      out[metric] = sign.text.format(first=first, last=last, mean=mean)
  return out
