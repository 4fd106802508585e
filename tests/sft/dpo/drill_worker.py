"""Runs one job of the kill drills: python -m tests.sft.dpo.drill_worker JOB FOLDER."""

import pathlib
import sys
from typing import Any

import jax
import numpy as np

from tests import optimizers, toys
from tests.sft.dpo import preferences
from tunix.models import heads
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import CheckpointOptions


def trainer(job: str, folder: pathlib.Path) -> Any:
  """The trainer of a job: "dpo", "dpo-lora", "aot-lora", "kto-lora" or "reward".

  With "-rows" pairs share rows.
  """
  job = job.removesuffix("-rows")
  sizes = {"num_layers": 4, "embed_dim": 128, "hidden_dim": 256, "head_dim": 32}
  name, lora = job.removesuffix("-lora"), job.endswith("-lora")
  model = toys.model(lora_rank=4 if lora else 0, **sizes)
  reference = None if lora or name == "reward" else toys.model(1, **sizes)
  options = {
    "eval_every_n_steps": 4,
    "gradient_accumulation_steps": 2,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=3),
    "metrics_logging_options": MetricsLoggerOptions(folder / "logs"),
  }
  tx = optimizers.adam(1e-3)
  if name == "reward":
    return RewardTrainer(heads.with_scores(model), tx, RewardConfig(**options))
  if name == "kto":
    return KTOTrainer(model, reference, tx, KTOConfig(**options))
  loss = "sigmoid" if name == "dpo" else name
  config = PreferenceConfig(loss=loss, **options)
  return PreferenceTrainer(model, reference, tx, config)


def _shared(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  (shared,) = preferences.shared(batch, rows=8)
  return shared


def main() -> None:
  job, folder = sys.argv[1], pathlib.Path(sys.argv[2])
  # Compiling is most of the drill; equal programs give equal bits.
  jax.config.update("jax_compilation_cache_dir", str(folder.parent / "programs"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  made = trainer(job, folder)
  print(f"starts from step {made.train_steps}", flush=True)
  batch = preferences.labelled if job.startswith("kto") else preferences.pairs
  make = lambda seed: batch(seed, rows=8, prompt=24, response=24)
  train, evaluation = ([make(seed) for seed in some] for some in (range(72), (90, 91)))
  if job.endswith("-rows"):
    train, evaluation = ([_shared(x) for x in some] for some in (train, evaluation))
  made.train(train, evaluation)
  made.close()


if __name__ == "__main__":
  main()
