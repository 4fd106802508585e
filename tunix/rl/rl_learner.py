"""RLLearner: from prompts to a better policy. The page to read first.

    while prompts are left:
      example = self._generate_and_compute_advantage(batch)  <- what an algorithm writes
      cluster.update_critic(mini-batches); cluster.update_actor(mini-batches)
      cluster.sync_weights()

When it evaluates and saves is decided in sft/run.py, as for every trainer. All that a
resumed run needs is one RunState (learner_state.py), saved between two rollouts. Random
numbers need no state: they follow from the seed, the number of the rollout and the row.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.rl import evaluation, learner_state, metrics, policy_loss, setup
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.common import Rollouts, Tokens, TrainExample
from tunix.rl.experience import Experience, MetricFn
from tunix.rl.learner_state import LearnerProgress
from tunix.rl.pipeline import PromptBatch, PromptSource, mini_batches, prompt_batch
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.samples import Samples
from tunix.sft.base_trainer import BaseTrainer
from tunix.sft.interrupts import DeferredSignals
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.run import Places, Run, TrainResult
from tunix.sft.run_state import RunState

_log = logging.getLogger(__name__)


class RLLearner(BaseTrainer):
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

  uses_critic: ClassVar[bool] = False
  _main_metric = ("rewards/score/mean", True)

  def __init__(
    self,
    rl_cluster: RLCluster,
    algo_config: AlgorithmConfig,
    reward_fns: Any = None,
    metric_fns: MetricFn | Sequence[MetricFn] | None = None,
    data_shuffle_seed: int | None = None,
  ):
    setup.check(rl_cluster, algo_config, uses_critic=self.uses_critic)
    self.rl_cluster, self.algo_config = rl_cluster, algo_config
    self._config = rl_cluster.cluster_config.training_config
    self._experience = Experience(rl_cluster, algo_config, reward_fns, metric_fns)
    self._phases, self._measured = self._experience.phases, self._experience.measured
    self._samples: Samples | None = None
    self._progress = LearnerProgress()
    self._shuffle_seed = data_shuffle_seed
    rl_cluster.actor_trainer.with_role_loss(self._compute_policy_loss)
    self._identity = learner_state.identity(rl_cluster)
    self._torn = False  # whether an update is under way, or broke off
    self._run = Run(self, self._config, rl_cluster.perf)
    self.restore_checkpoint()

  def with_samples(self, samples: Samples) -> Self:
    """Shows some of the rollouts as files to look at; returns the learner."""
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

  def _collect(self, source: PromptSource) -> TrainExample | None:
    """The rollouts of one step; None at the end of the prompts."""
    batch = source.take()
    return None if batch is None else self._generate_and_compute_advantage(batch)

  def _shape_rewards(
    self, tokens: Tokens, totals: np.ndarray, max_tokens: int
  ) -> np.ndarray:
    """Rewards [B] as they are learnt from; metrics show those before it."""
    del tokens, max_tokens
    return totals

  # What it is made of.

  def _rollouts(self, batch: PromptBatch, mode: Mode = Mode.TRAIN) -> Rollouts:
    """Samples and rewards the completions of every prompt."""
    number = self._progress.rollouts
    return self._experience.rollouts(batch, mode, number, self._shape_rewards)

  def _kl_penalty(self, tokens: Tokens) -> tuple[np.ndarray | None, np.ndarray | None]:
    """See Experience."""
    return self._experience.kl_penalty(tokens)

  def _example(
    self,
    rollouts: Rollouts,
    advantages: np.ndarray,
    old: np.ndarray | None = None,
    **more: Any,
  ) -> TrainExample:
    """The example of rollouts and advantages [B] or [B, R]; see Experience."""
    if self._samples is not None and jax.process_index() == 0:
      number = self._progress.rollouts
      step = self.train_steps
      shown = self._samples.add(rollouts, advantages, number=number, step=step)
      self.metrics_logger.log_samples(shown, step)
    rows = len(rollouts.tokens.completion_mask)
    # Several passes, or several mini-batches: the last is learnt by another policy.
    moves = self.algo_config.num_iterations > 1 or self._mini_rows(rows) < rows
    return self._experience.example(
      rollouts, advantages, old, policy_moves=moves, **more
    )

  # The loop.

  def train(
    self,
    train_ds: Iterable[Mapping[str, Any]],
    eval_ds: Iterable[Mapping[str, Any]] | None = None,
    skip_jit: bool = False,
  ) -> TrainResult:
    """Trains until prompts, `max_steps` or patience end; goes on from a checkpoint.

    A further call starts the prompts anew. A script that calls it several times resumes
    in the call that was under way: those before it return at once.

    Args:
      train_ds: yields batches {"prompts": [...], column: [...], ...}. A last batch that
        is smaller is filled up with rows that weigh nothing.
      eval_ds: batches as well, iterated anew for every evaluation.
      skip_jit: run the updates without `jax.jit`, to debug a loss.

    Returns: updates of the actor, what ended them, and the best evaluation where it is
      asked for.

    Raises:
      Stopped: SIGINT or SIGTERM arrived; a checkpoint was saved.
      ValueError: no prompts, or one that is too long.
      RuntimeError: an update broke off before, and the models are between two states.
    """
    if self._torn:
      raise RuntimeError(
        "an update broke off half-way, and nothing was saved since: make the learner "
        "and its cluster anew, from the models; it resumes from the last checkpoint"
      )
    return self._run.train(train_ds, eval_ds, skip_jit)

  def lower_step(self, batch: Mapping[str, Any]) -> None:
    """Goes through what `train` does on a batch of prompts, with models of shapes and
    inside `programs.recording`, which has its programs afterwards."""
    example = self._generate_and_compute_advantage(prompt_batch(batch))
    minis = self._mini_batches(example)
    parts = self._micro_batches(minis[0].rows)
    for role, trainer in learner_state.trainers(self.rl_cluster).items():
      for mini in minis:
        trainer.lower_update(mini, parts, f"{role} update")
    self.rl_cluster.sync_weights()

  # The implementation of `run.Work`; `Run` decides when each method is called.

  @property
  def _position(self) -> LearnerProgress:
    return self._progress

  def _session(self) -> DeferredSignals:
    return DeferredSignals()

  def _open(self, train_ds: Any, previous: PromptSource | None) -> PromptSource:
    if previous is not None and previous.continues(train_ds):
      previous.go_back()
      return previous
    return PromptSource(train_ds, self._progress.data_state, self._progress.pending)

  def _begin(self) -> None:
    """Forgets what a call that broke off had measured."""
    self._measured.clear()
    self._phases.take()

  def _end(self) -> None:
    self.rl_cluster.logger.flush()
    self.rl_cluster.perf.synchronize()

  def _draw(self, source: PromptSource) -> PromptSource | None:
    return source if source.has_more() else None

  def _learn(self, source: PromptSource, skip_jit: bool) -> None:
    """Rollouts of the next prompts, and all updates by them."""
    with self.rl_cluster.perf.span_group("global_step"):
      with self._run.saved_on_failure():  # what was learnt before
        example = self._collect(source)
      if example is None:
        source.end()
        return
      self._update(example, skip_jit)
    self._log_rollouts()
    self._progress.rollouts += 1
    self._progress.data_state = source.commit()
    self._progress.pending = source.pending
    self._torn = False

  def _update(self, example: TrainExample, skip_jit: bool) -> None:
    """All updates by one batch of rollouts, then new weights for the engine."""
    cluster, minis = self.rl_cluster, self._mini_batches(example)
    parts = self._micro_batches(minis[0].rows)
    self._torn = True  # until the progress says that this batch is learnt
    with self._phases("update"):
      if cluster.critic_trainer is not None:
        cluster.update_critic(minis, skip_jit=skip_jit, micro_batches=parts)
      cluster.update_actor(minis, skip_jit=skip_jit, micro_batches=parts)
      for trainer in learner_state.trainers(cluster).values():
        trainer.flush()
    with self._phases("sync", "rollout"):
      cluster.sync_weights()

  def _log_rollouts(self) -> None:
    """What was measured of the rollouts and phases of a step."""
    means = metrics.mean_of(self._measured)
    perf = self.rl_cluster.perf
    # Waits for no device: the updates are over. The thread that notes it may be late.
    perf.synchronize()
    self._log({**means, **self._phases.take(), **perf.export()}, Mode.TRAIN)
    self._measured.clear()

  def _mini_batches(self, example: TrainExample) -> list[TrainExample]:
    """Mini-batches of all iterations, as many as `max_steps` leaves."""
    config, limit = self.algo_config, self._config.max_steps
    minis = list(
      mini_batches(
        dataclasses.replace(
          example,
          group_size=config.num_generations if self._experience.shared_prompts else 1,
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

  # Evaluation, checkpoints, metrics.

  def _evaluate(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float] | None:
    del skip_jit, signals  # it samples, and is asked to stop after it
    if eval_ds is None:
      return None
    with self.rl_cluster.perf.span_group("evaluation"):
      values = self.evaluate(eval_ds)
    self._log({**values, **self._phases.take()}, Mode.EVAL)
    return values

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

  def _run_state(self, places: Places) -> RunState | None:
    if self._torn:
      step = self.train_steps
      _log.warning("step %d was not reached whole: nothing is saved of it", step)
      return None
    if not self.train_steps:
      return None
    progress = dataclasses.replace(self._progress, data_state=places[0])
    return learner_state.of_run(self.rl_cluster, progress, self._identity)

  def _state_form(self) -> RunState:
    return learner_state.form(self.rl_cluster)

  def _load(self, saved: tuple[int, RunState] | None) -> None:
    if saved is None:
      self.rl_cluster.logger.restore(None)
      return
    self._progress = learner_state.load(self.rl_cluster, *saved, self._identity)

  def close(self) -> None:
    """Saves what is not saved, ends the reward workers, closes files.

    Raises:
      OSError: the last checkpoint could not be written; all else is closed.
    """
    with contextlib.ExitStack() as stack:
      stack.callback(self.rl_cluster.close)
      stack.callback(self._experience.close)
      self._run.close()
