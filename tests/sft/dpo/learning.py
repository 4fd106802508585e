"""A preference of style that can be learned: python -m tests.sft.dpo.learning [NAME].

Every word has a plain and a formal form. The prompt is six words, an answer says them
again, each in one of its forms; of two answers the one with more formal words is
chosen. The model is first taught answers with forms drawn at random, so that it is at
chance.
"""

import functools
import json
import sys
import time
from typing import Any

import numpy as np

from tests import optimizers, toys
from tunix.models import heads
from tunix.sft.dpo.dpo_trainer import (
  DPOTrainer,
  DPOTrainingConfig,
  ORPOTrainer,
  ORPOTrainingConfig,
)
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

WORDS, LENGTH, EOS = 16, 6, 1
PLAIN, FORMAL = 2, 2 + WORDS  # the first id of each form
VOCAB = 2 + 2 * WORDS
ROWS, TAUGHT_STEPS = 32, 250

# name -> (trainer, settings, learning rate, steps)
RUNS: dict[str, tuple[Any, Any, float, int]] = {
  "dpo": (DPOTrainer, DPOTrainingConfig(beta=1.0, pbar_description=None), 1e-4, 60),
  "orpo": (
    ORPOTrainer,
    ORPOTrainingConfig(lambda_orpo=1.0, pbar_description=None),
    1e-3,
    120,
  ),
  "simpo": (
    PreferenceTrainer,
    PreferenceConfig(
      loss="simpo", beta=2.0, options={"gamma": 0.5}, pbar_description=None
    ),
    1e-4,
    80,
  ),
  "kto": (KTOTrainer, KTOConfig(beta=0.5, pbar_description=None), 1e-4, 120),
  "reward": (RewardTrainer, RewardConfig(pbar_description=None), 1e-3, 150),
}


def model():
  return toys.model(vocab_size=VOCAB, embed_dim=64, hidden_dim=128, head_dim=16)


def answers(rng, words: np.ndarray, formal: np.ndarray) -> np.ndarray:
  """The words, in their formal form where asked, and EOS."""
  said = words + np.where(formal, FORMAL, PLAIN)
  return np.pad(said, ((0, 0), (0, 1)), constant_values=EOS).astype(np.int32)


def pairs(seed: int, rows: int = ROWS) -> dict[str, np.ndarray]:
  """Pairs of answers with different numbers of formal words."""
  rng = np.random.default_rng(seed)
  words = rng.integers(0, WORDS, (rows, LENGTH))
  counts = np.stack([rng.permutation(LENGTH + 1)[:2] for _ in range(rows)])
  forms = [
    np.stack([rng.permutation(LENGTH) < n for n in column])
    for column in (counts.max(1), counts.min(1))
  ]
  prompts = np.pad(words + PLAIN, ((0, 0), (0, 1))).astype(np.int32)  # 0 ends it
  out = {"prompt_ids": prompts, "prompt_mask": np.ones_like(prompts)}
  for name, formal in zip(("chosen", "rejected"), forms):
    out[f"{name}_ids"] = answers(rng, words, formal)
    out[f"{name}_mask"] = np.ones_like(out[f"{name}_ids"])
  return out


def labelled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The answers of pairs, one by one, chosen and rejected in turn."""
  out = {k: np.repeat(batch[k], 2, axis=0) for k in ("prompt_ids", "prompt_mask")}
  for part in ("ids", "mask"):
    both = np.stack([batch[f"{n}_{part}"] for n in ("chosen", "rejected")], axis=1)
    out[f"completion_{part}"] = both.reshape(len(out["prompt_ids"]), -1)
  out["labels"] = np.arange(len(out["prompt_ids"])) % 2 == 0
  return out


def taught_batch(seed: int) -> dict[str, np.ndarray]:
  """Prompts with answers of random forms."""
  rng = np.random.default_rng(10_000 + seed)
  words = rng.integers(0, WORDS, (2 * ROWS, LENGTH))
  prompts = np.pad(words + PLAIN, ((0, 0), (0, 1))).astype(np.int32)
  said = answers(rng, words, rng.random(words.shape) < 0.5)
  mask = np.concatenate([np.zeros_like(prompts), np.ones_like(said)], axis=1)
  return {"input_tokens": np.concatenate([prompts, said], 1), "input_mask": mask}


@functools.cache
def base():
  """The model that answers in either form."""
  made = model()
  config = TrainingConfig(pbar_description=None)
  trainer = PeftTrainer(made, optimizers.adam(3e-3), config)
  trainer.train(taught_batch(seed) for seed in range(TAUGHT_STEPS))
  return made


def copy(source):
  from flax import nnx

  return nnx.clone(source)


def run(name: str) -> dict[str, dict[str, float]]:
  """Metrics on held-out pairs, before and after training."""
  kind, config, rate, steps = RUNS[name]
  needs_reference = name in ("dpo", "kto")
  policy, held_out = copy(base()), pairs(424_242, rows=512)
  if name == "reward":
    policy = heads.with_scores(policy)
  tx = optimizers.adam(rate)
  if name == "reward":
    trainer = kind(policy, tx, config)
  else:
    trainer = kind(policy, copy(base()) if needs_reference else None, tx, config)
  judge = trainer
  if name == "kto":  # of pairs, by the rewards that DPO reads
    plain = DPOTrainingConfig(pbar_description=None)
    judge = DPOTrainer(policy, copy(base()), optimizers.sgd(0.0), plain)
  before = judge.eval_step(held_out)
  batches = (pairs(seed) for seed in range(steps))
  trainer.train(map(labelled, batches) if name == "kto" else batches)
  return {"before": before, "after": judge.eval_step(held_out)}


def main() -> None:
  for name in sys.argv[1:] or RUNS:
    start = time.perf_counter()
    base()
    taught = time.perf_counter()
    found = run(name)
    seconds = [round(taught - start, 1), round(time.perf_counter() - taught, 1)]
    kept = {
      when: {k: round(v, 3) for k, v in metrics.items()}
      for when, metrics in found.items()
    }
    print(json.dumps({"name": name, "seconds": seconds, **kept}), flush=True)


if __name__ == "__main__":
  main()
