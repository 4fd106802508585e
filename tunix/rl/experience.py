"""Experience: prompts become completions with rewards, and those an example to learn.

The half of a learner that algorithms call; the loop around it is rl_learner.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.ops import kl
from tunix.rl import common, metrics, setup
from tunix.rl.algorithm_config import AlgorithmConfig, resolve
from tunix.rl.common import Rollouts, Tokens, TrainExample
from tunix.rl.learner_state import LearnerProgress
from tunix.rl.metrics import Phases
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rewards import RewardOutput
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.samples import Samples
from tunix.sft.metrics_logger import Mode

_log = logging.getLogger(__name__)

# (prompts, completions, rewards, **columns) -> scalars by name
MetricFn = Callable[..., Mapping[str, Any]]


class Experience:
  """Samples, rewards and scores, by the models of a cluster; see RLLearner."""

  def __init__(
    self,
    rl_cluster: RLCluster,
    algo_config: AlgorithmConfig,
    reward_fns: Any,
    metric_fns: MetricFn | Sequence[MetricFn] | None,
  ):
    self.rl_cluster, self.algo_config = rl_cluster, algo_config
    self._config = rl_cluster.cluster_config.training_config
    self._reward_manager = setup.reward_manager(reward_fns, rl_cluster)
    self._metric_fns = [metric_fns] if callable(metric_fns) else list(metric_fns or ())
    self._samples: Samples | None = None
    self._phases, self._found = Phases(), list[dict[str, float]]()
    self._shared = setup.shares_prompts(rl_cluster, algo_config)
    self._progress = LearnerProgress()

  @property
  def train_steps(self) -> int:
    """Updates of the actor."""
    return self.rl_cluster.actor_trainer.train_steps

  def _shape_rewards(
    self, tokens: Tokens, totals: np.ndarray, max_tokens: int
  ) -> np.ndarray:
    """Rewards [B] as they are learnt from; metrics show those before it."""
    del tokens, max_tokens
    return totals

  def _rollouts(self, batch: PromptBatch, mode: Mode = Mode.TRAIN) -> Rollouts:
    """Samples and rewards the completions of every prompt."""
    cluster, algo = self.rl_cluster, self.algo_config
    train = mode is Mode.TRAIN
    group = algo.num_generations if train else algo.eval_num_generations
    config = cluster.cluster_config.rollout(mode)
    with self._phases("rollout"):
      key = jax.random.fold_in(jax.random.key(config.seed), batch.number)
      if train:
        key = jax.random.fold_in(key, self._progress.rollouts)
      out = cluster.generate(batch.prompts, mode=mode, num_generations=group, seed=key)
    tokens = common.tokens_of(
      out, config, group_size=group, bucketed=self._config.bucketed_lengths
    )
    with self._phases("rewards"):
      rewards = self._rewards(batch, out.text, tokens)
    scores = self._shape_rewards(tokens, rewards.total, config.max_tokens_to_generate)
    rollouts = Rollouts(
      batch=batch,
      text=out.text,
      finish_reasons=out.finish_reasons,
      tokens=tokens,
      rewards=rewards,
      scores=scores.reshape(-1, group),
    )
    if train:
      found = {**metrics.of_rollouts(rollouts), **self._own(rollouts)}
      self._found.append({**found, metrics.COUNT: len(out.text)})
    return rollouts

  def _rewards(
    self, batch: PromptBatch, text: Sequence[str], tokens: Tokens
  ) -> RewardOutput:
    """By all functions and the reward model; what went wrong is logged by name."""
    prompts, columns = common.repeated(batch, tokens.group_size)
    found = RewardOutput(total=np.zeros(len(text)), by_function={}, outcomes={})
    if self._reward_manager is not None:
      found = self._reward_manager.compute(prompts, list(text), columns)
    if self.rl_cluster.reward is not None:
      found = found.plus("reward_model", self.rl_cluster.get_rewards(tokens))
    for line in found.problems():
      _log.warning("step %d: no reward from %s", self.train_steps, line)
    return found

  def _own(self, rollouts: Rollouts) -> dict[str, float]:
    """What the user's metric functions say."""
    prompts, columns = common.repeated(rollouts.batch, rollouts.tokens.group_size)
    totals = rollouts.rewards.total
    out: dict[str, float] = {}
    for fn in self._metric_fns:
      found = fn(prompts=prompts, completions=rollouts.text, rewards=totals, **columns)
      out |= {name: float(value) for name, value in found.items()}
    return out

  def _example(
    self,
    rollouts: Rollouts,
    advantages: np.ndarray,
    old: np.ndarray | None = None,
    **more: Any,
  ) -> TrainExample:
    """The example of rollouts and advantages [B] or [B, R].

    What the loss needs of the reference and of the policy before the update is scored
    here, unless it is given as `old`; `more` are further fields.
    """
    tokens, config = rollouts.tokens, self.algo_config
    if self._samples is not None:
      number = self._progress.rollouts
      self._samples.add(rollouts, advantages, number=number, step=self.train_steps)
    mask = tokens.completion_mask & rollouts.valid.reshape(-1, 1)
    if config.mask_truncated:
      mask &= ~tokens.truncated[:, None]
    with self._phases("scoring"):
      ref = self._ref_logps(tokens) if config.beta and config.kl_in_loss else None
      if old is None and self._moves(len(mask)):
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

  def _kl_penalty(self, tokens: Tokens) -> tuple[np.ndarray | None, np.ndarray | None]:
    """For a KL in the rewards: the policy's log-probs and estimates of the divergence
    at every token, float32 [B, R], 0 outside completions; None both with beta 0."""
    config, mask = self.algo_config, tokens.completion_mask
    if not config.beta:
      return None, None
    with self._phases("scoring"):
      old, ref = self._old_logps(tokens), self._ref_logps(tokens)
    estimate = resolve("kl_method", config.kl_method, kl.ESTIMATORS)
    divergence = np.where(mask, np.asarray(estimate(old, ref)), 0.0)
    self._found.append({"rewards/kl": float(divergence.sum() / max(1, mask.sum()))})
    return old, divergence

  def _ref_logps(self, tokens: Tokens) -> np.ndarray:
    return self.rl_cluster.get_ref_per_token_logps(
      tokens, shared_prompt=self._shared, tile_rows=self.algo_config.exact_tile_rows
    )

  def _old_logps(self, tokens: Tokens) -> np.ndarray:
    return self.rl_cluster.get_old_per_token_logps(
      tokens, shared_prompt=self._shared, tile_rows=self.algo_config.exact_tile_rows
    )

  def _moves(self, rows: int) -> bool:
    """Whether the policy moves between the first and the last update by a rollout;
    if not, the policy before the update is the policy, and need not be scored."""
    return self.algo_config.num_iterations > 1 or self._mini_rows(rows) < rows

  def _mini_rows(self, rows: int) -> int:
    """Rows of a mini-batch; without a size, of the largest batch so far."""
    group = self.algo_config.num_generations
    self._progress.batch_rows = max(self._progress.batch_rows, rows)
    if (mini := self._config.mini_batch_size) is not None:
      return mini * group
    micro = (self._config.train_micro_batch_size or 1) * group
    return -(-self._progress.batch_rows // micro) * micro
