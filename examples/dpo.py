"""DPO with tunix: a small model learns which of two answers is better.

    python examples/dpo.py --output out

A record has two digits and two answers: the sorted digits, and the digits unchanged.
  The model learns to prefer the sorted ones. DPO samples nothing; the pairs are data.
  The same command resumes an interrupted run. For a model of yours use
  AutoModel.from_pretrained(folder); with adapters (lora.apply) it needs no second model
  as reference. `tunix train --job=dpo` trains on a file of pairs.
"""

import argparse
import pathlib

import numpy as np
import optax
from rl_loop import Characters, new_model

from tunix.sft.config import CheckpointOptions
from tunix.sft.dpo.dpo_trainer import DataInput, DPOTrainer, DPOTrainingConfig
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode

PAIRS = 32  # in a batch


class Text(Characters):
  """A tokenizer of any text; unknown characters have the id 0."""

  def encode(self, text, **_):
    return [max(0, self.letters.find(letter)) for letter in text]


def questions(count, seed):
  """Yields batches of (unsorted digits, sorted digits)."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    high = rng.integers(1, 10, PAIRS)
    low = rng.integers(0, high)
    yield [f"{a}{b}" for a, b in zip(high, low)], [f"{b}{a}" for a, b in zip(high, low)]


def batches(count, seed):
  """Yields batches of pairs as text."""
  for shown, ordered in questions(count, seed):
    yield DataInput(
      prompts=[f"{digits}=" for digits in shown],
      chosen_responses=ordered,
      rejected_responses=shown,
    )


def options(output, steps):
  """Returns the settings of all preference trainers."""
  return {
    "max_steps": steps,
    "eval_every_n_steps": 20,
    "max_prompt_length": 4,
    "max_response_length": 3,
    "checkpoint_root_directory": str(output / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=20),
    "pbar_description": None,
  }


def run(trainer, train, held_out, logger, metric="rewards/accuracy"):
  """Trains, and prints a metric on held-out data before and after."""
  trainer.train(train, held_out)
  values = logger.get_metric_history("", metric, Mode.EVAL)
  trainer.close()
  print(f"held-out {metric} {values[0]:.2f} -> {values[-1]:.2f}")


def log(output):
  return MetricsLogger(MetricsLoggerOptions(output / "logs"))


def arguments():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=60)
  return parser.parse_args()


def main():
  args = arguments()
  logger = log(args.output)
  trainer = DPOTrainer(
    new_model(seed=0),
    new_model(seed=0),  # the reference: the model before training
    optax.adam(1e-3),
    DPOTrainingConfig(beta=0.1, **options(args.output, args.steps)),
    Text(),
    metrics_logger=logger,
  )
  run(trainer, batches(args.steps, seed=0), list(batches(1, seed=1)), logger)


if __name__ == "__main__":
  main()
