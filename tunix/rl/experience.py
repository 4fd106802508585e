"""Experience: prompts become completions with rewards, and those an example to learn.

What a learner holds to make its examples with; the loop around it is rl_learner.py.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.ops import kl
from tunix.rl import common, metrics, setup
from tunix.rl.algorithm_config import AlgorithmConfig, resolve
from tunix.rl.common import Rollouts, Tokens, TrainExample
from tunix.rl.metrics import Mean, Phases
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rewards import RewardOutput
from tunix.rl.rl_cluster import RLCluster
from tunix.sft.metrics_logger import Mode
from tunix.utils import coordination

_log = logging.getLogger(__name__)

# (prompts, completions, rewards, **columns) -> scalars by name
MetricFn = Callable[..., Mapping[str, Any]]

# (tokens, totals [B], most tokens of a completion) -> rewards [B] to learn from
ShapeRewards = Callable[[Tokens, np.ndarray, int], np.ndarray]


class Experience:
  """Samples, rewards and scores completions, by the models of a cluster.

  Args:
    cluster: the models.
    config: the algorithm's settings.
    reward_fns: see RLLearner.
    metric_fns: see RLLearner.

  Attributes:
    shared_prompts: whether a prompt is computed once for all its completions.
    phases: seconds by phase since they were last taken.
    measured: metrics of every collection of rollouts since they were last cleared.

  Raises:
    ValueError: there is neither a reward function nor a reward model, or prompts should
      be shared and cannot.
  """

  def __init__(
    self,
    cluster: RLCluster,
    config: AlgorithmConfig,
    reward_fns: Any,
    metric_fns: MetricFn | Sequence[MetricFn] | None,
  ):
    self._cluster, self._config = cluster, config
    self._rewards = setup.reward_manager(reward_fns, cluster)
    self._metric_fns = [metric_fns] if callable(metric_fns) else list(metric_fns or ())
    self.shared_prompts = setup.shares_prompts(cluster, config)
    self.phases, self.measured = Phases(cluster.perf), list[dict[str, Mean]]()

  def rollouts(
    self, batch: PromptBatch, mode: Mode, number: int, shape_rewards: ShapeRewards
  ) -> Rollouts:
    """Samples and rewards the completions of every prompt.

    Args:
      batch: the prompts.
      mode: in training their metrics are kept in `measured`.
      number: of rollouts that were learnt from before; what is drawn in training
        depends on it, on the batch's own number and on the seed, and on nothing else.
      shape_rewards: what the algorithm makes of the totals.
    """
    cluster, algo = self._cluster, self._config
    is_training = mode is Mode.TRAIN
    _check_same_prompts(batch, mode)
    group = algo.num_generations if is_training else algo.eval_num_generations
    config = cluster.cluster_config.rollout(mode)
    with self.phases("rollout", "rollout"):
      key = jax.random.fold_in(jax.random.key(config.seed), batch.number)
      if is_training:
        key = jax.random.fold_in(key, number)
      out = cluster.generate(batch.prompts, mode=mode, num_generations=group, seed=key)
    tokens = common.tokens_of(
      out,
      config,
      group_size=group,
      bucketed=cluster.cluster_config.training_config.bucketed_lengths,
    )
    with self.phases("rewards"):
      rewards = self._reward(batch, out.text, tokens)
    scores = shape_rewards(tokens, rewards.total, config.max_tokens_to_generate)
    rollouts = Rollouts(
      batch=batch,
      text=out.text,
      finish_reasons=out.finish_reasons,
      tokens=tokens,
      rewards=rewards,
      scores=scores.reshape(-1, group),
    )
    if is_training:
      self.measured.append(
        metrics.of_rollouts(rollouts) | self._users_metrics(rollouts)
      )
    return rollouts

  def _reward(
    self, batch: PromptBatch, text: Sequence[str], tokens: Tokens
  ) -> RewardOutput:
    """By all functions and the reward model; what went wrong is logged by name."""
    prompts, columns = common.repeated(batch, tokens.group_size)
    rewards = RewardOutput(total=np.zeros(len(text)), by_function={}, outcomes={})
    if self._rewards is not None:
      rewards = self._rewards.compute(prompts, list(text), columns)
    if self._cluster.reward is not None:
      rewards = rewards.plus("reward_model", self._cluster.get_rewards(tokens))
    for line in rewards.problems():
      step = self._cluster.actor_trainer.train_steps
      _log.warning("step %d: no reward from %s", step, line)
    return rewards

  def _users_metrics(self, rollouts: Rollouts) -> dict[str, Mean]:
    prompts, columns = common.repeated(rollouts.batch, rollouts.tokens.group_size)
    totals = rollouts.rewards.total
    out: dict[str, Mean] = {}
    for fn in self._metric_fns:
      named = fn(prompts=prompts, completions=rollouts.text, rewards=totals, **columns)
      rows = len(rollouts.text)
      out |= {name: Mean(float(value), rows) for name, value in named.items()}
    return out

  def example(
    self,
    rollouts: Rollouts,
    advantages: np.ndarray,
    old: np.ndarray | None,
    *,
    policy_moves: bool,
    **more: Any,
  ) -> TrainExample:
    """The example of rollouts and advantages [B] or [B, R].

    What the loss needs of the reference and of the policy before the update is scored
    here, unless it is given as `old`; `more` are further fields.

    Args:
      policy_moves: whether the policy moves between the first and the last update by
        these rollouts; if not, the policy before the update is the policy.
    """
    tokens, config = rollouts.tokens, self._config
    mask = tokens.completion_mask & rollouts.valid.reshape(-1, 1)
    if config.mask_truncated:
      mask &= ~tokens.truncated[:, None]
    with self.phases("scoring"):
      ref = self._ref_logps(tokens) if config.beta and config.kl_in_loss else None
      if old is None and policy_moves:
        old = self._old_logps(tokens)
    return TrainExample(
      prompt_ids=tokens.prompt_ids,
      prompt_mask=tokens.prompt_mask,
      completion_ids=tokens.completion_ids,
      completion_mask=mask,
      advantages=np.nan_to_num(advantages).astype(np.float32),
      ref_per_token_logps=ref,
      old_per_token_logps=old,
      rollout_per_token_logps=tokens.rollout_logps,
      **more,
    )

  def kl_penalty(self, tokens: Tokens) -> tuple[np.ndarray | None, np.ndarray | None]:
    """For a KL in the rewards: the policy's log-probs and estimates of the divergence
    at every token, float32 [B, R], 0 outside completions; None both with beta 0."""
    config, mask = self._config, tokens.completion_mask
    if not config.beta:
      return None, None
    with self.phases("scoring"):
      old, ref = self._old_logps(tokens), self._ref_logps(tokens)
    estimate = resolve("kl_method", config.kl_method, kl.ESTIMATORS)
    divergence = np.where(mask, np.asarray(estimate(old, ref)), 0.0)
    count = max(1, mask.sum())
    self.measured.append({"rewards/kl": Mean(float(divergence.sum() / count), count)})
    return old, divergence

  def _ref_logps(self, tokens: Tokens) -> np.ndarray:
    return self._cluster.get_ref_per_token_logps(
      tokens, shared_prompt=self.shared_prompts, tile_rows=self._config.exact_tile_rows
    )

  def _old_logps(self, tokens: Tokens) -> np.ndarray:
    return self._cluster.get_old_per_token_logps(
      tokens, shared_prompt=self.shared_prompts, tile_rows=self._config.exact_tile_rows
    )

  def close(self) -> None:
    """Ends the reward workers."""
    if self._rewards is not None:
      self._rewards.close()


def _check_same_prompts(batch: PromptBatch, mode: Mode) -> None:
  """With several processes, that all of them were given the same batch.

  Raises:
    ValueError: they were not.
  """
  if jax.process_count() > 1:
    text = repr([batch.prompts, sorted(batch.columns.items())])
    digest = hashlib.sha256(text.encode()).hexdigest()
    coordination.agree(
      f"prompts of batch {batch.number} ({mode.value})",
      {"digest": digest},
      "every process must be given the same prompts, in the same order: read the same "
      "file with the same seed, and do not shard it",
    )
