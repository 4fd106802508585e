"""Signs in the metrics that a run does not learn, each with the keys to change."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    lambda first, last, mean: mean >= 0.5,
    "{mean:.0%} of the groups had equal rewards, which teach nothing; raise "
    "algorithm.num_generations, set algorithm.name to dapo, or choose prompts that the "
    "model solves sometimes",
  ),
  "completions/truncated": _Sign(
    _BATCHES,
    lambda first, last, mean: mean >= 0.5,
    "{mean:.0%} of the completions were cut at the token limit; raise "
    "rollout.max_tokens_to_generate (in episodes episode.max_tokens)",
  ),
  "rewards/score/mean": _Sign(
    _BATCHES,
    lambda first, last, mean: first > 0 and last < first / 2,
    "the mean reward fell from {first:.3g} to {last:.3g}; lower "
    "training.learning_rate, or set algorithm.beta",
  ),
  "perplexity": _Sign(
    _STEPS,
    lambda first, last, mean: math.log(last) > math.log(first) - 0.01,  # nats
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


def found(logger: MetricsLogger, prefix: str) -> dict[str, str]:
  """Returns a note for each sign in the training metrics, by the name of the metric.

  Args:
    logger: holds the metrics that this process has logged.
    prefix: prefix of the metrics.
  """
  notes = {}
  for metric, sign in _SIGNS.items():
    if not logger.metric_exists(prefix, metric, Mode.TRAIN):
      continue
    x = logger.get_metric_history(prefix, metric, Mode.TRAIN)
    if len(x) < sign.least or not np.isfinite(x).all():
      continue
    quarter = len(x) // 4
    first, last = float(np.mean(x[:quarter])), float(np.mean(x[-quarter:]))
    mean = float(np.mean(x))
    if sign.holds(first, last, mean):
      notes[metric] = sign.text.format(first=first, last=last, mean=mean)
  return notes
