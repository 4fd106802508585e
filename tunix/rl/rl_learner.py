"""RLLearner: from prompts to a better policy. The page to read first.

    while prompts are left:
      example = self._generate_and_compute_advantage(batch)  <- what an algorithm writes
      cluster.update_critic(mini-batches); cluster.update_actor(mini-batches)
      cluster.sync_weights()

All that a resumed run needs is one RunState (learner_state.py), saved between two
rollouts. Random numbers need no state: they follow from the seed, the number of the
rollout and the row.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.rl import common, evaluation, learner_state, metrics, policy_loss
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.common import Rollouts, Tokens, TrainExample
from tunix.rl.learner_state import LearnerProgress
from tunix.rl.metrics import Phases
from tunix.rl.pipeline import PromptBatch, PromptSource, mini_batches, prompt_batch
from tunix.rl.rewards import RewardManager, RewardOutput
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.samples import Samples
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.metrics_logger import Mode
from tunix.utils.interrupts import DeferredSignals, Stopped

_log = logging.getLogger(__name__)

MetricFn = Callable[..., Mapping[str, Any]]


class RLLearner(abc.ABC):
  """Trains the actor of a cluster on rollouts.

  Subclasses write `_generate_and_compute_advantage`, and may replace
  `_compute_policy_loss`, `_shape_rewards` and `_collect`.

  Args:
    rl_cluster: the models.
    algo_config: the algorithm's settings.
    reward_fns: `fn(prompts, completions, **columns) -> list[float]`, one or several, or
      a RewardManager; None: the cluster's reward model alone.
    metric_fns: `fn(prompts, completions, rewards, **columns)` -> scalars by name,
      logged with every batch of rollouts; rewards are float64 [B], NaN where they
      failed.
    data_shuffle_seed: shuffle groups of rollouts before they are cut into mini-batches,
      anew in every iteration; None: in the order of the prompts.

  Raises:
    ValueError: settings that do not fit the cluster, or a checkpoint that does not.
  """

  def __init__(
    self,
    rl_cluster: RLCluster,
    algo_config: AlgorithmConfig,
    reward_fns: Any = None,
    metric_fns: MetricFn | Sequence[MetricFn] | None = None,
    data_shuffle_seed: int | None = None,
  ):
    self.rl_cluster, self.algo_config = rl_cluster, algo_config
    self._config = rl_cluster.cluster_config.training_config
    self._reward_manager = _manager(reward_fns, rl_cluster)
    self._metric_fns = [metric_fns] if callable(metric_fns) else list(metric_fns or ())
    self._shuffle_seed = data_shuffle_seed
    self._samples: Samples | None = None
    self._phases, self._found = Phases(), list[dict[str, float]]()
    self._shared = _shares_prompts(rl_cluster, algo_config)
    self._check()
    rl_cluster.actor_trainer.with_role_loss(self._compute_policy_loss)
    self._checkpoints = CheckpointManager(
      self._config.checkpoint_root_directory, self._config.checkpointing_options
    )
    self._identity = learner_state.identity(rl_cluster)
    self._progress = LearnerProgress()
    self.restore_checkpoint()

  def with_samples(self, samples: Samples) -> Self:
    """Shows some of the rollouts as files to look at; returns the learner."""
    self._samples = samples
    return self

  # What an algorithm writes.

  @abc.abstractmethod
  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    """Rollouts of a batch of prompts with what the update needs: `_rollouts`, then
    advantages, then `_example`."""

  def _compute_policy_loss(
    self, model: nnx.Module, example: TrainExample
  ) -> tuple[WeightedSum, policy_loss.Aux]:
    """The loss of one micro-batch, and token means to watch; traced."""
    sampling = self.rl_cluster.cluster_config.rollout(Mode.TRAIN)
    return policy_loss.policy_loss(
      model,
      example,
      self.algo_config,
      temperature=sampling.temperature,
      max_tokens=sampling.max_tokens_to_generate,
    )

  def _shape_rewards(
    self, tokens: Tokens, totals: np.ndarray, max_tokens: int
  ) -> np.ndarray:
    """Rewards [B] as they are learnt from; metrics show those before it."""
    del tokens, max_tokens
    return totals

  def _collect(self, source: PromptSource) -> TrainExample | None:
    """The rollouts of one step; None at the end of the prompts."""
    batch = source.take()
    return None if batch is None else self._generate_and_compute_advantage(batch)

  # The loop.

  def train(
    self,
    train_ds: Iterable[Mapping[str, Any]],
    eval_ds: Iterable[Mapping[str, Any]] | None = None,
    skip_jit: bool = False,
  ) -> None:
    """Trains until the prompts or `max_steps` end; goes on where a checkpoint was.

    Args:
      train_ds: yields batches {"prompts": [...], column: [...], ...}. A last batch that
        is smaller is filled up with rows that weigh nothing.
      eval_ds: batches as well, iterated anew for every evaluation.
      skip_jit: run the updates without `jax.jit`, to debug a loss.

    Raises:
      Stopped: SIGINT or SIGTERM arrived; a checkpoint was saved.
      ValueError: no prompts, or one that is too long.
    """
    source = PromptSource(train_ds, self._progress.data_state, self._progress.pending)
    with DeferredSignals() as signals:
      self._evaluate_if_due(eval_ds)
      while (example := self._collect_or_save(source)) is not None:
        self._update(example, skip_jit)
        self._progress.rollouts += 1
        self._progress.data_state = source.state()
        self._progress.pending = source.pending
        self._evaluate_if_due(eval_ds)
        self._save_if_due()
        self._stop_if_asked(signals)
      if not source.drawn and not self._finished:
        raise ValueError(
          "the prompts gave no batch: the data is empty, or a generator that an "
          "earlier loop has used up"
        )
      self._evaluate_if_due(eval_ds, last=True)
      self.save_checkpoint()
      self._checkpoints.wait()
      self.rl_cluster.logger.flush()

  def _collect_or_save(self, source: PromptSource) -> TrainExample | None:
    """`_collect` until the run ends; when it fails, what was learnt is saved first."""
    try:
      return None if self._finished else self._collect(source)
    except BaseException:  # whatever it was, it goes on its way after the save
      self.save_checkpoint()
      raise

  @property
  def train_steps(self) -> int:
    """Updates of the actor."""
    return self.rl_cluster.actor_trainer.train_steps

  @property
  def _finished(self) -> bool:
    limit = self._config.max_steps
    return limit is not None and self.train_steps >= limit

  def _update(self, example: TrainExample, skip_jit: bool) -> None:
    """All updates by one batch of rollouts, then new weights for the engine."""
    cluster, minis = self.rl_cluster, self._mini_batches(example)
    parts = self._micro_batches(minis[0].rows)
    with self._phases("update"):
      if cluster.critic_trainer is not None:
        cluster.update_critic(minis, skip_jit=skip_jit, micro_batches=parts)
      cluster.update_actor(minis, skip_jit=skip_jit, micro_batches=parts)
      for trainer in learner_state.trainers(cluster).values():
        trainer.flush()
    with self._phases("sync"):
      cluster.sync_weights()
    self._log({**metrics.mean_of(self._found), **self._phases.take()}, Mode.TRAIN)
    self._found.clear()

  def _mini_batches(self, example: TrainExample) -> list[TrainExample]:
    """Mini-batches of all iterations, as many as `max_steps` leaves."""
    config, limit = self.algo_config, self._config.max_steps
    minis = list(
      mini_batches(
        dataclasses.replace(
          example, group_size=config.num_generations if self._shared else 1
        ),
        group=config.num_generations,
        rows=self._mini_rows(example.rows),
        iterations=config.num_iterations,
        shuffle=None
        if self._shuffle_seed is None
        else (self._shuffle_seed, self._progress.rollouts),
      )
    )
    if not minis:
      raise ValueError(
        "no completion of a whole batch has weight: every reward failed, or every "
        "completion was truncated under mask_truncated; look at rewards/failed and "
        "completions/truncated, and at what the reward functions raise"
      )
    return minis if limit is None else minis[: limit - self.train_steps]

  def _mini_rows(self, rows: int) -> int:
    """Rows of a mini-batch; without a size, of the largest batch so far."""
    group = self.algo_config.num_generations
    self._progress.batch_rows = max(self._progress.batch_rows, rows)
    if (mini := self._config.mini_batch_size) is not None:
      return mini * group
    micro = (self._config.train_micro_batch_size or 1) * group
    return -(-self._progress.batch_rows // micro) * micro

  def _micro_batches(self, mini_rows: int) -> int:
    micro = self._config.train_micro_batch_size
    return mini_rows // (micro * self.algo_config.num_generations) if micro else 1

  # Pieces that algorithms share.

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
      self._found.append({**metrics.of_rollouts(rollouts), **self._own(rollouts)})
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

  def _check(self) -> None:
    cluster, config = self.rl_cluster, self.algo_config
    if jax.process_count() > 1:
      raise ValueError(
        f"{jax.process_count()} processes: RL learners run in one process, over any "
        "number of its devices; start a single one"
      )
    if cluster.cluster_config.rollout(Mode.TRAIN).temperature == 0:
      raise ValueError(
        "temperature is 0: greedy rollouts do not explore and have no log-probs to "
        "learn from; set it above 0 for Mode.TRAIN"
      )
    if config.beta and cluster.reference is None and not cluster.has_lora:
      raise ValueError(
        f"beta is {config.beta}, and there is no reference model to keep close to: "
        "pass reference= to RLCluster, train LoRA adapters, or set beta=0"
      )

  # Evaluation, checkpoints, metrics.

  def _evaluate_if_due(self, eval_ds: Any, last: bool = False) -> None:
    every, step = self._config.eval_every_n_steps, self.train_steps
    done = self._progress.evaluated_at
    due = done < 0 or (every is not None and step // every > done // every)
    if not due and not (last and done < step):
      return
    self._progress.evaluated_at = step
    if eval_ds is not None:
      found = self.evaluate(eval_ds)
      self._log({**found, **self._phases.take()}, Mode.EVAL)

  def evaluate(self, eval_ds: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Rewards and pass@k on held-out prompts, sampled as Mode.EVAL says."""
    rollouts = [
      self._rollouts(prompt_batch(batch, number), Mode.EVAL)
      for number, batch in enumerate(eval_ds)
    ]
    return evaluation.summary(rollouts, self.algo_config.pass_threshold)

  def _log(self, values: Mapping[str, float], mode: Mode) -> None:
    logger, prefix = self.rl_cluster.logger, self._config.metrics_prefix
    for name, value in values.items():
      logger.log(prefix, name, value, mode, self.train_steps)

  def save_checkpoint(self) -> bool:
    """Saves the run now; False without a folder, or when this step is saved."""
    step = self.train_steps
    if not step or self._checkpoints.latest_step() == step:
      return False
    state = learner_state.of_run(self.rl_cluster, self._progress, self._identity)
    return self._checkpoints.save_state(step, state, force=True)

  def restore_checkpoint(self) -> bool:
    """Restores the newest checkpoint; returns whether there was one.

    Raises:
      ValueError: it belongs to other models, or to another reference.
    """
    found = learner_state.restore(self.rl_cluster, self._checkpoints, self._identity)
    self._progress = found or self._progress
    return found is not None

  def close(self) -> None:
    """Saves what is not saved, ends the reward workers, closes files."""
    self.save_checkpoint()
    self._checkpoints.close()
    if self._reward_manager is not None:
      self._reward_manager.close()
    self.rl_cluster.close()

  def _save_if_due(self) -> None:
    if self._checkpoints.should_save(self.train_steps):
      self.save_checkpoint()

  def _stop_if_asked(self, signals: DeferredSignals) -> None:
    if signals.pending is None:
      return
    saved = self.save_checkpoint() or self._checkpoints.latest_step() is not None
    self._checkpoints.wait()
    where = "a checkpoint is saved" if saved else "no checkpoint folder was given"
    raise Stopped(signals.pending, f"stopped after step {self.train_steps}; {where}")


def _manager(reward_fns: Any, cluster: RLCluster) -> RewardManager | None:
  if isinstance(reward_fns, RewardManager):
    return reward_fns
  functions = [reward_fns] if callable(reward_fns) else list(reward_fns or ())
  if not functions and cluster.reward is None:
    raise ValueError(
      "there is neither a reward function nor a reward model: pass reward_fns, or "
      "reward= to RLCluster"
    )
  return RewardManager(functions) if functions else None


def _shares_prompts(cluster: RLCluster, config: AlgorithmConfig) -> bool:
  """Whether the prompt of a group is computed once for all its completions."""
  models = [m for m in (cluster.actor, cluster.reference) if m is not None]
  can = (
    config.num_generations > 1
    and config.exact_tile_rows is None
    and all(map(common.can_share_prompts, models))
  )
  if config.shared_prompt and not can:
    raise ValueError(
      "shared_prompt=True, but there is one completion a prompt, or the actor or the "
      "reference cannot share prompts (our text decoders can): leave it None"
    )
  return can if config.shared_prompt is None else config.shared_prompt
