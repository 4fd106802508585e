"""DPO with tunix: a small model learns which of two answers is the better one.

    python examples/dpo.py --output out

It sees two digits and two answers, the digits in order and the digits as they stand,
and learns to prefer the first. Nothing is sampled: the pairs are data. The same command
again goes on where it was stopped. A model of yours is loaded with
AutoModel.from_pretrained(folder); with adapters (lora.apply) it needs no second model
for the reference. `tunix train --job=dpo` does all of this from a file of pairs.
"""

import argparse
import pathlib

import numpy as np
import optax
from rl_loop import Characters, new_model

from tunix.sft.config import CheckpointOptions
from tunix.sft.dpo.dpo_trainer import DataInput, DPOTrainer, DPOTrainingConfig
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions, Mode

PAIRS = 32  # of a batch


class Text(Characters):
  """A tokenizer of any text: characters without an id of their own share the first."""

  def encode(self, text, **_):
    return [max(0, self.letters.find(letter)) for letter in text]


def questions(count, seed):
  """Batches of (digits as they stand, digits in order), which differ."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    high = rng.integers(1, 10, PAIRS)
    low = rng.integers(0, high)
    yield [f"{a}{b}" for a, b in zip(high, low)], [f"{b}{a}" for a, b in zip(high, low)]


def batches(count, seed):
  """Batches of pairs as text."""
  for shown, ordered in questions(count, seed):
    yield DataInput(
      prompts=[f"{digits}=" for digits in shown],
      chosen_responses=ordered,
      rejected_responses=shown,
    )


def options(output, steps):
  """What all trainers are told."""
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
  """Trains, and tells what was learnt on data that was held out."""
  trainer.train(train, held_out)
  found = logger.get_metric_history("", metric, Mode.EVAL)
  trainer.close()
  print(f"held-out {metric} {found[0]:.2f} -> {found[-1]:.2f}")


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
    new_model(seed=0),  # the reference: what the model was before
    optax.adam(1e-3),
    DPOTrainingConfig(beta=0.1, **options(args.output, args.steps)),
    Text(),
    metrics_logger=logger,
  )
  run(trainer, batches(args.steps, seed=0), list(batches(1, seed=1)), logger)


if __name__ == "__main__":
  main()
