"""What a cluster is told: roles, sizes, engines."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks


class Role(enum.Enum):
  """What a model does in a run."""

  ACTOR = "actor"
  CRITIC = "critic"
  REFERENCE = "reference"
  REWARD = "reward"
  ROLLOUT = "rollout"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSizes:
  """Sizes in PROMPTS; each has `num_generations` completions.

  Attributes:
    mini_batch_size: prompts of one update; None: the whole batch of rollouts.
    train_micro_batch_size: prompts whose gradients are computed at once; must divide
      `mini_batch_size`. None: the whole mini-batch.
    rollout_micro_batch_size: prompts that are sampled at once; None: all.
    compute_logps_micro_batch_size: prompts that are scored at once; None: all.
    bucketed_lengths: pad to the power of two (from 16) that holds the longest prompt,
      and the longest completion, of a batch, instead of to the maxima: less work on
      short completions, one more program for every new pair of lengths.
  """

  mini_batch_size: int | None = None
  train_micro_batch_size: int | None = None
  rollout_micro_batch_size: int | None = None
  compute_logps_micro_batch_size: int | None = None
  bucketed_lengths: bool = False

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
        f"mini_batch_size {mini} is no multiple of train_micro_batch_size {micro}: "
        "choose one that divides it"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLTrainingConfig(PromptSizes, TrainingConfig):
  """Settings of an RL run.

  `max_steps`, `eval_every_n_steps` and `save_every_n_steps` count updates of the actor;
  evaluations and checkpoints fall between rollouts.

  Attributes:
    actor_optimizer: an optax transformation.
    critic_optimizer: likewise; needed with a critic.
  """

  actor_optimizer: optax.GradientTransformation
  critic_optimizer: optax.GradientTransformation | None = None

  def __post_init__(self):
    TrainingConfig.__post_init__(self)
    PromptSizes.__post_init__(self)
    if self.gradient_accumulation_steps is not None:
      raise ValueError(
        f"gradient_accumulation_steps is {self.gradient_accumulation_steps}: an RL run "
        "derives it; give mini_batch_size and train_micro_batch_size"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Where the roles of a run live and what engine samples.

  Attributes:
    role_to_mesh: meshes by role; a role that is not named shares the actor's. None, or
      without the actor: the arrays stay where they are.
    rollout_engine: "vanilla" (our sampler), "vllm", "sglang_jax", or a class of the
      kind of BaseRollout.
    offload_to_cpu: keep reference, reward model and critic in host memory between uses.
    training_config: sizes, optimizers, cadence.
    rollout_config: how to sample; or by Mode, with Mode.TRAIN in it.
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
        f"rollout_config has the modes {sorted(self.rollout_config)}: Mode.TRAIN must "
        "be one of them"
      )
    train = self.rollout(Mode.TRAIN).engine_options
    if any(c.engine_options not in ({}, train) for c in self._modes()):
      raise ValueError(
        "engine_options differ between modes: there is one engine for all of them, "
        "which is made with those of Mode.TRAIN; leave the others out"
      )
    unknown = [role for role in self.role_to_mesh or () if not isinstance(role, Role)]
    if unknown:
      raise ValueError(
        f"role_to_mesh has the key {unknown[0]!r}: use Role, such as Role.ACTOR"
      )

  def _modes(self) -> list[RolloutConfig]:
    config: Any = self.rollout_config
    return list(config.values()) if isinstance(config, Mapping) else [config]

  def widest_rollout(self) -> RolloutConfig:
    """What the engine is made with: Mode.TRAIN's, with a cache for every mode."""
    sizes = [c.kv_cache_size for c in self._modes()]
    most = None if None in sizes else max(filter(None, sizes))
    return dataclasses.replace(self.rollout(Mode.TRAIN), kv_cache_size=most)

  def rollout(self, mode: Mode) -> RolloutConfig:
    """How to sample in a mode; evaluation samples as training does unless it is
    told otherwise."""
    config: Any = self.rollout_config
    return (
      config.get(mode, config[Mode.TRAIN]) if isinstance(config, Mapping) else (config)
    )
