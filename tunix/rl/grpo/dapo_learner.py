"""DAPO: decoupled clip, dynamic sampling, token-level loss, and a soft penalty for
overlong completions (Yu et al. 2025, arXiv:2503.14476)."""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np

from tunix.ops import rewards as shaping
from tunix.rl import common, metrics
from tunix.rl.common import Rollouts, TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.metrics import Mean
from tunix.rl.pipeline import PromptSource
from tunix.utils import checks, terminal
from tunix.utils.metric import Metric

_log = logging.getLogger(__name__)

METRICS = (
  Metric(
    "dynamic_sampling/refills",
    "batches",
    "batches of prompts drawn in addition, to replace groups with equal rewards",
    "train",
    "with DAPO and `algorithm.dynamic_sampling`",
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongBuffer:
  """A penalty that grows linearly in the last tokens before the token limit.

  Attributes:
    tokens: length of the zone before the limit, in tokens.
    penalty: amount that is subtracted from the reward at the limit.
  """

  tokens: int
  penalty: float = 1.0

  def __post_init__(self):
    checks.fields(self, tokens=checks.COUNT, penalty=checks.NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPOConfig(GRPOConfig):
  """GRPOConfig with the settings of the paper.

  Attributes:
    dynamic_sampling: if True, groups whose rewards are all the same are replaced by
      groups of further prompts, until the batch is full.
    max_refills: largest number of further batches of prompts that one step draws. After
      that, the step trains on the groups that it has.
    overlong_buffer: penalty for long completions; None is off.
  """

  beta: float = 0.0
  epsilon_high: float | None = 0.28
  dynamic_sampling: bool = True
  max_refills: int = 10
  overlong_buffer: OverlongBuffer | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.clip_high < self.clip_low:
      raise ValueError(
        f"epsilon_high {self.clip_high} is below the lower clip, {self.clip_low}: DAPO "
        "clips higher above than below"
      )
    checks.fields(self, max_refills=checks.NOT_NEGATIVE)

  @property
  def collects_batches(self) -> bool:
    return self.dynamic_sampling


class DAPOLearner(GRPOLearner):
  """GRPO that samples until every group has rewards that differ."""

  algo_config: DAPOConfig

  def _shape_rewards(self, rollouts: Rollouts, max_tokens: int) -> np.ndarray:
    buffer = self.algo_config.overlong_buffer
    if buffer is None:
      return rollouts.scores
    penalty = shaping.overlong_penalty(
      jnp.asarray(rollouts.lengths), max_tokens, buffer.tokens, buffer.penalty
    )
    scores = rollouts.scores
    return scores + np.asarray(penalty, np.float64).reshape(scores.shape)

  def _collect(self, source: PromptSource) -> TrainExample | None:
    """Samples until a batch of useful groups is full, or the prompts or refills end.

    Prompts of surplus groups are put back. The next step samples them again with its
    own policy, so that no rollout is off-policy.

    Raises:
      ValueError: no group is useful although there are prompts left, or before the
        first update.
    """
    if not self.algo_config.dynamic_sampling:
      return super()._collect(source)
    parts: list[Rollouts] = []
    needed = self._progress.batch_rows // self.algo_config.num_generations
    refills, groups = -1, 0
    while refills < self.algo_config.max_refills:
      if (batch := source.take()) is None:
        break
      needed = max(needed, len(batch.prompts))
      rollouts = self._rollouts(batch)
      parts.append(rollouts.take(useful(rollouts)))
      refills, groups = refills + 1, groups + len(parts[-1].scores)
      if groups >= needed:
        break
    if refills < 0:
      return None
    self._measured.append({"dynamic_sampling/refills": Mean(float(refills), 1)})
    if not groups and batch is None and self.train_steps:
      _log.warning("the last prompts gave no group whose rewards differ: training ends")
      return None
    if not groups:
      raise ValueError(
        f"in {terminal.counted(refills + 1, 'batch of prompts')} no group had rewards "
        "that differ: the "
        "policy solves all of them or none; change the prompts or the reward, or set "
        "dynamic_sampling=False"
      )
    collected = common.joined(parts)
    if groups > needed:
      source.give_back(collected.batch.take(range(needed, groups)))
      collected = collected.take(range(needed))
    return self._with_advantages(collected)


def useful(rollouts: Rollouts) -> np.ndarray:
  """Returns the indices of the groups whose total rewards are not all the same.

  The overlong penalty does not count: it must not make a group look useful.
  """
  return np.flatnonzero(~metrics.all_equal(rollouts.totals))
