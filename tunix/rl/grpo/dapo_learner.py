"""DAPO: decoupled clip, dynamic sampling, token-level loss, soft punishment of overlong
completions (Yu et al. 2025, arXiv:2503.14476)."""

from __future__ import annotations

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np

from tunix.ops import rewards as shaping
from tunix.rl import common, metrics
from tunix.rl.common import Rollouts, Tokens, TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.metrics import Mean
from tunix.rl.pipeline import PromptSource
from tunix.utils import checks

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongBuffer:
  """Soft punishment of long completions, in tokens.

  Attributes:
    tokens: length of the zone before the limit in which the penalty grows.
    penalty: subtracted from the reward at the limit.
  """

  tokens: int
  penalty: float = 1.0

  def __post_init__(self):
    checks.fields(self, tokens=checks.COUNT, penalty=checks.NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPOConfig(GRPOConfig):
  """GRPOConfig with the paper's settings.

  Attributes:
    dynamic_sampling: groups whose rewards are all one number are replaced by those of
      further prompts, until the batch is full.
    max_refills: batches of prompts drawn for one step at most, beyond the first; then
      the step makes do with the groups it has.
    overlong_buffer: None: no punishment.
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


class DAPOLearner(GRPOLearner):
  """GRPO that keeps sampling until every group has something to teach."""

  algo_config: DAPOConfig

  def _shape_rewards(
    self, tokens: Tokens, totals: np.ndarray, max_tokens: int
  ) -> np.ndarray:
    buffer = self.algo_config.overlong_buffer
    if buffer is None:
      return totals
    penalty = shaping.overlong_penalty(
      jnp.asarray(tokens.lengths), max_tokens, buffer.tokens, buffer.penalty
    )
    return totals + np.asarray(penalty, np.float64)

  def _collect(self, source: PromptSource) -> TrainExample | None:
    """Samples until a batch of useful groups is full, the prompts end, or `max_refills`
    are used up. Prompts of surplus groups are sampled anew in the next step, by the
    policy of that step: no rollout is ever stale.

    Raises:
      ValueError: no group was useful, and there were prompts left, or nothing was
        learnt before.
    """
    if not self.algo_config.dynamic_sampling:
      return super()._collect(source)
    kept: list[Rollouts] = []
    wanted = self._progress.batch_rows // self.algo_config.num_generations
    refills, groups = -1, 0
    while refills < self.algo_config.max_refills:
      if (batch := source.take()) is None:
        break
      wanted = max(wanted, len(batch.prompts))
      rollouts = self._rollouts(batch)
      kept.append(rollouts.take(useful(rollouts)))
      refills, groups = refills + 1, groups + len(kept[-1].scores)
      if groups >= wanted:
        break
    if refills < 0:
      return None
    self._measured.append({"dynamic_sampling/refills": Mean(float(refills), 1)})
    if not groups and batch is None and self.train_steps:
      _log.warning("the last prompts gave no group whose rewards differ: all done")
      return None
    if not groups:
      raise ValueError(
        f"in {refills + 1} batches of prompts no group had rewards that differ: the "
        "policy solves all of them or none; change the prompts or the reward, or set "
        "dynamic_sampling=False"
      )
    whole = common.joined(kept)
    if groups > wanted:
      source.give_back(whole.batch.take(range(wanted, groups)))
      whole = whole.take(range(wanted))
    return self._with_advantages(whole)


def useful(rollouts: Rollouts) -> np.ndarray:
  """Groups, by their raw rewards, that are not all equal: punishing length must not
  make a group look useful."""
  return np.flatnonzero(~metrics.all_equal(rollouts.raw))
