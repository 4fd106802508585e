"""The jobs grpo (with its variants) and ppo: reinforcement learning from rewards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tunix.cli.jobs.job import Job, Loaded, length_of
from tunix.cli.jobs.rl_settings import GRPORun, PPORun, RLRun
from tunix.cli.make import optimizer, rewards, training
from tunix.cli.make.environments import make_env
from tunix.cli.settings import keys
from tunix.cli.settings.convert import Choice
from tunix.data.records import PROMPTS
from tunix.generate.drawing import filters
from tunix.generate.sizes import batching, capacity
from tunix.models.transformer.model import Transformer
from tunix.rl import algorithms, setup
from tunix.rl.config import (
  ClusterConfig,
  PromptSizes,
  RLTrainingConfig,
  Role,
  ScheduleSettings,
)
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rl_learner import RLLearner
from tunix.rl.roles import PER_PROCESS, REMOTE
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.utils import create_critic_model
from tunix.sft.metrics_logger import Mode
from tunix.utils import terminal
from tunix.utils.setting import shared_values

# Metric of the mean reward.
REWARD = "rewards/score/mean"


def build_learner(run: Loaded) -> RLLearner:
  """Builds the learner of a run and restores its checkpoint.

  Raises:
    FileNotFoundError, ImportError, ValueError: models or rewards that do not fit; or a
      plan of an engine in each process or on other hosts.
  """
  config: RLRun = run.config
  if run.of_shapes and config.rollout.engine == REMOTE:
    raise ValueError(
      f"rollout.engine is {REMOTE}, and `tunix plan` plans devices of one program: add "
      "--rollout.engine=vanilla --rl.rollout_hosts=[] --rl.rollout_mesh='{tp: N}' to "
      "plan both sides, the last N devices as a host's"
    )
  if run.of_shapes and config.rollout.engine == PER_PROCESS:
    raise ValueError(
      f"rollout.engine is {PER_PROCESS}, whose copies of the weights `tunix plan` does "
      "not plan: add --rollout.engine=vanilla to plan the rest, and add two copies of "
      "the policy for each process"
    )
  algorithm, roles = config.algorithm, config.rl
  if run.of_shapes and getattr(algorithm, "feedback", None) is not None:
    # A plan's prompts have no columns.
    algorithm = dataclasses.replace(algorithm, feedback=None)
  models: dict[str, Any] = {"reference": None}
  if algorithm.beta:
    models["reference"] = run.models.reference(roles.reference)
  more: dict[str, Any] = {}
  if isinstance(config, PPORun):
    models["critic"] = _critic(run)
    more["critic_optimizer"] = optimizer.build_critic_optimizer(
      config, config.rl.critic_learning_rate
    )
  if config.reward.model is not None:
    models["reward"] = _scorer(run, config.reward.model, dtype=config.model.dtype)
  cluster = RLCluster(
    actor=run.model,
    tokenizer=run.tokenizer,
    images=run.images,
    cluster_config=ClusterConfig(
      role_to_mesh=_meshes(run),
      rollout_engine=config.rollout.engine,
      # Shapes cannot be moved: a plan counts offloaded models by itself.
      offload_to_cpu=roles.offload_to_cpu and not run.of_shapes,
      training_config=RLTrainingConfig(
        actor_optimizer=run.optimizer,
        **run.training_options()
        | {"metrics_logging_options": training.logging_options(config, run.output_dir)},
        **shared_values(PromptSizes, roles),
        # A plan has shapes only, which no thread samples from.
        **({} if run.of_shapes else shared_values(ScheduleSettings, roles)),
        **more,
      ),
      rollout_config=rollout_configs(config, plans=run.of_shapes),
    ),
    **models,
  )
  learner = algorithms.learner_of(algorithm)(
    cluster,
    algorithm,
    _no_rewards
    if run.of_shapes
    else rewards.build_rewards(config.reward, run.output_dir),
    data_shuffle_seed=roles.shuffle_seed,
    **_episodes(run),
  )
  if run.output_dir is None:
    return learner
  samples = config.samples.samples(run.output_dir / "samples")
  return learner if samples is None else learner.with_samples(samples)


def _meshes(run: Loaded) -> dict[Role, Mesh] | None:
  """Returns the mesh of the actor, and that of the rollouts if it is another one.

  Raises:
    ValueError: rollouts have devices of their own, and no mesh has the others.
  """
  meshes = {Role.ACTOR: run.mesh, Role.ROLLOUT: run.rollout_mesh}
  if run.mesh is None and run.rollout_mesh is not None:
    raise ValueError(
      f"rl.rollout_mesh is {run.config.rollout_axes} and mesh is not set; expected the "
      "axes of the devices that train. Set mesh to {fsdp: -1}"
    )
  return {role: mesh for role, mesh in meshes.items() if mesh is not None} or None


def _episodes(run: Loaded) -> dict[str, Any]:
  """Returns the options of a learner for episodes."""
  config: RLRun = run.config
  # A plan runs no environment: `rollout_configs` gives its rows the widths of episodes.
  if config.env is None or run.of_shapes:
    return {}
  return {"env": make_env(config.env), "episodes": config.episode}


def _no_rewards(prompts: list[Any], completions: list[str], **columns: object):
  """Returns 0 for each completion of a plan, which samples none."""
  del prompts, columns
  return [0.0] * len(completions)


def rollout_configs(config: RLRun, *, plans: bool = False) -> dict[Mode, RolloutConfig]:
  """Returns the sampling options of training, and of evaluation if they differ.

  Args:
    config: settings of the run.
    plans: True for a plan, in which an episode is one long completion.
  """
  section = config.rollout
  options = shared_values(RolloutConfig, section)
  if plans and getattr(config, "env", None) is not None:
    options["max_tokens_to_generate"] = _episode_tokens(config)
  options["seed"] = config.seed if section.seed is None else section.seed
  if config.rl.rollout_hosts:
    urls = {"urls": config.rl.rollout_hosts}
    options["engine_options"] = {**section.engine_options, **urls}
  train = RolloutConfig(**options)
  if section.eval_temperature is None:
    return {Mode.TRAIN: train}
  # The filters belong to sampling in training; greedy decoding refuses them.
  names = () if section.eval_temperature else filters.OFF
  held_out = dataclasses.replace(
    train,
    temperature=section.eval_temperature,
    replay_routes=False,
    center_scores=0,
    **dict.fromkeys(names),
  )
  return {Mode.TRAIN: train, Mode.EVAL: held_out}


def _critic(run: Loaded) -> Transformer:
  config: PPORun = run.config
  path = config.rl.critic
  if path is None or path == "actor":
    return create_critic_model(run.model, config.seed, share=True)
  options = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
  return _scorer(run, path, images=config.model.images, **options)


def _scorer(run: Loaded, path: str, **options: Any) -> Any:
  """Loads a critic or reward model: one score for each position."""
  return run.models.load(path, num_scores=1, **options)


def _batch(config: RLRun) -> str:
  kind = keys.section_of(keys.of(type(config))["algorithm"].hint)
  assert isinstance(kind, Choice)
  name, prompts = kind.name_of(config.algorithm), config.training.global_batch_size
  names = config.reward.entries + (("reward model",) if config.reward.model else ())
  size, tokens = config.algorithm.num_generations, config.rollout.max_tokens_to_generate
  if config.env is not None:
    names = (*names, config.env)
    turns = terminal.counted(config.episode.max_turns, "turn")
    what = f"{terminal.counted(size, 'episode')} of at most {turns} and "
    tokens = _episode_tokens(config)
  else:
    what = f"{terminal.counted(size, 'completion')} of at most "
  return (
    f"{name}: {terminal.counted(prompts, 'prompt')} x {what}"
    f"{terminal.counted(tokens, 'token')}, rewarded by {', '.join(names)}"
  )


_ANSWERS = length_of("rollout", "max_prompt_length", "max_tokens_to_generate")


def _length(config: RLRun) -> tuple[str, int]:
  """Returns the keys that limit a row, and the number of its tokens."""
  if config.env is None:
    return _ANSWERS(config)
  most = _episode_tokens(config)
  is_all = most == config.episode.max_tokens
  name = "episode.max_tokens" if is_all else "rollout.max_tokens_to_generate"
  keys_of = f"rollout.max_prompt_length + {name}"
  return keys_of, config.rollout.max_prompt_length + most


def _episode_tokens(config: RLRun) -> int:
  return config.episode.new_tokens(config.rollout.max_tokens_to_generate)


def check(config: RLRun) -> None:
  """Refuses a correction of filtered rollouts, and batches that memory cannot hold.

  The settings themselves may have both, because older versions began such runs.

  Raises:
    ValueError: gives the number of completions of a prompt that fit; or there are
      filters and a correction.
  """
  settings = config.rollout, config.algorithm, config.rl.staleness
  setup.check_support(*settings)
  setup.check_centering(*settings)
  _, length = _length(config)
  row = length * 12  # bytes of a row's ids, mask and log-probabilities, 4 each
  prompts, size = config.training.global_batch_size, config.algorithm.num_generations
  what = f"the tokens of {prompts} prompts' completions"
  capacity.require("algorithm.num_generations", size, lambda n: prompts * n * row, what)


def _example(config: RLRun) -> dict[str, Any]:
  """Returns a global batch of prompts of the largest length."""
  return _prompts(config, config.rollout.max_prompt_length)


def _shorter(config: RLRun) -> list[dict[str, Any]]:
  sizes = config.rollout.max_prompt_length, config.rollout.max_tokens_to_generate
  return [_prompts(config, length) for length in batching.shorter_prompts(*sizes)]


def _prompts(config: RLRun, length: int) -> dict[str, Any]:
  return {"prompts": [np.zeros(length, np.int32)] * config.training.global_batch_size}


def _sequences(config: RLRun) -> int:
  return config.training.global_batch_size * config.algorithm.num_generations


_FIRST = {
  "reward.functions": ["exact_match"],
  "rollout.max_prompt_length": 256,
  "rollout.max_tokens_to_generate": 256,
  "training.max_steps": 200,
}
GRPO = Job(
  summary="RL without a critic, with its variants (see algorithm.name)",
  records=(PROMPTS,),
  first_values=_FIRST | {"algorithm.num_generations": 8},
  settings=GRPORun,
  check=check,
  build=build_learner,
  results={"reward": REWARD},
  batch=_batch,
  length=_length,
  rollout=lambda config: config.rollout,
  example=_example,
  shorter=_shorter,
  sequences=_sequences,
)
PPO = dataclasses.replace(
  GRPO,
  summary="RL with a critic",
  first_values=_FIRST,
  settings=PPORun,
)
