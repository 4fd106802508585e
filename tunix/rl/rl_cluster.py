"""RLCluster: the models of an RL run, their devices, and the engine that samples.

Learners implement algorithms. They call the cluster to sample, to score and to update
the models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.data.images import ImageReader
from tunix.generate import tokenizer_adapter
from tunix.models import backbone
from tunix.models.images.prompt_images import PromptImages
from tunix.perf.metrics import PerfMetricsConfig
from tunix.rl import inference_worker, metrics, roles, row_arrays, utils
from tunix.rl.common import TOKEN_ARRAYS, Rows, TrainExample
from tunix.rl.config import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.inference_worker import InferenceWorker
from tunix.rl.rollout.base_rollout import RolloutOutput
from tunix.rl.rollout.client import SamplingClient
from tunix.rl.trainer import Trainer
from tunix.rl.weights import placement
from tunix.rl.weights.placement import Weights
from tunix.rl.weights.policy_version import PolicyVersion, PublishedVersions
from tunix.sft import inference
from tunix.sft.inference import Score
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.utils.setting import known_values

__all__ = ["ClusterConfig", "Mode", "RLCluster", "RLTrainingConfig", "Role"]


class RLCluster:
  """The models of a run by role.

  Args:
    actor: the policy that is trained: a module, or a model folder or hub id.
    critic: the critic for PPO: any model with one score per token.
    reference: the model that the policy is kept close to. If it is None and the actor
      has LoRA adapters, the actor without its adapters is the reference.
    reward: a reward model with one score.
    tokenizer: tokenizer of the actor.
    cluster_config: meshes, engine and batch sizes.
    images: reads the images of prompts; None: the prompts are text.
    perf_config: conversion of the trace to metrics. If it is given, or
      `training_config.perf_metrics_options` is set, the run is traced.

  Attributes:
    perf: the tracer.

  Raises:
    ValueError: the models do not match, or an optimizer is given for a missing role.
  """

  def __init__(
    self,
    *,
    actor: nnx.Module | str,
    critic: nnx.Module | str | None = None,
    reference: nnx.Module | str | None = None,
    reward: nnx.Module | str | None = None,
    tokenizer: object,
    cluster_config: ClusterConfig,
    images: ImageReader | None = None,
    perf_config: PerfMetricsConfig | None = None,
  ):
    config, train = cluster_config, cluster_config.training_config
    self.cluster_config, self.images = config, images
    self.tokenizer = tokenizer_adapter.adapted(tokenizer)
    placement.check_devices(roles.meshes(config, actor))
    self.actor = roles.placed(config, Role.ACTOR, actor)
    self.critic = roles.placed(config, Role.CRITIC, critic)
    self.reference = roles.placed(config, Role.REFERENCE, reference)
    self.reward = roles.placed(config, Role.REWARD, reward)
    utils.check_roles(self.actor, self._others(), config.eos_tokens())
    self.logger = MetricsLogger(train.metrics_logging_options)
    self.perf = metrics.make_tracer(train, perf_config)
    self.actor_trainer = Trainer(
      self.actor, train.actor_optimizer, train, "actor", self.logger, self.perf
    )
    self.critic_trainer = self._make_critic_trainer(train)
    self.rollout = roles.make_rollout(config, self.actor, self.tokenizer)
    self.rollout.reads_images = images is not None
    # Rollouts may come from weights that are `staleness` batches old.
    self._sync = PublishedVersions(history=max(8, train.staleness + 2))
    self.inference_worker = InferenceWorker(
      self._others(), self._axes, config.offload_to_cpu
    )
    self.sync_weights()

  def __repr__(self) -> str:
    names = ", ".join(["actor", *(role.value for role in self._others())])
    return f"RLCluster({names}; step {self.actor_trainer.train_steps})"

  # Construction.

  def _others(self) -> dict[Role, nnx.Module]:
    """Returns the models of all roles except the actor."""
    models = {
      Role.CRITIC: self.critic,
      Role.REFERENCE: self.reference,
      Role.REWARD: self.reward,
    }
    return {role: model for role, model in models.items() if model is not None}

  def _make_critic_trainer(self, config: RLTrainingConfig) -> Trainer | None:
    critic, optimizer = self.critic, config.critic_optimizer
    if (critic is None) != (optimizer is None):
      state = (
        "set and there is no critic" if critic is None else "None and there is one"
      )
      raise ValueError(f"critic_optimizer is {state}: give a critic and an optimizer")
    if optimizer is None:
      return None
    return Trainer(critic, optimizer, config, "critic", self.logger, self.perf)

  # Sampling, updates and scores.

  def generate(
    self,
    prompts: Sequence[Any],
    apply_chat_template: bool = False,
    mode: Mode = Mode.TRAIN,
    micro_batch_size: int | None = None,
    *,
    num_generations: int = 1,
    seed: jax.Array | int | None = None,
    images: Sequence[PromptImages | None] = (),
  ) -> RolloutOutput:
    """Samples completions of prompts.

    Args:
      prompts: strings, lists of token ids, or message lists, which the chat template of
        the tokenizer renders.
      apply_chat_template: if True, a string is rendered as one user message.
      mode: the mode whose RolloutConfig is used.
      micro_batch_size: prompts that are sampled at once; None uses the config's.
      num_generations: completions of each prompt.
      seed: seed or JAX key of this call; None uses the config's seed.
      images: those of each prompt, whose ids have their tokens; empty without images.

    Raises:
      ValueError: there are no prompts.
      UnknownWeightsError: the weights of the engine were changed and not published.
    """
    if not len(prompts):
      raise ValueError("prompts is empty: give at least one")
    config, training = self.cluster_config.rollout(mode), self._training
    texts = [
      roles.rendered(self.tokenizer, prompt, apply_chat_template) for prompt in prompts
    ]
    size = micro_batch_size or training.rollout_micro_batch_size or len(texts)
    self._check_published()
    key = config.seed if seed is None else seed
    key = jax.random.key(key) if isinstance(key, int) else key

    # Engines of users need not know the argument.
    def seen(start: int) -> dict[str, Any]:
      return {"images": images[start : start + size]} if len(images) else {}

    parts = [
      self.rollout.generate(
        texts[start : start + size],
        config,
        num_generations=num_generations,
        seed=key,
        first_prompt=start,
        **seen(start),
      )
      for start in range(0, len(texts), size)
    ]
    for part in parts:
      # An engine in another process reports the version that it sampled with.
      self._sync.check(part.version)
    return parts[0].joined(parts[1:])

  def sampling_client(
    self, mode: Mode, key: jax.Array, **sizes: int
  ) -> contextlib.AbstractContextManager[SamplingClient]:
    """Lends a client that draws the actions of episodes; see BaseRollout.

    Raises:
      UnknownWeightsError: the weights of the engine were changed and not published.
    """
    self._check_published()
    return self.rollout.sampling_client(self.cluster_config.rollout(mode), key, **sizes)

  def ids_of(self, prompt: object) -> np.ndarray:
    """Returns the ids of a prompt, int32 [T]: of a text, of ids, or of messages."""
    prompt = roles.rendered(self.tokenizer, prompt, False)
    if isinstance(prompt, str):
      prompt = self.tokenizer.tokenize(prompt, add_eos=False)
    return np.asarray(prompt, np.int32)

  def update_actor(
    self,
    train_ds: Iterable[TrainExample],
    eval_ds: None = None,
    skip_jit: bool = False,
    *,
    micro_batches: int = 1,
  ) -> int:
    """Makes one update of the actor per mini-batch; returns their number.

    Args:
      train_ds: the mini-batches.
      eval_ds: must be None; the learner evaluates.
      skip_jit: if True, the updates run without `jax.jit`.
      micro_batches: number of parts of a mini-batch whose gradients are added.
    """
    _check_no_evaluation(eval_ds)
    with self.perf.span_group("actor_train"):
      return self.actor_trainer.update(train_ds, micro_batches, skip_jit)

  def update_critic(
    self,
    train_ds: Iterable[TrainExample],
    eval_ds: None = None,
    skip_jit: bool = False,
    *,
    micro_batches: int = 1,
  ) -> int:
    """Makes one update of the critic per mini-batch; returns their number.

    The arguments are those of `update_actor`.

    Raises:
      ValueError: there is no critic.
    """
    if self.critic_trainer is None:
      raise ValueError("the cluster has no critic: pass critic= to RLCluster")
    _check_no_evaluation(eval_ds)
    try:
      with (
        self.perf.span_group("critic_train"),
        self.inference_worker.resident(Role.CRITIC),
      ):
        return self.critic_trainer.update(train_ds, micro_batches, skip_jit)
    finally:
      # Offloading replaced the arrays of the module.
      self.critic_trainer.after_move()

  def get_ref_per_token_logps(
    self,
    rows: Rows,
    *,
    shared_prompt: bool = False,
    tile_rows: int | None = None,
    micro_batch_size: int | None = None,
  ) -> np.ndarray:
    """Returns the reference's log-probabilities of completions, float32 [B, R].

    Args:
      rows: prompts and completions.
      shared_prompt: if True, the prompt of a group is computed once.
      tile_rows: rows of a fixed tile, see `AlgorithmConfig.exact_tile_rows`.
      micro_batch_size: prompts that are scored at once; None uses the config's.
    """
    score = self._logps(rows, shared_prompt, tile_rows)
    with self.perf.span("refer_inference", "reference"):
      return self._score(Role.REFERENCE, score, rows, micro_batch_size)

  def get_old_per_token_logps(
    self,
    rows: Rows,
    *,
    shared_prompt: bool = False,
    tile_rows: int | None = None,
    micro_batch_size: int | None = None,
    average: bool = False,
  ) -> np.ndarray:
    """Returns the actor's log-probabilities with its current weights, float32 [B, R].

    The arguments are those of `get_ref_per_token_logps`. `average` takes the average
    of the weights instead, see `Trainer.keep_average`.
    """
    score = self._logps(rows, shared_prompt, tile_rows)
    with self.perf.span("old_logps", "actor"):
      return self._score(Role.ACTOR, score, rows, micro_batch_size, average)

  def get_values(
    self, rows: Rows, *, micro_batch_size: int | None = None
  ) -> np.ndarray:
    """Returns the critic's value before each completion token, float32 [B, R]."""
    with self.perf.span("values", "critic"):
      score = inference_worker.values_of
      values = self._score(Role.CRITIC, score, rows, micro_batch_size)
    if self.critic_trainer is not None:
      self.critic_trainer.after_move()
    return values

  def get_rewards(
    self, rows: Rows, *, micro_batch_size: int | None = None
  ) -> np.ndarray:
    """Returns the reward model's scores, float32 [B]."""
    with self.perf.span("reward_model", "reward"):
      score = inference_worker.rewards_of
      return self._score(Role.REWARD, score, rows, micro_batch_size)

  def sync_weights(self) -> PolicyVersion:
    """Sends the actor's weights to the rollout engine, under a new version.

    If the schedule is lagged, the engine keeps its weights until `load_weights`.

    Raises:
      WeightSyncError: the engine does not hold the weights that were sent.
    """
    actor, sampled = self.actor_trainer.model, self._sampling_model()
    is_later = self._training.staleness and self._sync.current is not None
    if is_later:
      return self._sync.publish(actor, self.actor_trainer.train_steps)
    if sampled is None:
      sampled = actor
    elif sampled is not actor:
      placement.copy_weights(actor, sampled)
    # A schedule that lags publishes the actor, whatever form samples.
    published = actor if self._training.staleness else sampled
    version = self._sync.publish(published, self.actor_trainer.train_steps)
    self.rollout.update_params(sampled, version)
    return version

  def weights(self) -> Weights:
    """Returns the actor's weights of the last `sync_weights`, for `load_weights`."""
    arrays = self.rollout.weights_of(self.actor_trainer.model)
    return Weights(version=self.version, arrays=arrays)

  def load_weights(self, weights: Weights) -> None:
    """Gives the engine weights of now or earlier; called by the thread that samples."""
    self.rollout.load(weights)

  @property
  def version(self) -> PolicyVersion:
    """The version of the weights of the last `sync_weights`."""
    version = self._sync.current
    assert version is not None  # the constructor publishes one
    return version

  def close(self) -> None:
    """Writes the weights to the caller's models and closes files."""
    for trainer in (self.actor_trainer, self.critic_trainer):
      if trainer is not None:
        trainer.close()
    self.inference_worker.close()
    self.perf.synchronize()
    self.logger.close()

  def __enter__(self) -> RLCluster:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _check_published(self) -> None:
    """Checks that the engine's weights are those of a published version."""
    is_rounded = self.cluster_config.rollout(Mode.TRAIN).weights is not None
    if self._training.staleness and is_rounded:
      return  # stamped before they were rounded, when they are given to the engine
    if (model := self._sampling_model()) is not None:
      self._sync.identify(model)

  def _sampling_model(self) -> nnx.Module | None:
    """Returns the module that samples; None if the engine is in another process.

    It is the actor with its current weights, or the engine's copy of the actor.
    """
    try:
      model = self.rollout.model()
    except TypeError:  # BaseRollout.model of an engine in another process
      return None
    return self.actor_trainer.model if model is self.actor else model

  def _logps(self, rows: Rows, shared: bool, tile_rows: int | None) -> Score:
    temperature = self.cluster_config.rollout(Mode.TRAIN).temperature
    group = rows.group_size if shared else 1
    return inference_worker.logps_of(group, temperature, tile_rows)

  def _score(
    self,
    role: Role,
    score: Score,
    rows: Rows,
    micro_batch_size: int | None,
    average: bool = False,
  ) -> np.ndarray:
    """Returns `score` of all rows by the model of a role; float32 on the host."""
    size = micro_batch_size or self._training.compute_logps_micro_batch_size
    at_once = None if size is None else size * rows.group_size
    # Only the actor replays the routes of the sampler: the other models were not there.
    names = (*TOKEN_ARRAYS, *row_arrays.ROUTES) if role is Role.ACTOR else TOKEN_ARRAYS
    arrays = known_values(rows, (*names, "images"))
    if role is Role.ACTOR:
      actor = self.actor_trainer
      model = actor.averaged() if average else actor.model
    elif role is Role.REFERENCE and self.reference is None:
      model = backbone.reference_of(self.actor_trainer.model)
    else:
      return self.inference_worker.run(role, score, arrays, at_once)
    name = f"{role.value} scoring"
    return inference.run(model, score, arrays, at_once, self._axes, name)

  @property
  def _training(self) -> RLTrainingConfig:
    return self.cluster_config.training_config

  @property
  def _axes(self) -> tuple[str, ...]:
    return self._training.data_sharding_axis


def _check_no_evaluation(eval_ds: None) -> None:
  if eval_ds is not None:
    raise ValueError("eval_ds is set: pass it to RLLearner.train, which evaluates")
