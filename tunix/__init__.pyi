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

__version__: str
