"""From a configuration to the cluster and the learner of an RL run."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import optax
from jax.sharding import Mesh

from tunix.cli import algorithms, build, optimizer, rewards
from tunix.cli.schema import Config
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel
from tunix.models.transformer.model import Transformer
from tunix.rl.config import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rl_learner import RLLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.samples import Samples
from tunix.rl.utils import create_critic_model
from tunix.sft.config import Schedule
from tunix.sft.metrics_logger import Mode


def build_learner(
  config: Config,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  tx: optax.GradientTransformation,
  *,
  mesh: Mesh | None,
  output_dir: pathlib.Path,
  learning_rate: float | Schedule,
) -> RLLearner:
  """The learner of a settled configuration, put back where its checkpoints stand.

  Args:
    config: of the run.
    model: the policy.
    tokenizer: of all models.
    tx: the policy's optimizer.
    mesh: of all roles; None: one device.
    output_dir: of the run.
    learning_rate: for the metric of that name.

  Raises:
    FileNotFoundError, ImportError, ValueError: models or rewards that do not fit.
  """
  algorithm = algorithms.algorithm_config(config)
  keys = config.rl
  models: dict[str, Any] = {"reference": None}
  if algorithm.beta:
    models["reference"] = build.build_reference(config, keys.reference, mesh)
  more: dict[str, Any] = {}
  if config.job == "ppo":
    models["critic"] = _critic(config, model, mesh)
    more["critic_optimizer"] = optimizer.build_critic_optimizer(config)
  if config.reward.model is not None:
    models["reward"] = automodel.AutoModel.from_pretrained(
      config.reward.model, mesh, dtype=config.model.dtype, num_scores=1
    )
  cluster = RLCluster(
    actor=model,
    tokenizer=tokenizer,
    cluster_config=ClusterConfig(
      role_to_mesh=None if mesh is None else {Role.ACTOR: mesh},
      rollout_engine=config.rollout.engine,
      offload_to_cpu=keys.offload_to_cpu,
      training_config=RLTrainingConfig(
        actor_optimizer=tx,
        metrics_logging_options=build.logging_options(config, output_dir),
        **build.cadence(config, output_dir, learning_rate),
        **_sizes(config),
        **more,
      ),
      rollout_config=rollout_configs(config),
    ),
    **models,
  )
  learner = algorithms.learner_class(config)(
    cluster,
    algorithm,
    rewards.build_rewards(config),
    data_shuffle_seed=keys.shuffle_seed,
  )
  if config.samples.every_n_rollouts is None:
    return learner
  folder = output_dir / "samples"
  return learner.with_samples(Samples(folder, **dataclasses.asdict(config.samples)))


def rollout_configs(config: Config) -> dict[Mode, RolloutConfig]:
  """How to sample in training and in evaluation."""
  names = [field.name for field in dataclasses.fields(RolloutConfig)]
  keys = config.rollout
  given = {name: getattr(keys, name) for name in names if hasattr(keys, name)}
  given["seed"] = config.seed if keys.seed is None else keys.seed
  given["stop_strings"] = keys.stop_strings or None
  train = RolloutConfig(**given)
  if keys.eval_temperature is None:
    return {Mode.TRAIN: train}
  held_out = dataclasses.replace(train, temperature=keys.eval_temperature)
  return {Mode.TRAIN: train, Mode.EVAL: held_out}


def _sizes(config: Config) -> dict[str, Any]:
  names = (
    "mini_batch_size",
    "train_micro_batch_size",
    "rollout_micro_batch_size",
    "compute_logps_micro_batch_size",
    "bucketed_lengths",
  )
  return {name: getattr(config.rl, name) for name in names}


def _critic(config: Config, model: Transformer, mesh: Mesh | None) -> Transformer:
  path = config.rl.critic
  if path is None or path == "actor":
    return create_critic_model(model, config.seed, share=True)
  return automodel.AutoModel.from_pretrained(
    path,
    mesh,
    num_scores=1,
    dtype=config.model.dtype,
    param_dtype=config.model.param_dtype,
  )
