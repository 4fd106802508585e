"""The jobs grpo (with its variants) and ppo: reinforcement learning from rewards."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from tunix.cli.build import optimizer, rewards, training
from tunix.cli.build.environments import make_env
from tunix.cli.build.rewards import RewardSettings
from tunix.cli.jobs.job import Job, Loaded, length_of
from tunix.cli.settings import keys
from tunix.cli.settings.convert import Choice
from tunix.cli.settings.data import DataSettings
from tunix.cli.settings.run import RunSettings, TrainingSettings
from tunix.data.records import PROMPT_ROWS, PROMPTS, Kind
from tunix.generate import batching, capacity
from tunix.models.transformer.model import Transformer
from tunix.rl import algorithms, setup
from tunix.rl.config import (
  ClusterConfig,
  PromptSizes,
  RLTrainingConfig,
  Role,
  ScheduleSettings,
)
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.ppo.ppo_learner import PPOConfig
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rl_learner import RLLearner
from tunix.rl.rollout import vanilla_rollout
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.samples import Samples
from tunix.rl.utils import create_critic_model
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks
from tunix.utils.setting import model_setting, setting, shared_values

# Metric of the mean reward.
REWARD = "rewards/score/mean"

GRPO_VARIANTS = Choice(algorithms.configs(uses_critic=False))
PPO_ALONE = Choice(algorithms.configs(uses_critic=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings(DataSettings):
  """Prompts, which are all checked before the training."""

  overlong: Literal["error", "drop"] = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings(RolloutConfig):
  """Sampling of the completions: RolloutConfig, the engine, evaluations.

  Attributes:
    temperature: divisor of the logits, in sampling and in training.
    eval_temperature: temperature in evaluations; 0: greedy, null: rollout.temperature.
    seed: seed of the sampling; null: the key seed.
    engine: engine that samples. vanilla is the library's own engine, or its padded
      sampler for models that do not suit the engine; padded is always that sampler.
    engine_options: options of vllm or sglang_jax, passed to them as they are.
  """

  max_tokens_to_generate: int = 256
  max_prompt_length: int = 256
  eval_temperature: float | None = None
  seed: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  stop_strings: tuple[str, ...] = ()
  engine: Literal["vanilla", "padded", "vllm", "sglang_jax"] = "vanilla"

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, eval_temperature=checks.NOT_NEGATIVE)
    setup.check_exploring(self)
    if self.engine in ("vanilla", "padded"):
      vanilla_rollout.check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLSettings(ScheduleSettings, PromptSizes):
  """Sizes in prompts, the order of sampling and training, and further models.

  Attributes:
    reference: folder of the reference model, which the KL term compares with. null: the
      policy before the training, if algorithm.beta is not 0.
    shuffle_seed: seed that shuffles groups before they are cut into mini-batches; null:
      they are not shuffled.
    offload_to_cpu: keeps reference, reward model and critic in host memory between
      uses.
  """

  reference: str | None = model_setting("reference")
  shuffle_seed: int | None = None
  offload_to_cpu: bool = setting(False, may_change=True)

  def __post_init__(self):
    ScheduleSettings.__post_init__(self)
    PromptSizes.__post_init__(self)
    checks.fields(self, shuffle_seed=checks.SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings(RLSettings):
  """RLSettings with a critic.

  Attributes:
    critic: folder of a critic; "actor" or null: the policy's weights with a new head.
    critic_learning_rate: learning rate of the critic; null: training.learning_rate with
      its schedule.
  """

  critic: str | None = model_setting("critic")
  critic_learning_rate: float | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, critic_learning_rate=checks.NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesSettings:
  """Samples of the rollouts that are written to samples/.

  Attributes:
    every_n_rollouts: writes samples of every n-th batch of rollouts, as JSON lines and
      as a page; null: never.
    max_groups: groups of a batch that are written.
  """

  every_n_rollouts: int | None = 10
  max_groups: int = 8

  def __post_init__(self):
    self.samples(pathlib.Path("samples"))  # its constructor checks the ranges

  def samples(self, folder: pathlib.Path) -> Samples | None:
    """Builds the writer of samples; None if no samples are written."""
    every = self.every_n_rollouts
    if every is None:
      return None
    return Samples(folder, every_n_rollouts=every, max_groups=self.max_groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLRun(RunSettings):
  """The keys that grpo and ppo share.

  Attributes:
    rollout: sampling of completions; in distill the student's completions.
    rl: sizes in prompts, and models besides the policy.
    reward: the rewards of completions.
    env: function that makes the environment of a completion, which is then an episode
      of several turns: pkg.mod:make, /path/file.py:make, or with arguments
      pkg.mod:make(level=2). It also gets the prompt and the columns of the data that it
      names. null: a completion is one answer to the prompt.
    episode: limits of episodes; only with env.
    samples: samples of the rollouts that are written to samples/.
  """

  instead: ClassVar[dict[str, str]] = {
    "data.max_length": (
      "use rollout.max_prompt_length and rollout.max_tokens_to_generate"
    ),
    "data.scan_limit": "leave it out: every prompt is checked",
    "training.micro_batch_size": "use rl.train_micro_batch_size, which counts prompts",
  }

  data: PromptSettings = PromptSettings()
  training: TrainingSettings = dataclasses.field(default=TrainingSettings())
  rollout: RolloutSettings = RolloutSettings()
  algorithm: Any = None
  rl: RLSettings = RLSettings()
  reward: RewardSettings = dataclasses.field(default=RewardSettings())
  env: str | None = setting(None, path="function", fingerprint="env", takes_object=True)
  episode: EpisodeConfig = dataclasses.field(default=EpisodeConfig())
  samples: SamplesSettings = setting(SamplesSettings(), may_change=True)

  def __post_init__(self):
    super().__post_init__()
    if self.rl.reference is not None and not self.algorithm.beta:
      raise ValueError(
        f"rl.reference is {self.rl.reference!r} and algorithm.beta 0, which compares "
        "with no reference. Set algorithm.beta, or leave rl.reference out"
      )

    if self.env is not None and (self.data.template_args or self.data.chat is False):
      raise ValueError(
        "env is set and data.chat or data.template_args, which have no effect on the "
        "messages of environments. Leave both out, or set tokenizer.template_args for "
        "all conversations"
      )
    if self.env is None and self.episode != EpisodeConfig():
      raise ValueError(
        "episode has limits and env is not set, so there are no episodes. Set env, or "
        "leave episode out"
      )

  def kind(self, *, training: bool) -> Kind:
    """Returns the kind of the records: prompts with columns."""
    del training
    return PROMPT_ROWS

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Returns the key of the longest prompt."""
    del kind
    return {"max_prompt_length": "rollout.max_prompt_length"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPORun(RLRun):
  """Settings of a run of the job grpo.

  Attributes:
    algorithm: the variant, chosen by its name; null below it means the default of the
      variant.
  """

  job: Literal["grpo"] = "grpo"
  algorithm: Annotated[GRPOConfig, GRPO_VARIANTS] = dataclasses.field(
    default=GRPOConfig()
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPORun(RLRun):
  """Settings of a run of the job ppo.

  Attributes:
    algorithm: PPO; null below it means the default.
  """

  job: Literal["ppo"] = "ppo"
  algorithm: Annotated[PPOConfig, PPO_ALONE] = dataclasses.field(default=PPOConfig())
  rl: CriticSettings = CriticSettings()


def build_learner(run: Loaded) -> RLLearner:
  """Builds the learner of a run and restores its checkpoint.

  Raises:
    FileNotFoundError, ImportError, ValueError: models or rewards that do not fit.
  """
  config: RLRun = run.config
  algorithm, roles = config.algorithm, config.rl
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
    cluster_config=ClusterConfig(
      role_to_mesh=None if run.mesh is None else {Role.ACTOR: run.mesh},
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
    _no_rewards if run.of_shapes else rewards.build_rewards(config.reward),
    data_shuffle_seed=roles.shuffle_seed,
    **_episodes(run),
  )
  if run.output_dir is None:
    return learner
  samples = config.samples.samples(run.output_dir / "samples")
  return learner if samples is None else learner.with_samples(samples)


def _episodes(run: Loaded) -> dict[str, Any]:
  """Returns the options of a learner for episodes."""
  config: RLRun = run.config
  # A plan runs no environment: `rollout_configs` gives its rows the widths of episodes.
  if config.env is None or run.of_shapes:
    return {}
  return {"env": make_env(config.env), "episodes": config.episode}


def _no_rewards(prompts: list[Any], completions: list[str], **columns: Any):
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
    options["max_tokens_to_generate"] = config.episode.max_tokens
  options["seed"] = config.seed if section.seed is None else section.seed
  options["stop_strings"] = section.stop_strings or None
  train = RolloutConfig(**options)
  if section.eval_temperature is None:
    return {Mode.TRAIN: train}
  # The filters belong to sampling in training; greedy decoding refuses them.
  names = () if section.eval_temperature else ("top_p", "top_k", "min_p")
  held_out = dataclasses.replace(
    train, temperature=section.eval_temperature, **dict.fromkeys(names)
  )
  return {Mode.TRAIN: train, Mode.EVAL: held_out}


def _critic(run: Loaded) -> Transformer:
  config: PPORun = run.config
  path = config.rl.critic
  if path is None or path == "actor":
    return create_critic_model(run.model, config.seed, share=True)
  dtypes = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
  return _scorer(run, path, **dtypes)


def _scorer(run: Loaded, path: str, **dtypes: Any) -> Any:
  """Loads a critic or reward model: one score for each position."""
  return run.models.load(path, num_scores=1, **dtypes)


def _batch(config: RLRun) -> str:
  kind = keys.section_of(keys.of(type(config))["algorithm"].hint)
  assert isinstance(kind, Choice)
  name, prompts = kind.name_of(config.algorithm), config.training.global_batch_size
  names = config.reward.entries + (("reward model",) if config.reward.model else ())
  size, tokens = config.algorithm.num_generations, config.rollout.max_tokens_to_generate
  if config.env is not None:
    names = (*names, config.env)
    what = f"episodes of at most {config.episode.max_turns} turns and "
    tokens = config.episode.max_tokens
  else:
    what = "completions of at most "
  return (
    f"{name}: {prompts} prompts x {size} {what}{tokens} tokens, rewarded by "
    f"{', '.join(names)}"
  )


_ANSWERS = length_of("rollout", "max_prompt_length", "max_tokens_to_generate")


def _length(config: RLRun) -> tuple[str, int]:
  """Returns the keys that limit a row, and the number of its tokens."""
  if config.env is None:
    return _ANSWERS(config)
  keys_of = "rollout.max_prompt_length + episode.max_tokens"
  return keys_of, config.rollout.max_prompt_length + config.episode.max_tokens


def check(config: RLRun) -> None:
  """Refuses batches of rollouts that memory cannot hold.

  Raises:
    ValueError: gives the number of completions of a prompt that fit.
  """
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


GRPO = Job(
  summary="RL without a critic, with its variants (see algorithm.name)",
  records=(PROMPTS,),
  first_values={
    "reward.functions": ["exact_match"],
    "rollout.max_prompt_length": 256,
    "rollout.max_tokens_to_generate": 256,
    "training.learning_rate": 1e-5,
  },
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
PPO = dataclasses.replace(GRPO, summary="RL with a critic", settings=PPORun)
