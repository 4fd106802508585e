"""The settings of the jobs grpo (with its variants) and ppo."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any, ClassVar, Literal

from tunix.cli.make import environments
from tunix.cli.make.rewards import RewardSettings
from tunix.cli.settings import mesh as mesh_axes
from tunix.cli.settings.convert import Choice
from tunix.cli.settings.data import DataSettings
from tunix.cli.settings.run import RunSettings
from tunix.cli.settings.training import TrainingSettings
from tunix.data.records import PROMPT_ROWS, Kind
from tunix.rl import algorithms, setup
from tunix.rl.config import PromptSizes, ScheduleSettings
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.experience.samples import Samples
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.grpo.sdpo_learner import SDPOConfig
from tunix.rl.ppo.ppo_learner import PPOConfig
from tunix.rl.rollout import vanilla_rollout
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.utils import checks
from tunix.utils.setting import model_setting, setting

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
      per_process is the library's own engine in each process, on the devices of the
      process, which draws its share of each batch. remote is the library's own engine
      on other hosts, see rl.rollout_hosts.
    engine_options: options of vllm or sglang_jax, passed to them as they are.
  """

  max_tokens_to_generate: int = 256
  max_prompt_length: int = 256
  eval_temperature: float | None = None
  seed: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  stop_strings: tuple[str, ...] = ()
  engine: Literal[
    "vanilla", "per_process", "remote", "padded", "vllm", "sglang_jax"
  ] = "vanilla"

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, eval_temperature=checks.NOT_NEGATIVE)
    setup.check_exploring(self)
    if self.engine in vanilla_rollout.NAMES:
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
    rollout_mesh: number of devices by axis, of devices that only sample: {tp: 4}. They
      are the last ones, and `mesh` has the others. {}: the devices of `mesh` sample.
    rollout_hosts: addresses of the hosts that sample with rollout.engine=remote, such
      as http://10.0.0.2:8700. `tunix rollouts` runs on them.
  """

  reference: str | None = model_setting("reference")
  shuffle_seed: int | None = None
  offload_to_cpu: bool = setting(False, may_change=True)
  rollout_mesh: dict[str, int] = setting(default_factory=dict, may_change=True)
  rollout_hosts: tuple[str, ...] = setting((), may_change=True)

  def __post_init__(self):
    mesh_axes.check_rollout(self.rollout_mesh)
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
      names. reasoning_gym:NAME(size=100) trains on tasks of reasoning-gym, and needs no
      data.train. null: a completion is one answer to the prompt.
    episode: limits of episodes; only with env.
    samples: samples of the rollouts that are written to samples/.
  """

  instead: ClassVar[dict[str, str]] = {
    "data.max_length": (
      "use rollout.max_prompt_length and rollout.max_tokens_to_generate"
    ),
    "data.scan_limit": "leave it out: every prompt is checked",
    "data.stream": "leave it out: every prompt is checked before the training",
    "training.micro_batch_size": "use rl.train_micro_batch_size, which counts prompts",
  }

  reads_images: ClassVar[bool] = True

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
    if self.rl.rollout_mesh and self.rollout.engine not in ("vanilla", "padded"):
      raise ValueError(
        f"rl.rollout_mesh is {self.rl.rollout_mesh} and rollout.engine "
        f"{self.rollout.engine!r}, which has devices of its own. Leave rl.rollout_mesh "
        "out, or set rollout.engine to vanilla"
      )
    if bool(self.rl.rollout_hosts) != (self.rollout.engine == "remote"):
      raise ValueError(
        f"rl.rollout_hosts is {list(self.rl.rollout_hosts)} and rollout.engine "
        f"{self.rollout.engine!r}: set rollout.engine to remote and rl.rollout_hosts "
        "to the addresses of its hosts, or neither"
      )
    weights, tile = self.rollout.weights, self.algorithm.exact_tile_rows
    ours = vanilla_rollout.NAMES
    if weights is not None and (tile is not None or self.rollout.engine not in ours):
      name, value = "algorithm.exact_tile_rows", tile
      if tile is None:
        name, value = "rollout.engine", self.rollout.engine
      raise ValueError(
        f"rollout.weights is {weights!r} and {name} is {value!r}: 8 bits are for the "
        f"engines {', '.join(ours)}, without exact scoring. Leave one of both out"
      )
    if self.extends_prompts and self.data.template_args:
      raise ValueError(
        "algorithm.name is sdpo and data.template_args is set, which the prompts of "
        "its teacher do not get. Set tokenizer.template_args for all conversations"
      )
    if self.env is not None and (self.data.template_args or self.data.chat is False):
      raise ValueError(
        "env is set and data.chat or data.template_args, which have no effect on the "
        "messages of environments. Leave both out, or set tokenizer.template_args for "
        "all conversations"
      )
    if self.env is not None and self.data.pad_to in ("shared", "longest"):
      raise ValueError(
        f"env is set and data.pad_to is {self.data.pad_to!r}, and the lengths of an "
        "environment's prompts are not known. Leave data.pad_to out"
      )
    if environments.tasks(self.env) is not None and self.data.train is not None:
      raise ValueError(
        f"env is {self.env!r}, which names the prompts, and data.train is set, too. "
        "Leave data.train out, or set env to reasoning_gym to keep it"
      )
    if self.env is None and self.algorithm.observation_weight:
      raise ValueError(
        f"algorithm.observation_weight is {self.algorithm.observation_weight} and env "
        "is not set, so nothing writes observations. Set env, or leave "
        "algorithm.observation_weight out"
      )
    if self.env is None and self.episode != EpisodeConfig():
      raise ValueError(
        "episode has limits and env is not set, so there are no episodes. Set env, or "
        "leave episode out"
      )

  @property
  def extends_prompts(self) -> bool:
    """True if a teacher reads the prompts with a hint, before the chat template."""
    return isinstance(self.algorithm, SDPOConfig) and self.env is None

  @property
  def follows_lengths(self) -> bool:
    """True if the prompts are those of the data, and not of environments."""
    return self.env is None

  @property
  def rollout_axes(self) -> dict[str, int]:
    """See `RunSettings`."""
    return self.rl.rollout_mesh

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
    default=GRPOConfig(num_generations=8)
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
