from tunix.cli.commands.export import (
  export as export,
)
from tunix.cli.commands.merge import (
  merge as merge,
)
from tunix.cli.one_call import (
  distill as distill,
  dpo as dpo,
  grpo as grpo,
  kto as kto,
  orpo as orpo,
  ppo as ppo,
  reward as reward,
  sft as sft,
)
from tunix.cli.run.result import (
  JobResult as JobResult,
)
from tunix.distillation.distillation_trainer import (
  DistillationTrainer as DistillationTrainer,
)
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig as OnPolicyConfig,
  OnPolicyDistillationTrainer as OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import (
  AttentionProjectionStrategy as AttentionProjectionStrategy,
  AttentionTransferStrategy as AttentionTransferStrategy,
  BaseStrategy as BaseStrategy,
  FeaturePoolingStrategy as FeaturePoolingStrategy,
  FeatureProjectionStrategy as FeatureProjectionStrategy,
  LogitStrategy as LogitStrategy,
  PolicyGradientStrategy as PolicyGradientStrategy,
)
from tunix.distillation.teacher_cache import (
  TeacherCache as TeacherCache,
)
from tunix.distillation.teachers import (
  SelfTeacher as SelfTeacher,
  Teachers as Teachers,
  TextTeacher as TextTeacher,
)
from tunix.generate.sampler import (
  CacheConfig as CacheConfig,
  Sampler as Sampler,
)
from tunix.generate.scoring import (
  score_completions as score_completions,
)
from tunix.generate.tokenizer_adapter import (
  TokenizerAdapter as TokenizerAdapter,
)
from tunix.models.automodel import (
  AutoModel as AutoModel,
)
from tunix.models.family import (
  Family as Family,
)
from tunix.models.lora import (
  LoraConfig as LoraConfig,
  load_adapter as load_adapter,
  save_adapter as save_adapter,
)
from tunix.models.safetensors_saver import (
  save_pretrained as save_pretrained,
)
from tunix.ops.reductions import (
  aggregate as aggregate,
  weighted_sum as weighted_sum,
)
from tunix.rl.config import (
  ClusterConfig as ClusterConfig,
  RLTrainingConfig as RLTrainingConfig,
  Role as Role,
)
from tunix.rl.env.config import (
  EpisodeConfig as EpisodeConfig,
)
from tunix.rl.env.env import (
  EnvGroup as EnvGroup,
  StepResult as StepResult,
)
from tunix.rl.env.tool_env import (
  ToolEnv as ToolEnv,
)
from tunix.rl.experience.samples import Samples as Samples
from tunix.rl.grpo.dapo_learner import (
  DAPOConfig as DAPOConfig,
  DAPOLearner as DAPOLearner,
)
from tunix.rl.grpo.drgrpo_learner import (
  DrGRPOConfig as DrGRPOConfig,
  DrGRPOLearner as DrGRPOLearner,
)
from tunix.rl.grpo.grpo_learner import (
  CISPOConfig as CISPOConfig,
  GRPOConfig as GRPOConfig,
  GRPOLearner as GRPOLearner,
  GSPOConfig as GSPOConfig,
  MaxRLConfig as MaxRLConfig,
  SAPOConfig as SAPOConfig,
)
from tunix.rl.grpo.reinforce_pp_learner import (
  ReinforcePlusPlusConfig as ReinforcePlusPlusConfig,
  ReinforcePlusPlusLearner as ReinforcePlusPlusLearner,
)
from tunix.rl.grpo.rloo_learner import (
  RLOOConfig as RLOOConfig,
  RLOOLearner as RLOOLearner,
)
from tunix.rl.grpo.sdpo_learner import (
  SDPOConfig as SDPOConfig,
  SDPOLearner as SDPOLearner,
)
from tunix.rl.ppo.ppo_learner import (
  PPOConfig as PPOConfig,
  PPOLearner as PPOLearner,
)
from tunix.rl.reward.judge import (
  Judge as Judge,
  PairJudge as PairJudge,
  Rubric as Rubric,
)
from tunix.rl.reward.rewards import RewardManager as RewardManager
from tunix.rl.rl_cluster import (
  RLCluster as RLCluster,
)
from tunix.rl.rl_learner import (
  RLLearner as RLLearner,
)
from tunix.rl.rollout.base_rollout import (
  BaseRollout as BaseRollout,
  RolloutConfig as RolloutConfig,
)
from tunix.sft.best import (
  BestOptions as BestOptions,
)
from tunix.sft.checkpoint_manager import (
  CheckpointManager as CheckpointManager,
)
from tunix.sft.config import (
  CheckpointOptions as CheckpointOptions,
)
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
from tunix.sft.hooks import (
  TrainingHooks as TrainingHooks,
)
from tunix.sft.metrics_logger import (
  MetricsLogger as MetricsLogger,
  MetricsLoggerOptions as MetricsLoggerOptions,
  Mode as Mode,
)
from tunix.sft.peft_trainer import (
  PeftTrainer as PeftTrainer,
  PeftTrainerConfig as PeftTrainerConfig,
  TrainingConfig as TrainingConfig,
  TrainingInput as TrainingInput,
)
from tunix.utils.mesh import (
  create_mesh as create_mesh,
)

__version__: str
