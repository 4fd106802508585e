"""Samples completions, computes their rewards, and makes training examples.

The loop around these calls is in rl/rl_learner.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate.decoders import images as images_lib
from tunix.ops import kl
from tunix.rl import common, metrics, row_arrays, setup
from tunix.rl.algorithm_config import AlgorithmConfig, resolve
from tunix.rl.common import Rollouts, TrainExample
from tunix.rl.env import making
from tunix.rl.experience import episodes as episodes_lib
from tunix.rl.experience.episodes import Episodes
from tunix.rl.metrics import Mean, Phases
from tunix.rl.pipeline import PromptBatch
from tunix.rl.prompts import images
from tunix.rl.reward.judge import costs_of
from tunix.rl.reward.rewards import RewardOutput
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout import one_turn
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.client import SamplingClient
from tunix.sft.metrics_logger import Mode
from tunix.utils import coordination, terminal
from tunix.utils.metric import Metric
from tunix.utils.setting import named_values

_log = logging.getLogger(__name__)

# (prompts, completions, rewards, **columns) -> scalars by name
MetricFn = Callable[..., Mapping[str, Any]]

# (rollouts, token limit of a completion) -> scores [P, G] that advantages come from
ShapeRewards = Callable[[Rollouts, int], np.ndarray]


METRICS = (
  Metric(
    "rewards/kl",
    "nats",
    "estimated KL divergence from the reference; it is subtracted from the rewards",
    "train",
    "if `algorithm.beta` is not 0 and the reward has the divergence (PPO, RLOO, ...)",
    "`rewards/reward_kl_penalty`",
  ),
  Metric(
    "perf/exchange_wait_sec",
    "s",
    "time that process 0 waited for completions of others after it had drawn its own",
    condition="with `rollout.engine=per_process` or `remote`, and several processes",
  ),
)


class Experience:
  """The sampling of completions, with their rewards and log-probabilities.

  Args:
    cluster: the models.
    config: settings of the algorithm.
    reward_fns: see RLLearner.
    metric_fns: see RLLearner.
    episodes: draws completions in environments; None: each completion is one answer to
      its prompt.

  Attributes:
    shared_prompts: True if a prompt is computed once for all its completions.
    phases: seconds by phase since the last `phases.take()`.
    measured: metrics of every batch of rollouts since the list was last cleared.

  Raises:
    ValueError: there is neither a reward function nor a reward model, or
      `shared_prompt` is True and a model cannot share prompts.
  """

  def __init__(
    self,
    cluster: RLCluster,
    config: AlgorithmConfig,
    reward_fns: object,
    metric_fns: MetricFn | Sequence[MetricFn] | None,
    episodes: Episodes | None = None,
  ):
    self._cluster, self._config, self._episodes = cluster, config, episodes
    self._rewards = setup.reward_manager(
      reward_fns, cluster, has_others=episodes is not None
    )
    self._metric_fns = [metric_fns] if callable(metric_fns) else list(metric_fns or ())
    self.shared_prompts = setup.shares_prompts(cluster, config)
    self._bucketed = setup.buckets_lengths(cluster, config)
    self._samples_exactly: bool | None = None  # not known before the first batch
    self.phases, self.measured = Phases(cluster.perf), list[dict[str, Mean]]()
    self._one_at_a_time = threading.Lock()

  def rollouts(
    self,
    batch: PromptBatch,
    mode: Mode,
    batches_trained: int,
    shape_rewards: ShapeRewards,
    *,
    measured: list[dict[str, Mean]] | None = None,
    phases: Phases | None = None,
  ) -> Rollouts:
    """Samples the completions of every prompt and computes their rewards.

    Args:
      batch: the prompts.
      mode: training or evaluation. Only training adds metrics to `measured`.
      batches_trained: number of batches of rollouts that were trained on before. In
        training, the random key depends only on `batches_trained`, on `batch.number`
        and on the seed.
      shape_rewards: computes the scores from the rollouts.
      measured, phases: receive the metrics and the seconds. None: the attributes of
        this object, which only the learner's thread may change. Other threads pass
        their own.
    """
    measured = self.measured if measured is None else measured
    phases = self.phases if phases is None else phases
    cluster, algo = self._cluster, self._config
    is_training = mode is Mode.TRAIN
    check_same_prompts(batch, mode)
    group = algo.num_generations if is_training else algo.eval_num_generations
    config = cluster.cluster_config.rollout(mode)
    with phases("rollout", "rollout"):
      key = self.key(batch, batches_trained if is_training else None)
      rollouts = self._sampled(batch, mode, group, key, phases)
    with self._no_other_rewards(), phases("rewards"):
      rollouts = self._rewarded(rollouts)
    if is_training:
      return self.shaped(rollouts, shape_rewards, measured)
    scores = shape_rewards(rollouts, self.max_tokens(config))
    return dataclasses.replace(rollouts, scores=scores)

  def key(self, batch: PromptBatch, batches_trained: int | None) -> jax.Array:
    """Returns the random key of a batch.

    Args:
      batch: the prompts.
      batches_trained: number of batches of rollouts that were trained on before; None
        in evaluations.
    """
    seed = self._cluster.cluster_config.rollout(Mode.TRAIN).seed
    if batches_trained is None:
      seed = self._cluster.cluster_config.rollout(Mode.EVAL).seed
    key = jax.random.fold_in(jax.random.key(seed), batch.number)
    # DAPO can return prompts to the source. They come back with the same
    # `batch.number`, so `batches_trained` is folded in to give new samples.
    if batches_trained is None:
      return key
    return jax.random.fold_in(key, batches_trained)

  def sample_group(
    self, batch: PromptBatch, client: SamplingClient, phases: Phases
  ) -> Rollouts:
    """Samples the completions of one training prompt, and computes their rewards.

    `scores` holds the total rewards until `shaped` replaces them, and `images` is None,
    see `with_images`. Several threads may call this method. Reward functions then run
    in one thread at a time.

    Args:
      batch: the prompt.
      client: draws the actions.
      phases: receives the seconds.
    """
    with phases("rollout"):
      rollouts = self._drawn(batch, client)
    with self._one_at_a_time, phases("rewards"):
      rollouts = self._rewarded(rollouts, is_share=True)
    return dataclasses.replace(rollouts, images=None)

  def with_images(self, rollouts: Rollouts) -> Rollouts:
    """Reads the images of the prompts of `sample_group`, if they have some.

    Raises:
      ValueError: an image is missing or damaged, or has changed.
    """
    read = images.read(self._cluster.images, rollouts.batch)
    return rollouts if read is None else dataclasses.replace(rollouts, images=read.rows)

  def _drawn(self, batch: PromptBatch, client: SamplingClient) -> Rollouts:
    """Returns the completions of one prompt, without rewards."""
    cluster, size = self._cluster, self._config.num_generations
    config = cluster.cluster_config.rollout(Mode.TRAIN)
    if (source := self._episodes) is not None:
      return source.run(batch, Mode.TRAIN, size, client)
    ids = cluster.ids_of(batch.inputs[0])
    read, reads = images.read(cluster.images, batch), {}
    if read is not None:
      reads = {
        "images": read.prompts[0],
        "forbidden": images_lib.forbidden(cluster.actor),
      }
    out = one_turn.completions(cluster.tokenizer, ids, config, size, client, **reads)
    return common.rollouts_of(
      out,
      batch,
      config,
      group_size=size,
      bucketed=self._bucketed,
      images=None if read is None else read.rows,
    )

  def shaped(
    self,
    rollouts: Rollouts,
    shape_rewards: ShapeRewards,
    measured: list[dict[str, Mean]],
  ) -> Rollouts:
    """Computes the scores and the metrics of a batch in training.

    Args:
      rollouts: completions with rewards.
      shape_rewards: see `rollouts`.
      measured: receives the metrics.
    """
    config = self._cluster.cluster_config.rollout(Mode.TRAIN)
    scores = shape_rewards(rollouts, self.max_tokens(config))
    rollouts = dataclasses.replace(rollouts, scores=scores)
    measured.append(metrics.of_rollouts(rollouts) | self._user_metrics(rollouts))
    measured.append(episodes_lib.metrics_of(rollouts.episodes))
    return rollouts

  @contextlib.contextmanager
  def _no_other_rewards(self) -> Iterator[None]:
    """Waits for the rewards of `sample_group` in other threads, then blocks them.

    Raises:
      TimeoutError: a thread still computes rewards after `rollout_timeout_s`.
    """
    timeout_s = self._cluster.cluster_config.training_config.rollout_timeout_s
    if not self._one_at_a_time.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
      raise TimeoutError(
        f"rollout_timeout_s is {timeout_s:g} and a batch has waited that long for the "
        "rewards of another batch. A reward function is slow or hangs. Give reward "
        "functions workers and a timeout_s, or raise rollout_timeout_s"
      )
    try:
      yield
    finally:
      self._one_at_a_time.release()

  def _rewarded(self, rollouts: Rollouts, *, is_share: bool = False) -> Rollouts:
    rewards = self._reward(rollouts, is_share)
    scores = rewards.total.reshape(-1, rollouts.group_size)
    return dataclasses.replace(rollouts, rewards=rewards, scores=scores)

  def add(self, measured: list[dict[str, Mean]], phases: Phases) -> None:
    """Adds the metrics and the seconds of rollouts that another thread sampled."""
    self.measured += measured
    for name, seconds in phases.seconds.items():
      self.phases.add(name, seconds)

  def max_tokens(self, config: RolloutConfig) -> int:
    """Returns the largest number of tokens of a completion."""
    if self._episodes is not None:
      return self._episodes.config.new_tokens(config.max_tokens_to_generate)
    return config.max_tokens_to_generate

  def _sampled(
    self,
    batch: PromptBatch,
    mode: Mode,
    group: int,
    key: jax.Array,
    phases: Phases,
  ) -> Rollouts:
    """Returns the completions of a batch, without rewards."""
    cluster = self._cluster
    if (source := self._episodes) is not None:
      rollouts = source.rollouts(batch, mode, group, key)
      phases.add("env_wait", source.take_waited())
      self._note_exchange(phases)
      return rollouts
    batch_images = images.read(cluster.images, batch)
    out = cluster.generate(
      batch.inputs,
      mode=mode,
      num_generations=group,
      seed=key,
      images=() if batch_images is None else batch_images.prompts,
    )
    self._note_exchange(phases)
    return common.rollouts_of(
      out,
      batch,
      cluster.cluster_config.rollout(mode),
      group_size=group,
      bucketed=self._bucketed,
      images=None if batch_images is None else batch_images.rows,
    )

  def _note_exchange(self, phases: Phases) -> None:
    if waited := self._cluster.rollout.take_waited():
      phases.add("exchange_wait", waited)

  def _reward(self, rollouts: Rollouts, is_share: bool) -> RewardOutput:
    """Calls the reward functions and the reward model; logs failures by name."""
    rewards, rows = RewardOutput(), rollouts.row_prompts
    if self._rewards is not None:
      columns = rows.extra | episodes_lib.columns_of(rollouts.episodes)
      # Environments stay in the process that made them.
      if self._rewards.has_workers or jax.process_count() > 1:
        columns.pop(making.ENVIRONMENTS, None)
      texts = rollouts.text
      rewards = self._rewards.compute(rows.prompts, texts, columns, is_share=is_share)
    if rollouts.episodes:
      rewards = rewards.plus_outcomes(
        "environment", episodes_lib.outcomes_of(rollouts.episodes)
      )
    if self._cluster.reward is not None:
      rewards = rewards.plus("reward_model", self._cluster.get_rewards(rollouts))
    for line in rewards.problems():
      step = getattr(self._cluster.rollout.version, "step", 0)
      _log.warning("step %d: no reward from %s", step, terminal.one_line(line))
    return rewards

  def _user_metrics(self, rollouts: Rollouts) -> dict[str, Mean]:
    rows, text, totals = rollouts.row_prompts, rollouts.text, rollouts.rewards.total
    out: dict[str, Mean] = {}
    for fn in self._metric_fns:
      named = fn(prompts=rows.prompts, completions=text, rewards=totals, **rows.extra)
      out |= {name: Mean(float(value), len(text)) for name, value in named.items()}
    return out

  def example(
    self,
    rollouts: Rollouts,
    advantages: np.ndarray,
    old: np.ndarray | None,
    *,
    policy_moves: bool,
    **fields: object,
  ) -> TrainExample:
    """Makes the training example of rollouts; computes log-probs that the loss needs.

    Args:
      rollouts: completions with rewards.
      advantages: [P * G], one for each completion, or [B, R], one for each token.
      old: log-probabilities [B, R] of the policy before the update; None if they are
        not known.
      policy_moves: True if the policy changes between the first and the last update on
        these rollouts. If `old` is None, it is computed only in this case.
      **fields: further fields of the example.

    Raises:
      ValueError: an advantage of a row with a reward is not finite.
    """
    config = self._config
    self._check_recorded(rollouts)
    # The shape of the batch must not change, so rows without a reward stay in it with
    # weight 0.
    mask = rollouts.completion_mask & self.counted(rollouts)[:, None]
    if advantages.ndim == 1:
      advantages = rollouts.by_row(advantages)
    _check_finite(advantages[mask if advantages.ndim > 1 else mask.any(1)])
    if rollouts.versions is not None:
      # Staleness is measured against the weights that the next update starts from.
      step = self._cluster.actor_trainer.train_steps
      self.measured.append(metrics.staleness(rollouts.versions, mask, step))
    with self.phases("scoring"):
      ref = self._ref_logps(rollouts) if config.beta and config.kl_in_loss else None
      if old is None and policy_moves:
        old = self.old_logps(rollouts)
    return TrainExample(
      prompt_ids=rollouts.prompt_ids,
      prompt_mask=rollouts.prompt_mask,
      completion_ids=rollouts.completion_ids,
      completion_mask=mask,
      advantages=np.nan_to_num(advantages).astype(np.float32),
      ref_per_token_logps=ref,
      old_per_token_logps=old,
      rollout_per_token_logps=rollouts.rollout_logps,
      **named_values(rollouts, row_arrays.RECORDED),
      images=rollouts.images,
      group_size=rollouts.group_size if self._shares(rollouts) else 1,
      episode_rows=rollouts.episode_rows,
      **fields,
    )

  def _check_recorded(self, rollouts: Rollouts) -> None:
    config = self._cluster.cluster_config.rollout(Mode.TRAIN)
    engine = type(self._cluster.rollout).__name__
    has_tokens = rollouts.completion_mask.any()
    if config.replay_routes and has_tokens and rollouts.completion_routes is None:
      raise ValueError(
        f"replay_routes is True and {engine} gave no routes with its completions: use "
        "the vanilla engine, or set replay_routes to False"
      )
    if config.center_scores and has_tokens and rollouts.head_probs is None:
      raise ValueError(
        f"center_scores is {config.center_scores} and {engine} gave no probabilities "
        "with its completions: use the vanilla engine, or set center_scores to 0"
      )

  def counted(self, rollouts: Rollouts) -> np.ndarray:
    """Returns bool [B]: True for rows that are trained on."""
    counted = rollouts.valid.reshape(-1)
    if self._config.mask_truncated:
      counted = counted & ~rollouts.truncated
    return rollouts.by_row(counted)

  def kl_penalty(
    self, rollouts: Rollouts
  ) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Computes the KL divergence for algorithms that subtract it from the rewards.

    Returns:
      The policy's log-probabilities and the estimated divergence of every token, both
      float32 [B, R]. The divergence is 0 on padding. Both are None if `beta` is 0.
    """
    config, mask = self._config, rollouts.completion_mask
    if not config.beta:
      return None, None
    with self.phases("scoring"):
      old, ref = self.old_logps(rollouts), self._ref_logps(rollouts)
    estimate = resolve("kl_method", config.kl_method, kl.ESTIMATORS)
    divergence = np.where(mask, np.asarray(estimate(old, ref)), 0.0)
    count = max(1, mask.sum())
    self.measured.append({"rewards/kl": Mean(float(divergence.sum() / count), count)})
    return old, divergence

  def _ref_logps(self, rows: Rollouts) -> np.ndarray:
    return self._cluster.get_ref_per_token_logps(rows, **self._scoring(rows))

  def old_logps(self, rows: Rollouts) -> np.ndarray:
    """Returns the policy's log-probabilities of completions, float32 [B, R]."""
    if self._samples_exactly and rows.images is None:
      return np.where(rows.completion_mask, rows.rollout_logps, np.float32(0))
    scored = self._cluster.get_old_per_token_logps(rows, **self._scoring(rows))
    if self._samples_exactly is None and rows.images is None:
      self._samples_exactly = self._agrees(rows, scored)
    return scored

  def _agrees(self, rows: Rollouts, scored: np.ndarray) -> bool:
    """Returns True if the sampler's log-probs stand for those of the policy.

    The bits of a batch-invariant model depend on the machine, so they are compared in
    the first batch after each start.
    """
    if not setup.samples_exactly(self._cluster):
      return False
    mask = rows.completion_mask
    differing = int(np.sum((rows.rollout_logps != scored) & mask))
    if differing:
      _log.warning(
        "the model is batch_invariant, and %d of %d tokens of the first batch have "
        "another log-probability in the sampler than in the trainer; expected none. "
        "The log-probabilities before an update are computed, as without the setting",
        *(differing, int(mask.sum())),
      )
    return not differing

  def _shares(self, rollouts: Rollouts) -> bool:
    return self.shared_prompts and rollouts.shares_prompts

  def _scoring(self, rollouts: Rollouts) -> dict[str, Any]:
    return {
      "shared_prompt": self._shares(rollouts),
      "tile_rows": self._config.exact_tile_rows,
    }

  def costs(self) -> dict[str, float]:
    """Returns the costs of judges since the last call, by name of the metric."""
    return {} if self._rewards is None else costs_of(self._rewards.judges)

  def close(self) -> None:
    """Ends the reward workers, and the processes of environments."""
    if self._episodes is not None:
      self._episodes.close()
    if self._rewards is not None:
      self._rewards.close()


def _check_finite(advantages: np.ndarray) -> None:
  """Checks the advantages of rows that are trained on.

  Raises:
    ValueError: an advantage is NaN, or does not fit in float32.
  """
  bad = ~(np.abs(advantages) <= np.finfo(np.float32).max)
  if bad.any():
    raise ValueError(
      f"{bad.sum()} of {bad.size} advantages are not finite (the first one is "
      f"{advantages[bad][0]}); expected finite ones. Lower the weights of the rewards, "
      "or correct the function of advantage_estimator"
    )


def check_same_prompts(batch: PromptBatch, mode: Mode) -> None:
  """Checks that all processes have the same batch.

  Raises:
    ValueError: a process has other prompts or columns.
  """
  if jax.process_count() > 1:
    text = repr([batch.prompts, sorted(batch.columns.items())])
    digest = hashlib.sha256(text.encode()).hexdigest()
    coordination.agree(
      f"prompts of batch {batch.number} ({mode.value})",
      {"digest": digest},
      "every process must be given the same prompts, in the same order: read the same "
      "file with the same seed, and do not shard it",
      topic="prompts of batches",
    )
