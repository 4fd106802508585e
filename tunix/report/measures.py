"""The sections of a page, and the titles and bands of its charts.

A chart shows one metric: its curves in training and evaluation, of one or several runs.
Two metrics never share an axis. A mean length has its extremes as a band, and the mean
reward the middle half of the prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Measure(NamedTuple):
  """One chart.

  Attributes:
    name: name of the metric that is drawn as a line.
    title: title of the chart.
    spread: names of the metrics that bound the band, (lowest, highest); None: no band.
    rounding: largest magnitude of values that are rounding errors of float32; None: the
      metric may be as small.
  """

  name: str
  title: str
  spread: tuple[str, str] | None = None
  rounding: float | None = None


# Section -> patterns that match the ends of its metrics' names, in the page's order.
_SECTIONS: dict[str, Sequence[str]] = {
  "Rewards": (
    r"rewards/score/mean",
    r"pass@\d+",
    r"rewards/(?!failed|score/).*",
    r"length",
    r"rewards/score/.*",
  ),
  "Experts": (r"router/.*",),
  "Loss": (r"loss", r"perplexity", r"[^/]*loss", r"distill/.*", r"odds_ratio"),
  "Policy": (
    r"kl",
    r"entropy",
    r"[^/]*clipfrac",
    r"parity/.*",
    r"rollout_correction/.*",
    r"score_centering/.*",
    r"sdpo/.*",
    r"staleness/.*",
    r"vpred_mean",
    r"log_probs/.*",
  ),
  "Completions": (r"completions/.*", r"rewards/failed", r"groups/.*", r"dynamic_.*"),
  "Curriculum": (r"curriculum/.*",),
  "Episodes": (r"episodes/.*", r"env/.*"),
  "Optimization": (r"learning_rate", r"grad_norm", r"trained_tokens"),
  "Speed and memory": (
    r"tokens_per_sec",
    r"steps_per_sec",
    r"step_time_sec",
    r"tflops_per_sec",
    r"mfu",
    r"[^/]*_memory_bytes",
    r"perf/.*",
    r"[^/]*_sec",
  ),
}
OTHERS = "Further metrics"
# Sections whose metrics are sums of terms around 1. float32 rounds 1 by up to 6e-8.
_ROUNDED, _ROUNDING = ("Loss", "Policy"), 1e-6

_TITLES = {
  "rewards/score/mean": "reward",
  "rewards/score/min": "lowest reward",
  "rewards/score/max": "highest reward",
  "completions/mean_length": "completion length, tokens",
  "completions/truncated": "completions cut at the limit, share",
  "rewards/failed": "completions without a reward, share",
  "groups/all_equal": "groups with equal rewards, share",
  "rewards/margin": "margin of rewards, chosen - rejected",
  "rewards/accuracy": "accuracy, share of pairs",
  "log_probs/chosen": "log-probability of chosen, nats",
  "log_probs/rejected": "log-probability of rejected, nats",
  "pg_clipfrac": "clipped share of tokens",
  "vf_clipfrac": "clipped share of values",
  "vpred_mean": "mean predicted value",
  "kl": "KL to the reference, nats",
  "entropy": "entropy, nats",
  "parity/abs_diff": "sampler and trainer, difference of log-probabilities",
  "parity/kl": "sampler and trainer, KL, nats",
  "parity/ratio": "sampler and trainer, ratio of probabilities",
  "learning_rate": "learning rate",
  "grad_norm": "norm of the gradient",
  "trained_tokens": "trained tokens per step",
  "tokens_per_sec": "tokens per second",
  "steps_per_sec": "steps per second",
  "step_time_sec": "seconds per step",
  "tflops_per_sec": "TFLOP per second",
  "mfu": "model FLOPs utilization",
  "device_memory_bytes": "device memory, bytes",
}

# Line -> (lower, upper) bound of its band. The bounds get no separate chart. The lowest
# and the highest reward are no band: right and wrong answers are in every batch.
_SPREADS = {
  "completions/mean_length": ("completions/min_length", "completions/max_length"),
  "rewards/score/mean": ("rewards/score/prompt_p25", "rewards/score/prompt_p75"),
}
# Line -> its band in the title.
_BANDS = {
  "completions/mean_length": "shortest to longest",
  "rewards/score/mean": "middle half of the prompts",
}


def arrange(names: Iterable[str]) -> dict[str, list[Measure]]:
  """Returns the charts of some metrics by section, in the order of a page."""
  unique = set(names)
  places = {name: _place(name) for name in unique}
  sections: dict[str, list[Measure]] = {}
  for name in sorted(unique - _bounds(unique), key=lambda n: (*places[n][:2], n)):
    section, _, prefix, base = places[name]
    label, title = [*_SECTIONS, OTHERS][section], _TITLES.get(base, base)
    spread = _SPREADS.get(base)
    ends = spread and (prefix + spread[0], prefix + spread[1])
    ends = ends if ends and unique.issuperset(ends) else None
    if ends is not None:
      title += f" (band: {_BANDS[base]})"
    measure = Measure(
      name,
      f"{prefix.rstrip('/')}: {title}" if prefix else title,
      ends,
      _ROUNDING if label in _ROUNDED else None,
    )
    sections.setdefault(label, []).append(measure)
  return sections


def without_single_charts(
  sections: Mapping[str, list[Measure]],
) -> dict[str, list[Measure]]:
  """Joins every section of one chart with a neighbor, which fills its row.

  Args:
    sections: what `arrange` returns.
  """
  joined: list[tuple[str, list[Measure]]] = []
  for label, charts in sections.items():
    before, last = joined[-1] if joined else ("", [])
    is_last = label == [*sections][-1]
    if before and (len(last) == 1 or (is_last and len(charts) == 1)):
      heading = _enumeration(before, f"{label[0].lower()}{label[1:]}")
      joined[-1] = heading, [*last, *charts]
    else:
      joined.append((label, charts))
  return dict(joined)


def _enumeration(before: str, last: str) -> str:
  """Returns "a, b and c" for the headings "a and b" and "c"."""
  comma = ", " if " and " in last else " and "
  return f"{before.replace(' and ', ', ')}{comma}{last}"


def _place(name: str) -> tuple[int, int, str, str]:
  """Returns (section, position in it, prefix, name without the prefix).

  A prefix is a role of RL ("actor/") or the user's `metrics_prefix`.
  """
  parts = name.split("/")
  for start in range(len(parts)):
    base = "/".join(parts[start:])
    for section, patterns in enumerate(_SECTIONS.values()):
      for place, pattern in enumerate(patterns):
        if re.fullmatch(pattern, base):
          return section, place, name.removesuffix(base), base
  return len(_SECTIONS), 0, "", name


def _bounds(names: set[str]) -> set[str]:
  """Returns the metrics that bound a band."""
  return {
    prefix + end
    for name in names
    for base, ends in _SPREADS.items()
    if name.endswith(base)
    for prefix in [name.removesuffix(base)]
    if names.issuperset(prefix + e for e in ends)
    for end in ends
  }
