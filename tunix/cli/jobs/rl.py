"""The jobs grpo (with its variants) and ppo: learning from rewards."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from tunix.cli.build import build, optimizer, rewards
from tunix.cli.build.rewards import RewardSettings
from tunix.cli.jobs.job import Job, Loaded, length_of
from tunix.cli.settings import keys
from tunix.cli.settings.convert import Choice
from tunix.cli.settings.data import DataSettings
from tunix.cli.settings.run import RunSettings, TrainingSettings, values_for
from tunix.data.records import PROMPT_ROWS, PROMPTS, Kind
from tunix.generate import batching, capacity
from tunix.models.transformer.model import Transformer
from tunix.rl import setup
from tunix.rl.config import ClusterConfig, PromptSizes, RLTrainingConfig, Role
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig, DrGRPOLearner
from tunix.rl.grpo.grpo_learner import (
  CISPOConfig,
  GRPOConfig,
  GRPOLearner,
  GSPOConfig,
)
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rl_learner import RLLearner
from tunix.rl.rollout import vanilla_rollout
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.samples import Samples
from tunix.rl.utils import create_critic_model
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks

# The metric that RL raises.
REWARD = "rewards/score/mean"

GRPO_VARIANTS = Choice(
  {
    "grpo": GRPOConfig,
    "drgrpo": DrGRPOConfig,
    "dapo": DAPOConfig,
    "gspo": GSPOConfig,
    "cispo": CISPOConfig,
    "rloo": RLOOConfig,
  }
)
PPO_ALONE = Choice({"ppo": PPOConfig})

LEARNERS: dict[type, type[RLLearner]] = {
  GRPOConfig: GRPOLearner,
  DrGRPOConfig: DrGRPOLearner,
  DAPOConfig: DAPOLearner,
  GSPOConfig: GRPOLearner,
  CISPOConfig: GRPOLearner,
  RLOOConfig: RLOOLearner,
  PPOConfig: PPOLearner,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings(DataSettings):
  """Prompts, all of which are checked before the training."""

  overlong: Literal["error", "drop"] = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings(RolloutConfig):
  """RolloutConfig, with the engine and what differs in evaluations.

  Attributes:
    temperature: logits are divided by it, in sampling and in learning alike.
    eval_temperature: of evaluations; 0: greedy, null: as temperature.
    seed: of the completions; null: as seed.
    engine: vanilla (our sampler), vllm or sglang_jax.
    engine_options: passed on to other engines than vanilla.
  """

  max_tokens_to_generate: int = 256
  max_prompt_length: int = 256
  eval_temperature: float | None = None
  seed: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  stop_strings: tuple[str, ...] = ()
  engine: Literal["vanilla", "vllm", "sglang_jax"] = "vanilla"

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, eval_temperature=checks.NOT_NEGATIVE)
    setup.check_exploring(self)
    if self.engine == "vanilla":
      vanilla_rollout.check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLSettings(PromptSizes):
  """PromptSizes, and models besides the one that is trained.

  Attributes:
    reference: folder of the model that the policy is kept close to. null: the model
      itself before the training, where algorithm.beta asks for one.
    shuffle_seed: shuffle groups before they are cut into mini-batches; null: as they
      come.
    offload_to_cpu: keep reference, reward model and critic in host memory between uses.
  """

  reference: str | None = None
  shuffle_seed: int | None = None
  offload_to_cpu: bool = False

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, shuffle_seed=checks.SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings(RLSettings):
  """RLSettings with a critic.

  Attributes:
    critic: folder of a critic, or "actor" (null as well): the model with a new head.
    critic_learning_rate: null: as training.learning_rate (and its schedule).
  """

  critic: str | None = None
  critic_learning_rate: float | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, critic_learning_rate=checks.NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesSettings:
  """What is shown of the rollouts.

  Attributes:
    every_n_rollouts: write samples of one batch of rollouts in so many, as JSON lines
      and a page in samples/; null: none.
    max_groups: groups of a batch that are written.
  """

  every_n_rollouts: int | None = 10
  max_groups: int = 8

  def __post_init__(self):
    self.samples(pathlib.Path("samples"))  # which refuses what is no count

  def samples(self, folder: pathlib.Path) -> Samples | None:
    """What writes them; None: nothing does."""
    every = self.every_n_rollouts
    if every is None:
      return None
    return Samples(folder, every_n_rollouts=every, max_groups=self.max_groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLRun(RunSettings):
  """What the jobs that learn from rewards share.

  Attributes:
    rollout: how completions are sampled; in distill those that the student writes.
    rl: models besides the policy, and sizes in prompts.
    reward: where rewards come from.
    samples: what is shown of the rollouts.
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
  samples: SamplesSettings = SamplesSettings()

  def __post_init__(self):
    super().__post_init__()
    if self.rl.reference is not None and not self.algorithm.beta:
      raise ValueError(
        f"rl.reference is {self.rl.reference!r} and algorithm.beta 0: nothing would be "
        "compared with it; set algorithm.beta, or leave it out"
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
  """GRPO and its variants.

  Attributes:
    algorithm: the variant by its name; null below it: the variant's own default.
  """

  job: Literal["grpo"] = "grpo"
  algorithm: Annotated[GRPOConfig, GRPO_VARIANTS] = dataclasses.field(
    default=GRPOConfig()
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPORun(RLRun):
  """PPO with a critic.

  Attributes:
    algorithm: null below it: the default.
  """

  job: Literal["ppo"] = "ppo"
  algorithm: Annotated[PPOConfig, PPO_ALONE] = dataclasses.field(default=PPOConfig())
  rl: CriticSettings = CriticSettings()


def build_learner(run: Loaded) -> RLLearner:
  """The learner of a run, put back where its checkpoints stand.

  Raises:
    FileNotFoundError, ImportError, ValueError: models or rewards that do not fit.
  """
  config: RLRun = run.config
  algorithm, roles = config.algorithm, config.rl
  models: dict[str, Any] = {"reference": None}
  if algorithm.beta:
    models["reference"] = run.reference(roles.reference)
  more: dict[str, Any] = {}
  if isinstance(config, PPORun):
    models["critic"] = _critic(run)
    more["critic_optimizer"] = optimizer.build_critic_optimizer(
      config, config.rl.critic_learning_rate
    )
  if config.reward.model is not None:
    models["reward"] = run.scores(config.reward.model, dtype=config.model.dtype)
  cluster = RLCluster(
    actor=run.model,
    tokenizer=run.tokenizer,
    cluster_config=ClusterConfig(
      role_to_mesh=None if run.mesh is None else {Role.ACTOR: run.mesh},
      rollout_engine=config.rollout.engine,
      # A shape lies nowhere: a plan counts what is kept elsewhere by itself.
      offload_to_cpu=roles.offload_to_cpu and not run.of_shapes,
      training_config=RLTrainingConfig(
        actor_optimizer=run.optimizer,
        **run.training_options()
        | {"metrics_logging_options": build.logging_options(config, run.output_dir)},
        **values_for(PromptSizes, roles),
        **more,
      ),
      rollout_config=rollout_configs(config),
    ),
    **models,
  )
  learner = LEARNERS[type(algorithm)](
    cluster,
    algorithm,
    _no_rewards if run.of_shapes else rewards.build_rewards(config.reward),
    data_shuffle_seed=roles.shuffle_seed,
  )
  if run.output_dir is None:
    return learner
  samples = config.samples.samples(run.output_dir / "samples")
  return learner if samples is None else learner.with_samples(samples)


def _no_rewards(prompts: list[Any], completions: list[str], **columns: Any):
  """Of completions that a plan has not sampled."""
  del prompts, columns
  return [0.0] * len(completions)


def rollout_configs(config: RLRun) -> dict[Mode, RolloutConfig]:
  """How to sample in training and in evaluation."""
  how = config.rollout
  options = values_for(RolloutConfig, how)
  options["seed"] = config.seed if how.seed is None else how.seed
  options["stop_strings"] = how.stop_strings or None
  train = RolloutConfig(**options)
  if how.eval_temperature is None:
    return {Mode.TRAIN: train}
  # Samplers refuse filters where nothing is drawn, and these are of the training.
  filters = (
    {} if how.eval_temperature else {"top_p": None, "top_k": None, "min_p": None}
  )
  held_out = dataclasses.replace(train, temperature=how.eval_temperature, **filters)
  return {Mode.TRAIN: train, Mode.EVAL: held_out}


def _critic(run: Loaded) -> Transformer:
  config: PPORun = run.config
  path = config.rl.critic
  if path is None or path == "actor":
    return create_critic_model(run.model, config.seed, share=True)
  dtypes = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
  return run.scores(path, **dtypes)


def _batch(config: RLRun) -> str:
  kind = keys.section_of(keys.of(type(config))["algorithm"].hint)
  assert isinstance(kind, Choice)
  name, prompts = kind.name_of(config.algorithm), config.training.global_batch_size
  names = config.reward.entries + (("reward model",) if config.reward.model else ())
  return (
    f"{name}: {prompts} prompts x {config.algorithm.num_generations} completions of "
    f"at most {config.rollout.max_tokens_to_generate} tokens, rewarded by "
    f"{', '.join(names)}"
  )


_LENGTH = length_of("rollout", "max_prompt_length", "max_tokens_to_generate")


def check(config: RLRun) -> None:
  """Refuses batches of rollouts that memory cannot hold.

  Raises:
    ValueError: says how many completions of a prompt fit.
  """
  _, length = _LENGTH(config)
  row = length * 12  # ids, masks and log-probs
  prompts, size = config.training.global_batch_size, config.algorithm.num_generations
  what = f"the tokens of {prompts} prompts' completions"
  capacity.require("algorithm.num_generations", size, lambda n: prompts * n * row, what)


def _example(config: RLRun) -> dict[str, Any]:
  """Prompts as long as they may be."""
  return _prompts(config, config.rollout.max_prompt_length)


def _shorter(config: RLRun) -> list[dict[str, Any]]:
  lengths = batching.least_of_buckets(config.rollout.max_prompt_length)
  return [_prompts(config, length) for length in lengths[:-1]]


def _prompts(config: RLRun, length: int) -> dict[str, Any]:
  return {"prompts": [np.zeros(length, np.int32)] * config.training.global_batch_size}


def _sequences(config: RLRun) -> int:
  return config.training.global_batch_size * config.algorithm.num_generations


GRPO = Job(
  summary="reinforcement learning without a critic; algorithm.name chooses a variant",
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
  length=_LENGTH,
  rollout=lambda config: config.rollout,
  example=_example,
  shorter=_shorter,
  sequences=_sequences,
)
PPO = dataclasses.replace(
  GRPO, summary="reinforcement learning with a critic", settings=PPORun
)
