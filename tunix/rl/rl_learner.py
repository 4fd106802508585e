"""RLLearner: the training loop of reinforcement learning. Read this module first.

    while there are prompts:
      example = self._generate_and_compute_advantage(batch)  <- written by an algorithm
      cluster.update_critic(mini-batches); cluster.update_actor(mini-batches)
      cluster.sync_weights()

sft/loop/run.py decides when a run evaluates and saves, as for every trainer. A resumed
run needs one RunState (learner_state.py), which is saved between two rollouts. Rollouts
may be sampled ahead of the updates (schedules), which changes none of this. Random
numbers need no state: they are computed from the seed, the number of the rollout and
the row.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.rl import learner_state, metrics, policy_loss, setup
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.common import Rollouts, TrainExample
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.experience import evaluation, step_sizes
from tunix.rl.experience.episodes import Episodes
from tunix.rl.experience.experience import Experience, MetricFn
from tunix.rl.experience.samples import Samples
from tunix.rl.learner_state import LearnerProgress
from tunix.rl.pipeline import PromptBatch, PromptSource, prompt_batch
from tunix.rl.prompts import images
from tunix.rl.prompts.curriculum import Curriculum
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.schedules import choose as schedules
from tunix.sft.loop.base_trainer import BaseTrainer
from tunix.sft.loop.interrupts import DeferredSignals
from tunix.sft.loop.run import Places, Run, TrainResult
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.steps.run_state import RunState
from tunix.sft.steps.shared_steps import Call

_log = logging.getLogger(__name__)


class RLLearner(BaseTrainer):
  """Trains the actor of a cluster on rollouts.

  Subclasses implement `_generate_and_compute_advantage`. They may override
  `_compute_policy_loss`, `_shape_rewards` and `_collect`.

  Args:
    rl_cluster: the models.
    algo_config: settings of the algorithm.
    reward_fns: one or several `fn(prompts, completions, **columns) -> list[float]`, or
      a RewardManager. None uses only the cluster's reward model.
    metric_fns: one or several `fn(prompts, completions, rewards, **columns)` that
      return scalars by name, logged with every batch of rollouts. `rewards` is float64
      [B], NaN where a reward failed.
    data_shuffle_seed: seed that shuffles the groups of rollouts before they are cut
      into mini-batches, in every iteration. None keeps the order of the prompts.
    env: `env(prompt, **columns)` makes the environment of a completion, or an EnvGroup
      with those of all completions of a prompt (see rl/env/env.py); it gets the
      arguments that its signature names. None: a completion is one answer.
    episodes: limits of episodes with environments.

  Raises:
    ValueError: the settings or the newest checkpoint do not match the cluster.
  """

  uses_critic: ClassVar[bool] = False
  reads_hints: ClassVar[bool] = False  # a teacher reads the prompts with a hint
  _main_metric = ("rewards/score/mean", True)
  _cause_of_no_gradient = (
    "probably all completions of a prompt have equal rewards; look at "
    "groups/all_equal, at the reward functions and at the samples"
  )

  def __init__(
    self,
    rl_cluster: RLCluster,
    algo_config: AlgorithmConfig,
    reward_fns: object = None,
    metric_fns: MetricFn | Sequence[MetricFn] | None = None,
    data_shuffle_seed: int | None = None,
    env: Any = None,
    episodes: EpisodeConfig | None = None,
  ):
    setup.check(rl_cluster, algo_config, uses_critic=self.uses_critic)
    room = None if env is None else (episodes or EpisodeConfig()).max_image_tokens
    if rl_cluster.images is not None:
      images.check_image_support(
        rl_cluster, env_room=room, reads_hints=self.reads_hints
      )
    elif room:
      raise ValueError(
        f"max_image_tokens is {room} and RLCluster(images=) is None; expected an "
        "ImageReader. Pass RLCluster(images=ImageReader(...)), or by command a model "
        "with a vision tower"
      )
    self._config = rl_cluster.cluster_config.training_config
    self.rl_cluster = rl_cluster
    sampling = rl_cluster.cluster_config.rollout(Mode.TRAIN)
    staleness = self._config.staleness
    self.algo_config = setup.corrected(sampling, algo_config, staleness)
    if env is None and episodes is not None:
      raise ValueError("episodes has limits and env is None: give env as well")
    if env is None and algo_config.observation_weight:
      raise ValueError(
        f"observation_weight is {algo_config.observation_weight} and env is None, so "
        "no environment writes observations: give env, or set observation_weight to 0"
      )
    bucketed = setup.buckets_lengths(rl_cluster, algo_config)
    source = None
    if env is not None:
      source = Episodes(rl_cluster, env, episodes, bucketed=bucketed)
    self._experience = Experience(
      rl_cluster, algo_config, reward_fns, metric_fns, source
    )
    self._phases, self._measured = self._experience.phases, self._experience.measured
    self._schedule = schedules.make(
      rl_cluster, algo_config, self._experience, self._shape_rewards
    )
    self._samples: Samples | None = None
    self._progress = LearnerProgress()
    self._curriculum = Curriculum.of(algo_config.curriculum, algo_config.pass_threshold)
    self._shuffle_seed = data_shuffle_seed
    rl_cluster.actor_trainer.with_role_loss(self._role_loss())
    self._identity = learner_state.identity(rl_cluster)
    self._is_mid_update = False  # True during an update, and after one that failed
    self._run = Run(self, self._config, rl_cluster.perf)
    self.restore_checkpoint()

  def with_samples(self, samples: Samples) -> Self:
    """Writes some of the rollouts to files; returns the learner."""
    self._samples = samples
    return self

  @property
  def metrics_logger(self) -> MetricsLogger:
    """The logger that receives the metrics of all roles."""
    return self.rl_cluster.logger

  @property
  def train_steps(self) -> int:
    """Updates of the actor."""
    return self.rl_cluster.actor_trainer.train_steps

  @property
  def _no_doubts(self) -> Collection[str]:
    return () if self.algo_config.wastes_equal_groups else ("groups/all_equal",)

  # The extension points of an algorithm.

  @abc.abstractmethod
  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    """Samples a batch of prompts and returns what the update needs.

    An implementation calls `_rollouts`, computes advantages and calls `_example`.
    """

  def _compute_policy_loss(
    self, model: nnx.Module, example: TrainExample
  ) -> tuple[WeightedSum, policy_loss.Aux]:
    """Computes the loss of one micro-batch and metrics, means over tokens; traced."""
    return self._configured_loss()(model, example)

  def _collect(self, source: PromptSource) -> TrainExample | None:
    """Returns the example of one step; None at the end of the prompts."""
    batch = self._schedule.next(source, self._progress.rollouts)
    return None if batch is None else self._generate_and_compute_advantage(batch)

  def _shape_rewards(self, rollouts: Rollouts, max_tokens: int) -> np.ndarray:
    """Returns the scores [P, G] to learn from; metrics show the rewards before it."""
    del max_tokens
    return rollouts.scores

  # Helpers of the extension points.

  def _role_loss(self) -> Callable[..., Any]:
    """Returns `_compute_policy_loss`, or a value that computes the same."""
    own = type(self)._compute_policy_loss is not RLLearner._compute_policy_loss
    return self._compute_policy_loss if own else self._configured_loss()

  def _configured_loss(self) -> Call:
    """Returns the loss that the configuration describes."""
    sampling = self.rl_cluster.cluster_config.rollout(Mode.TRAIN)
    return Call.of(
      policy_loss.policy_loss,
      config=self.algo_config,
      temperature=sampling.temperature,
      max_tokens=self._experience.max_tokens(sampling),
    )

  def _rollouts(self, batch: PromptBatch, mode: Mode = Mode.TRAIN) -> Rollouts:
    """Returns the completions of every prompt with their rewards; see schedules."""
    out = self._schedule.rollouts(batch, mode, self._progress.rollouts)
    if self._curriculum is not None and mode is Mode.TRAIN:
      self._curriculum.note(out.batch.rows(), out.totals)
    return out

  def _example(
    self,
    rollouts: Rollouts,
    advantages: np.ndarray,
    old: np.ndarray | None = None,
    **fields: object,
  ) -> TrainExample:
    """Makes the example of rollouts and advantages [B] or [B, R]; see Experience."""
    if self._samples is not None and jax.process_index() == 0:
      number = self._progress.rollouts
      step = self.train_steps
      shown = self._samples.add(rollouts, advantages, number=number, step=step)
      self.metrics_logger.log_samples(shown, step)
    rows = len(rollouts.completion_mask)
    # With several iterations or mini-batches, later updates start from another policy
    # than the one that sampled. Their ratio then needs the log-probabilities of the
    # policy before the first update.
    mini_rows = self._mini_rows(rows, rollouts.episode_rows)
    moves = self.algo_config.num_iterations > 1 or mini_rows < rows
    return self._experience.example(
      rollouts, advantages, old, policy_moves=moves, **fields
    )

  # The loop.

  def train(
    self,
    train_ds: Iterable[Mapping[str, Any]],
    eval_ds: Iterable[Mapping[str, Any]] | None = None,
    skip_jit: bool = False,
  ) -> TrainResult:
    """Trains from the newest checkpoint until the prompts or `max_steps` end.

    Training also ends early if `TrainingConfig.best` has a `patience` and this number
    of consecutive evaluations bring no improvement.

    Calling `train` again restarts the prompts; the step count continues. If a script
    calls it several times and is resumed, the calls that were complete return at once
    and the interrupted call continues.

    Args:
      train_ds: yields batches {"prompts": [...], column: [...], ...}. A smaller last
        batch is padded with rows of weight 0.
      eval_ds: batches of held-out prompts, iterated from the start in every evaluation.
      skip_jit: if True, updates run without `jax.jit`, to debug a loss.

    Returns:
      The number of updates of the actor, the reason why training ended, and the best
      evaluation if `TrainingConfig.best` is set.

    Raises:
      Stopped: SIGINT or SIGTERM arrived; a checkpoint was saved.
      ValueError: there are no prompts, or a prompt is too long.
      RuntimeError: a trained weight is not finite; or an earlier update failed, and the
        models are between two states.
    """
    if self._is_mid_update:
      raise RuntimeError(
        "an update failed half-way, and nothing was saved since then: build the "
        "models, the cluster and the learner again; the run resumes from the last "
        "checkpoint"
      )
    return self._run.train(train_ds, eval_ds, skip_jit)

  def lower_step(self, batch: Mapping[str, Any]) -> None:
    """Lowers the programs that `train` runs on a batch of prompts; runs none of them.

    The models hold shapes instead of arrays, and the schedule is sync. The caller
    collects the programs with `programs.recording`.
    """
    example = self._generate_and_compute_advantage(prompt_batch(batch))
    minis = self._mini_batches(example)
    parts = step_sizes.parts(minis[0], self._config, self.algo_config)
    for role, trainer in learner_state.trainers(self.rl_cluster).items():
      for mini in minis:
        trainer.lower_update(mini, parts, f"{role} update")
    self.rl_cluster.sync_weights()

  # The implementation of `run.Work`; `Run` decides when each method is called.

  @property
  def _position(self) -> LearnerProgress:
    return self._progress

  @property
  def _had_no_gradient(self) -> bool:
    return self.rl_cluster.actor_trainer.had_no_gradient

  def _session(self) -> DeferredSignals:
    return DeferredSignals()

  def _open(self, train_ds: Any, previous: PromptSource | None) -> PromptSource:
    if previous is not None and previous.continues(train_ds):
      previous.go_back()
      return previous
    progress = self._progress
    return PromptSource(
      train_ds,
      progress.data_state,
      progress.pending,
      self._curriculum,
      progress.batch_prompts,
    )

  def _begin(self) -> None:
    """Clears the metrics of a call that was interrupted."""
    self._measured.clear()
    self._phases.take()
    self._schedule.begin()
    if self._curriculum is not None:
      self._curriculum.forget()

  def _end(self) -> None:
    self._schedule.end()
    for trainer in learner_state.trainers(self.rl_cluster).values():
      trainer.check_weights()
    self.rl_cluster.logger.flush()
    self.rl_cluster.perf.synchronize()

  def _draw(self, source: PromptSource) -> PromptSource | None:
    return source if self._schedule.has_more(source) else None

  def _learn(self, source: PromptSource, skip_jit: bool) -> None:
    """Samples the next prompts and makes all updates on the rollouts."""
    with self.rl_cluster.perf.span_group("global_step"):
      self.rl_cluster.actor_trainer.phase("sampling")
      with self._run.saved_on_failure():  # saves the updates before this step
        example = self._collect(source)
      if example is None:
        source.end()
        return
      self._update(example, skip_jit)
    # Only now the batch counts as trained: an interrupted step is sampled again.
    self._log_rollouts()
    if self._curriculum is not None:
      self._log(self._curriculum.commit(source.skipped), Mode.TRAIN)
      self._progress.batch_prompts = source.size
    self._schedule.commit()
    self._progress.rollouts += 1
    self._progress.data_state = source.commit()
    self._progress.pending = source.pending
    self._is_mid_update = False

  def _update(self, example: TrainExample, skip_jit: bool) -> None:
    """Makes all updates on one batch of rollouts, then sends weights to the engine."""
    cluster, minis = self.rl_cluster, self._mini_batches(example)
    parts = step_sizes.parts(minis[0], self._config, self.algo_config)
    self._is_mid_update = True  # until `_learn` has counted this batch
    means = metrics.mean_of(self._measured)
    for trainer in learner_state.trainers(cluster).values():
      trainer.show(means)
    with self._phases("update"):
      if cluster.critic_trainer is not None:
        cluster.update_critic(minis, skip_jit=skip_jit, micro_batches=parts)
      cluster.update_actor(minis, skip_jit=skip_jit, micro_batches=parts)
      for trainer in learner_state.trainers(cluster).values():
        trainer.flush()
    with self._phases("sync", "rollout"):
      cluster.sync_weights()

  def _log_rollouts(self) -> None:
    """Logs the metrics of the rollouts and the seconds of the phases of a step."""
    means = metrics.mean_of(self._measured)
    perf = self.rl_cluster.perf
    # The updates are complete, so this call waits only for the tracer's thread, not for
    # a device.
    perf.synchronize()
    times = self._phases.take() | self._experience.costs()
    self._log({**means, **times, **perf.export()}, Mode.TRAIN)
    self._measured.clear()

  def _mini_batches(self, example: TrainExample) -> list[TrainExample]:
    """Cuts the mini-batches of all iterations; no more than `max_steps` allows."""
    seed, limit = self._shuffle_seed, self._config.max_steps
    minis = step_sizes.minis(
      example,
      self.algo_config,
      rows=self._mini_rows(example.rows, example.episode_rows),
      shuffle=None if seed is None else (seed, self._progress.rollouts),
    )
    return minis if limit is None else minis[: limit - self.train_steps]

  def _mini_rows(self, rows: int, each: int) -> int:
    """Returns the number of rows of a mini-batch; see `step_sizes.mini_rows`."""
    self._progress.batch_rows = max(self._progress.batch_rows, rows // each)
    group, largest = self.algo_config.num_generations, self._progress.batch_rows
    return step_sizes.mini_rows(self._config, group, largest) * each

  # Evaluation, checkpoints, metrics.

  def _evaluate(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float] | None:
    del skip_jit, signals  # nothing is compiled here; a signal stops the run afterwards
    if eval_ds is None:
      return None
    with self.rl_cluster.perf.span_group("evaluation"):
      values = self.evaluate(self.rl_cluster.actor_trainer.counted(eval_ds))
    times = self._phases.take() | self._experience.costs()
    self._log({**values, **times}, Mode.EVAL)
    return values

  def evaluate(self, eval_ds: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns rewards and pass@k on held-out prompts, sampled as in Mode.EVAL."""
    rollouts = [
      self._rollouts(prompt_batch(batch, number), Mode.EVAL)
      for number, batch in enumerate(eval_ds)
    ]
    return evaluation.summary(rollouts, self.algo_config.pass_threshold)

  def _log(self, values: Mapping[str, float], mode: Mode) -> None:
    logger, prefix = self.rl_cluster.logger, self._config.metrics_prefix
    for name, value in values.items():
      logger.log(prefix, name, value, mode, self.train_steps)

  def _run_state(self, places: Places) -> RunState | None:
    if not (step := self.train_steps):
      return None
    if self._is_mid_update or (ahead := self._schedule.to_json()) is None:
      _log.warning("step %d is not saved: it or a batch after it is incomplete", step)
      return None
    trainers = learner_state.trainers(self.rl_cluster)
    if not all(trainer.is_finite for trainer in trainers.values()):
      _log.warning("step %d is not saved: a weight is not finite", step)
      return None
    progress = dataclasses.replace(self._progress, data_state=places[0])
    if self._curriculum is not None:
      progress.solve_rates = self._curriculum.rates
    return learner_state.of_run(self.rl_cluster, progress, self._identity, ahead)

  def _state_form(self) -> RunState:
    return learner_state.form(self.rl_cluster)

  def _load(self, saved: tuple[int, RunState] | None) -> None:
    if saved is None:
      self.rl_cluster.logger.restore(None)
      return
    self._progress = learner_state.load(self.rl_cluster, *saved, self._identity)
    if self._curriculum is not None:
      self._curriculum.rates = self._progress.solve_rates
    self._schedule.load((saved[1].progress or {}).get("ahead", []))

  def close(self) -> None:
    """Saves unsaved updates, ends the sampling and the reward workers, closes files.

    Raises:
      OSError: the last checkpoint could not be written; everything else is closed.
    """
    with contextlib.ExitStack() as stack:
      stack.callback(self.rl_cluster.close)
      stack.callback(self._experience.close)
      stack.callback(self._schedule.close)
      self._run.close()
