"""Post-training of language models in JAX.

The classes that most scripts need, imported when first touched: `import tunix`
itself loads neither jax nor anything else that is heavy (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
  "AutoModel": "tunix.models.automodel",
  "BestOptions": "tunix.sft.best",
  "CacheConfig": "tunix.generate.sampler",
  "CheckpointManager": "tunix.sft.checkpoint_manager",
  "ClusterConfig": "tunix.rl.config",
  "DAPOConfig": "tunix.rl.grpo.dapo_learner",
  "DAPOLearner": "tunix.rl.grpo.dapo_learner",
  "DPOTrainer": "tunix.sft.dpo.dpo_trainer",
  "DPOTrainingConfig": "tunix.sft.dpo.dpo_trainer",
  "DistillationTrainer": "tunix.distillation.distillation_trainer",
  "DpoTrainer": "tunix.sft.dpo.dpo_trainer",
  "DpoTrainingConfig": "tunix.sft.dpo.dpo_trainer",
  "DrGRPOConfig": "tunix.rl.grpo.drgrpo_learner",
  "DrGRPOLearner": "tunix.rl.grpo.drgrpo_learner",
  "GRPOConfig": "tunix.rl.grpo.grpo_learner",
  "GRPOLearner": "tunix.rl.grpo.grpo_learner",
  "KTOConfig": "tunix.sft.dpo.kto_trainer",
  "KTOTrainer": "tunix.sft.dpo.kto_trainer",
  "LoraConfig": "tunix.models.lora",
  "MetricsLogger": "tunix.sft.metrics_logger",
  "MetricsLoggerOptions": "tunix.sft.metrics_logger",
  "ORPOTrainer": "tunix.sft.dpo.dpo_trainer",
  "ORPOTrainingConfig": "tunix.sft.dpo.dpo_trainer",
  "OnPolicyConfig": "tunix.distillation.on_policy_trainer",
  "OnPolicyDistillationTrainer": "tunix.distillation.on_policy_trainer",
  "OrpoTrainer": "tunix.sft.dpo.dpo_trainer",
  "OrpoTrainingConfig": "tunix.sft.dpo.dpo_trainer",
  "PPOConfig": "tunix.rl.ppo.ppo_learner",
  "PPOLearner": "tunix.rl.ppo.ppo_learner",
  "PeftTrainer": "tunix.sft.peft_trainer",
  "PeftTrainerConfig": "tunix.sft.peft_trainer",
  "PrecomputedLogps": "tunix.sft.dpo.precomputed",
  "PreferenceConfig": "tunix.sft.dpo.preference_config",
  "PreferenceTrainer": "tunix.sft.dpo.preference_trainer",
  "RLCluster": "tunix.rl.rl_cluster",
  "RLTrainingConfig": "tunix.rl.config",
  "RewardConfig": "tunix.sft.dpo.reward_trainer",
  "RewardTrainer": "tunix.sft.dpo.reward_trainer",
  "Role": "tunix.rl.config",
  "RolloutConfig": "tunix.rl.rollout.base_rollout",
  "Sampler": "tunix.generate.sampler",
  "TeacherCache": "tunix.distillation.teacher_cache",
  "TokenizerAdapter": "tunix.generate.tokenizer_adapter",
  "TrainingConfig": "tunix.sft.peft_trainer",
  "TrainingInput": "tunix.sft.peft_trainer",
}

__all__ = ["__version__", *sorted(_LAZY)]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
  from tunix.distillation.distillation_trainer import (
    DistillationTrainer as DistillationTrainer,
  )
  from tunix.distillation.on_policy_trainer import (
    OnPolicyConfig as OnPolicyConfig,
    OnPolicyDistillationTrainer as OnPolicyDistillationTrainer,
  )
  from tunix.distillation.teacher_cache import TeacherCache as TeacherCache
  from tunix.generate.sampler import CacheConfig as CacheConfig, Sampler as Sampler
  from tunix.generate.tokenizer_adapter import TokenizerAdapter as TokenizerAdapter
  from tunix.models.automodel import AutoModel as AutoModel
  from tunix.models.lora import LoraConfig as LoraConfig
  from tunix.rl.config import (
    ClusterConfig as ClusterConfig,
    RLTrainingConfig as RLTrainingConfig,
    Role as Role,
  )
  from tunix.rl.grpo.dapo_learner import (
    DAPOConfig as DAPOConfig,
    DAPOLearner as DAPOLearner,
  )
  from tunix.rl.grpo.drgrpo_learner import (
    DrGRPOConfig as DrGRPOConfig,
    DrGRPOLearner as DrGRPOLearner,
  )
  from tunix.rl.grpo.grpo_learner import (
    GRPOConfig as GRPOConfig,
    GRPOLearner as GRPOLearner,
  )
  from tunix.rl.ppo.ppo_learner import PPOConfig as PPOConfig, PPOLearner as PPOLearner
  from tunix.rl.rl_cluster import RLCluster as RLCluster
  from tunix.rl.rollout.base_rollout import RolloutConfig as RolloutConfig
  from tunix.sft.best import BestOptions as BestOptions
  from tunix.sft.checkpoint_manager import CheckpointManager as CheckpointManager
  from tunix.sft.dpo.dpo_trainer import (
    DPOTrainer as DPOTrainer,
    DpoTrainer as DpoTrainer,
    DPOTrainingConfig as DPOTrainingConfig,
    DpoTrainingConfig as DpoTrainingConfig,
    ORPOTrainer as ORPOTrainer,
    OrpoTrainer as OrpoTrainer,
    ORPOTrainingConfig as ORPOTrainingConfig,
    OrpoTrainingConfig as OrpoTrainingConfig,
  )
  from tunix.sft.dpo.kto_trainer import (
    KTOConfig as KTOConfig,
    KTOTrainer as KTOTrainer,
  )
  from tunix.sft.dpo.precomputed import (
    PrecomputedLogps as PrecomputedLogps,
  )
  from tunix.sft.dpo.preference_config import (
    PreferenceConfig as PreferenceConfig,
  )
  from tunix.sft.dpo.preference_trainer import (
    PreferenceTrainer as PreferenceTrainer,
  )
  from tunix.sft.dpo.reward_trainer import (
    RewardConfig as RewardConfig,
    RewardTrainer as RewardTrainer,
  )
  from tunix.sft.metrics_logger import (
    MetricsLogger as MetricsLogger,
    MetricsLoggerOptions as MetricsLoggerOptions,
  )
  from tunix.sft.peft_trainer import (
    PeftTrainer as PeftTrainer,
    PeftTrainerConfig as PeftTrainerConfig,
    TrainingConfig as TrainingConfig,
    TrainingInput as TrainingInput,
  )


def __getattr__(name: str) -> Any:
  if name not in _LAZY:
    raise AttributeError(f"module 'tunix' has no attribute {name!r}; it has {__all__}")
  return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
  return sorted(__all__)
