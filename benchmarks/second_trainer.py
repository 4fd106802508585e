"""Measures the first step of a second trainer in one process, against the first one's.

    python -m benchmarks.second_trainer [FOLDER]

With FOLDER, JAX keeps compiled programs there: run it twice for a warm cache. Prints
the seconds from the constructor to the loss, and the ratio.
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

SIZES = {
  "num_layers": 4,
  "vocab_size": 96,
  "embed_dim": 32,
  "hidden_dim": 64,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 8,
}


def first_step(seed: int) -> float:
  """Returns the seconds from the constructor to the loss of the first step."""
  model = AutoModel.from_config(ModelConfig(**SIZES), seed=seed)
  tokens = np.arange(1, 129, dtype=np.int32).reshape(8, 16) % 96
  begun = time.perf_counter()
  config = TrainingConfig(learning_rate=1e-3, pbar_description=None)
  trainer = PeftTrainer(model, training_config=config)
  float(trainer.train_step(TrainingInput(tokens, np.ones_like(tokens))))
  seconds = time.perf_counter() - begun
  trainer.close()
  return seconds


def main() -> None:
  if len(sys.argv) > 1:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  first, second = first_step(0), first_step(1)
  print(f"first {first:.3f} s, second {second:.3f} s, ratio {second / first:.3f}")


if __name__ == "__main__":
  main()
