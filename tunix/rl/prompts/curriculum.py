"""Curricula: which prompts a run samples next, by how often the policy solved them.

The order of the data stays. A prompt that the data gives is sampled with a chance that
depends on its solve rate, and skipped otherwise. So a curriculum works on any data, and
its state is one number for each prompt that was sampled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tunix.utils import array_codec, checks
from tunix.utils.metric import Metric

_POOLS = ("easy", "middle", "hard")
_WITH = "with `algorithm.curriculum`"
METRICS = (
  Metric(
    "curriculum/skipped",
    "prompts",
    "prompts of the data that were skipped since the step before",
    "train",
    _WITH,
  ),
  Metric(
    "curriculum/solve_rate", "share", "mean solve rate of known prompts", "train", _WITH
  ),
  *(
    Metric(
      f"curriculum/{pool}", "prompts", f"known prompts that are {pool}", "train", _WITH
    )
    for pool in _POOLS
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
  """Chances of prompts by their solve rate.

  The solve rate p of a prompt is an average over its groups: p becomes memory * p +
  (1 - memory) * (share of the group's completions that pass). A prompt that was never
  sampled has the chance 1. One of the middle has (4 p (1 - p)) ** focus: p (1 - p) is
  the variance of its reward, to which the improvement of a policy by one prompt is
  proportional (arXiv:2504.03380; arXiv:2502.12272 samples in this proportion).

  Attributes:
    easy_from: solve rate from which a prompt is easy.
    hard_to: solve rate up to which a prompt is hard.
    easy_chance: chance of an easy prompt. Above 0, retired prompts are visited again.
    hard_chance: chance of a hard prompt.
    focus: exponent of the chances between hard and easy; 0: all have the chance 1.
    memory: weight of the solve rate before a group; 0: only the newest group counts.
    most_batches: batches of the data that are read for one batch of prompts. After
      that, it is filled with the skipped prompts of the highest chance.
    seed: seed of the choices.
  """

  easy_from: float = 0.9
  hard_to: float = 0.1
  easy_chance: float = 0.1
  hard_chance: float = 0.25
  focus: float = 1.0
  memory: float = 0.5
  most_batches: int = 10
  seed: int = 0

  def __post_init__(self):
    shares = ("easy_from", "hard_to", "easy_chance", "hard_chance", "memory")
    checks.fields(
      self,
      **dict.fromkeys(shares, checks.SHARE),
      focus=checks.NOT_NEGATIVE,
      most_batches=checks.COUNT,
      seed=checks.SEED,
    )
    if self.hard_to >= self.easy_from:
      raise ValueError(
        f"hard_to is {self.hard_to} and easy_from {self.easy_from}: expected hard_to "
        "below easy_from. Lower hard_to, or raise easy_from"
      )
    if self.memory == 1:
      raise ValueError(
        "memory is 1, with which a solve rate never changes; expected a number below 1"
      )

  def pool(self, rate: float) -> str:
    """Returns the pool of a solve rate: "easy", "middle" or "hard"."""
    if rate >= self.easy_from:
      return "easy"
    return "hard" if rate <= self.hard_to else "middle"

  def chance(self, rate: float | None) -> float:
    """Returns the chance of a prompt; `rate` is None if it was never sampled."""
    if rate is None:
      return 1.0
    middle = (4 * rate * (1 - rate)) ** self.focus
    chances = {"easy": self.easy_chance, "hard": self.hard_chance, "middle": middle}
    return chances[self.pool(rate)]


class Curriculum:
  """Solve rates of prompts, and the choices that follow from them.

  Rates change only in `commit`, so a step that is interrupted and repeated draws the
  same prompts.

  Args:
    config: the chances.
    threshold: reward from which a completion passes.

  Attributes:
    config: the chances.
    rates: solve rates by digest of a prompt with its columns, as of the last `commit`.
  """

  def __init__(self, config: CurriculumConfig, threshold: float):
    self.config, self._threshold = config, threshold
    self.rates: dict[str, float] = {}
    self._noted: list[tuple[str, float]] = []

  @classmethod
  def of(cls, config: CurriculumConfig | None, threshold: float | None) -> Self | None:
    """Returns the curriculum of a config; None without one."""
    return None if config is None or threshold is None else cls(config, threshold)

  def chances(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns the chances of prompts, float64 [P]."""
    return np.array([self.config.chance(self.rates.get(key_of(row))) for row in rows])

  def chosen(self, chances: np.ndarray, number: int) -> np.ndarray:
    """Draws which prompts are sampled, bool [P].

    Args:
      chances: those of the prompts of a batch of the data.
      number: number of the batch, which decides the random numbers with the seed.
    """
    dice = np.random.default_rng((self.config.seed, number))
    return dice.random(len(chances)) < chances

  def note(self, rows: Sequence[Mapping[str, Any]], rewards: np.ndarray) -> None:
    """Notes the results of prompts for the next `commit`.

    Args:
      rows: P prompts.
      rewards: float64 [P, G], not finite for a completion without a reward.
    """
    for row, group in zip(rows, rewards):
      if len(known := group[np.isfinite(group)]):
        share = float(np.mean(known >= self._threshold))
        self._noted.append((key_of(row), share))

  def forget(self) -> None:
    """Drops what was noted since the last `commit`."""
    self._noted = []

  def commit(self, skipped: int) -> dict[str, float]:
    """Updates the solve rates with what was noted; returns metrics.

    Args:
      skipped: number of prompts that were skipped since the last `commit`.
    """
    memory = self.config.memory
    for key, share in self._noted:
      before = self.rates.get(key, share)
      self.rates[key] = memory * before + (1 - memory) * share
    self.forget()
    # All known prompts in one array: their number grows with the age of a run.
    rates = np.fromiter(self.rates.values(), np.float64, len(self.rates))
    easy = int(np.sum(rates >= self.config.easy_from))
    hard = int(np.sum(rates <= self.config.hard_to))
    counts = {"easy": easy, "middle": len(rates) - easy - hard, "hard": hard}
    out = {f"curriculum/{pool}": float(counts[pool]) for pool in _POOLS}
    if len(rates):
      out["curriculum/solve_rate"] = float(np.mean(rates))
    return out | {"curriculum/skipped": float(skipped)}


def key_of(row: Mapping[str, Any]) -> str:
  """Returns a digest of a prompt with its columns."""
  text = json.dumps(array_codec.to_json(dict(row)), sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
