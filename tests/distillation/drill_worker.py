"""A job of the kill drills: python -m tests.distillation.drill_worker JOB FOLDER."""

import pathlib
import sys

import jax

from tests import optimizers, toys
from tests.distillation import trainers
from tests.generate.toy_ids import Ids
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import (
  FeatureProjectionStrategy,
  LogitStrategy,
  PolicyGradientStrategy,
)
from tunix.distillation.teacher_cache import TeacherCache
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import CheckpointOptions

STEPS = 36


def make(job: str, folder: pathlib.Path):
  """(trainer, data, evaluation) of a job, with "-lora" at its end or not."""
  name = job.removesuffix("-lora")
  student = toys.model(lora_rank=4 if job.endswith("-lora") else 0)
  options = {
    "max_steps": STEPS,
    "eval_every_n_steps": 6,
    "gradient_accumulation_steps": 2,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=3),
    "metrics_logging_options": MetricsLoggerOptions(folder / "logs"),
  }
  known, tx = trainers.teacher(), optimizers.adam(1e-3)
  if name in ("gkd", "policy-gradient"):
    gkd = LogitStrategy(divergence="jsd", beta=0.5, alpha=1.0, temperature=1.0)
    config = OnPolicyConfig(
      max_prompt_length=8,
      max_completion_length=6,
      on_policy_fraction=0.6 if name == "gkd" else 1.0,
      **options,
    )
    strategy = gkd if name == "gkd" else PolicyGradientStrategy()
    data = [trainers.prompts(i) for i in range(2 * STEPS)]
    trainer = OnPolicyDistillationTrainer(
      student, known, strategy, tx, config, tokenizer=Ids()
    )
    return trainer, data, data[:1]
  strategies = {
    "logit": lambda: LogitStrategy(),
    "cache": lambda: LogitStrategy(distill_top_k=5),
    "projection": lambda: FeatureProjectionStrategy(feature_layer=DecoderLayer),
  }
  if name == "cache":
    known = TeacherCache(folder / "cache", known, top_k=5, temperature=2.0)
  trainer = DistillationTrainer(
    student, known, strategies[name](), tx, TrainingConfig(**options)
  )
  return trainer, toys.batches(2 * STEPS), toys.batches(1)


def main() -> None:
  job, folder = sys.argv[1], pathlib.Path(sys.argv[2])
  # Compiling is most of the drill; equal programs give equal bits.
  jax.config.update("jax_compilation_cache_dir", str(folder.parent / "programs"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  trainer, data, evaluation = make(job, folder)
  print(f"starts from step {trainer.train_steps}", flush=True)
  trainer.train(data, evaluation)
  trainer.close()


if __name__ == "__main__":
  main()
