"""Settings of a cluster: roles, batch sizes, engines."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks
from tunix.utils.setting import setting

# Engines whose weights are in another process, or that choose their own order.
_OTHER_PROCESS = ("vllm", "sglang_jax")


class Role(enum.Enum):
  """The role of a model in a run."""

  ACTOR = "actor"
  CRITIC = "critic"
  REFERENCE = "reference"
  REWARD = "reward"
  ROLLOUT = "rollout"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSizes:
  """Batch sizes in PROMPTS, each with `num_generations` completions.

  Attributes:
    mini_batch_size: prompts of one update; None is the whole batch of rollouts.
    train_micro_batch_size: prompts whose gradients are computed at once; must divide
      `mini_batch_size`. None is the whole mini-batch.
    rollout_micro_batch_size: prompts that are sampled at once; None is all.
    compute_logps_micro_batch_size: prompts that are scored at once; None is all.
    bucketed_lengths: if True, a batch is padded to the smallest power of two (at least
      16) that holds its longest prompt and its longest completion, instead of to the
      limits. Short completions then cost less; each new pair of lengths compiles one
      more program. False needs the same memory in every step. The limits hold with
      `exact_tile_rows` and on meshes that split tokens (`cp`), too.
  """

  mini_batch_size: int | None = None
  train_micro_batch_size: int | None = None
  rollout_micro_batch_size: int | None = setting(None, may_change=True)
  compute_logps_micro_batch_size: int | None = None
  bucketed_lengths: bool = True

  def __post_init__(self):
    checks.fields(
      self,
      mini_batch_size=checks.COUNT,
      train_micro_batch_size=checks.COUNT,
      rollout_micro_batch_size=checks.COUNT,
      compute_logps_micro_batch_size=checks.COUNT,
    )
    mini, micro = self.mini_batch_size, self.train_micro_batch_size
    if mini is not None and micro is not None and mini % micro:
      raise ValueError(
        f"mini_batch_size is {mini}: expected a multiple of train_micro_batch_size "
        f"{micro}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
  """The order of sampling and training, see docs/guides/async.md.

  Attributes:
    schedule: "sync": a batch is sampled by the weights that its update starts from.
      "lagged": a thread samples ahead of the updates, so that both overlap.
      "greedy": the same, with an engine that always works on several batches and takes
      new weights while it samples; a journal makes it repeatable.
    lag: S. "lagged": batch t is sampled by the weights after max(0, t - S) batches.
      "greedy": by these or newer ones. null: 1.
    rollout_timeout_s: seconds that the sampling of one batch, its environments and its
      rewards may take with "lagged"; with "greedy", seconds in which nothing is drawn
      and no environment answers. After that, the run ends with an error.
    replay: with "greedy", folder of a journal whose decisions are repeated; see
      `tunix replay`. null: the run takes its own.
  """

  schedule: Literal["sync", "lagged", "greedy"] = "sync"
  lag: int | None = None
  rollout_timeout_s: float = setting(3600.0, may_change=True)
  replay: str | None = None

  def __post_init__(self):
    checks.fields(self, lag=checks.COUNT, rollout_timeout_s=checks.POSITIVE)
    if self.schedule not in ("sync", "lagged", "greedy"):
      raise ValueError(
        f"schedule is {self.schedule!r}: choose one of sync, lagged, greedy"
      )
    if self.lag is not None and self.schedule == "sync":
      raise ValueError(
        f"lag is {self.lag} and schedule is 'sync', which has no lag: set schedule to "
        "lagged or greedy, or leave lag out"
      )
    if self.replay is not None and self.schedule != "greedy":
      raise ValueError(
        f"replay is {self.replay!r} and schedule is {self.schedule!r}, which writes no "
        "journal: set schedule to greedy, or leave replay out"
      )

  @property
  def staleness(self) -> int:
    """The number of batches by which the weights that sample are older; 0: none."""
    return 0 if self.schedule == "sync" else self.lag or 1

  @property
  def weight_copies(self) -> int:
    """The most sets of trained weights besides the learner's, for rollouts."""
    if self.schedule == "greedy":  # the engine's, and the ones that it takes next
      return 2
    return self.staleness and self.staleness + 1  # those of each batch ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLTrainingConfig(ScheduleSettings, PromptSizes, TrainingConfig):
  """Settings of an RL run.

  `max_steps`, `eval_every_n_steps` and `save_every_n_steps` count updates of the actor.
  Evaluations and checkpoints are made between rollouts.

  Attributes:
    actor_optimizer: an optax transformation for the actor.
    critic_optimizer: an optax transformation for the critic; required with a critic.
  """

  actor_optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation | None = None

  def __post_init__(self):
    TrainingConfig.__post_init__(self)
    PromptSizes.__post_init__(self)
    ScheduleSettings.__post_init__(self)
    if self.schedule == "greedy" and self.rollout_micro_batch_size is not None:
      raise ValueError(
        f"rollout_micro_batch_size is {self.rollout_micro_batch_size} and schedule is "
        "'greedy', whose engine samples the prompts of several batches at once: bound "
        "the completions at once by rollout.slots (RolloutConfig.slots) instead"
      )
    if self.gradient_accumulation_steps is not None:
      raise ValueError(
        f"gradient_accumulation_steps is {self.gradient_accumulation_steps}: an RL run "
        "computes it; set mini_batch_size and train_micro_batch_size instead"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """The placement of the roles of a run, the engine, and the training settings.

  Attributes:
    role_to_mesh: the mesh of each role. A missing role uses the actor's mesh; if that
      is missing too, or this is None, the arrays of the role stay where they are.
    rollout_engine: "vanilla" (our engine; the padded sampler for models that do not
      suit it), "per_process" (our engine, one in each process, on its own devices;
      `role_to_mesh` may give Role.ROLLOUT a mesh of them), "remote" (our engine, on
      hosts that run `tunix rollouts`, see `RemoteRollout`), "padded" (always the padded
      sampler), "vllm", "sglang_jax", or a subclass of BaseRollout.
    offload_to_cpu: if True, reference, reward model and critic are kept in host memory
      between uses.
    training_config: batch sizes, optimizers, checkpoints and evaluations.
    rollout_config: sampling settings, or sampling settings by Mode; Mode.TRAIN is then
      required.
  """

  role_to_mesh: Mapping[Role, Mesh] | None = None
  rollout_engine: str | type[BaseRollout] = "vanilla"
  offload_to_cpu: bool = False
  training_config: RLTrainingConfig
  rollout_config: RolloutConfig | Mapping[Mode, RolloutConfig]

  def __post_init__(self):
    if isinstance(self.rollout_config, Mapping) and Mode.TRAIN not in (
      self.rollout_config
    ):
      raise ValueError(
        f"rollout_config has the modes {sorted(self.rollout_config)}: add Mode.TRAIN"
      )
    train = self.rollout(Mode.TRAIN).engine_options
    if any(c.engine_options not in ({}, train) for c in self._modes()):
      raise ValueError(
        "engine_options differ between modes, which share one engine: set them in "
        "Mode.TRAIN only"
      )
    forms = {c.weights for c in self._modes()}
    if len(forms) > 1:
      raise ValueError(
        f"weights is {' and '.join(map(repr, sorted(forms, key=str)))} in different "
        "modes, which share one engine: set the same in each mode"
      )
    if self.training_config.staleness and self.rollout_engine in _OTHER_PROCESS:
      raise ValueError(
        f"rollout_engine is {self.rollout_engine!r} and schedule is "
        f"{self.training_config.schedule!r}, which "
        'samples with an engine of this process: set rollout_engine to "vanilla", or '
        "schedule to sync"
      )
    if self.rollout(Mode.TRAIN).replay_routes and self.rollout_engine in _OTHER_PROCESS:
      raise ValueError(
        f"rollout_engine is {self.rollout_engine!r} and replay_routes is True, which "
        "needs the routes of an engine of this process: set rollout_engine to "
        '"vanilla", or leave replay_routes out'
      )
    weights = self.rollout(Mode.TRAIN).weights
    others = (*_OTHER_PROCESS, "remote")
    if weights is not None and self.rollout_engine in others:
      raise ValueError(
        f"rollout_engine is {self.rollout_engine!r} and weights is {weights!r}, which "
        'needs our own engine in this process: set rollout_engine to "vanilla", or '
        "leave weights out"
      )
    head = self.rollout(Mode.TRAIN).center_scores
    if head and self.rollout_engine in (*_OTHER_PROCESS, "padded"):
      raise ValueError(
        f"rollout_engine is {self.rollout_engine!r} and center_scores is {head}, which "
        'needs the probabilities of our own engine: set rollout_engine to "vanilla", '
        "or center_scores to 0"
      )
    unknown = [role for role in self.role_to_mesh or () if not isinstance(role, Role)]
    if unknown:
      raise ValueError(
        f"role_to_mesh has the key {unknown[0]!r}: expected a Role, such as Role.ACTOR"
      )

  def _modes(self) -> list[RolloutConfig]:
    config: Any = self.rollout_config
    return list(config.values()) if isinstance(config, Mapping) else [config]

  def eos_tokens(self) -> list[int]:
    """Returns the ids that end a completion in any mode, without the tokenizer's."""
    return [int(i) for c in self._modes() for i in c.eos_tokens or ()]

  def widest_rollout(self) -> RolloutConfig:
    """Returns Mode.TRAIN's config with a KV cache that fits all modes."""
    return widest(self.rollout(Mode.TRAIN), self._modes())

  def rollout(self, mode: Mode) -> RolloutConfig:
    """Returns the sampling settings of a mode; Mode.TRAIN's for a missing mode."""
    config: Any = self.rollout_config
    if not isinstance(config, Mapping):
      return config
    return config.get(mode, config[Mode.TRAIN])


def widest(config: RolloutConfig, others: Iterable[RolloutConfig]) -> RolloutConfig:
  """Returns a config with a KV cache that fits other ones, too."""
  sizes = [c.kv_cache_size for c in (config, *others)]
  largest = None if None in sizes else max(filter(None, sizes))
  return dataclasses.replace(config, kv_cache_size=largest)
