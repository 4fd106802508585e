"""Distillation with tunix: a fresh model learns from the outputs of a trained one.

    python examples/distill.py --output out

A teacher first learns to sort two digits (the task of examples/rl_loop.py). The student
then trains on the same rows, with the teacher's probabilities of all tokens as targets
in addition to the right token. `tunix train --job=distill` trains on files.
"""

import optax
from dpo import arguments, log
from rl_loop import new_model
from sft import batches, options

from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer


def train(trainer, steps):
  trainer.train(batches(steps, seed=0), list(batches(1, seed=1)))
  trainer.close()


def main():
  args = arguments()
  teacher, student = new_model(seed=0), new_model(seed=1)
  taught = TrainingConfig(**options(args.output / "teacher", 4 * args.steps))
  train(PeftTrainer(teacher, optax.adam(2e-3), taught), 4 * args.steps)
  logger = log(args.output)
  trainer = DistillationTrainer(
    student,
    teacher,
    LogitStrategy(temperature=1.0, alpha=0.9),
    optax.adam(2e-3),
    TrainingConfig(**options(args.output / "checkpoints", args.steps)),
    logger,
  )
  train(trainer, args.steps)
  loss = logger.get_metric_history("", "loss", Mode.EVAL)
  print(f"held-out loss {loss[0]:.2f} -> {loss[-1]:.2f}")


if __name__ == "__main__":
  main()
