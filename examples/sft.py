"""Full fine-tuning with tunix: a small model learns to sort digits.

    python examples/sft.py --output out

A row is two digits and the sorted digits, "<73=37>". The tokens after "=" are trained.
The same command resumes an interrupted run. The result is a Hugging Face folder. `tunix
train --job=sft` trains on a file of conversations with the model's tokenizer and chat
template.
"""

import numpy as np
import optax
from dpo import PAIRS, arguments, log, questions
from rl_loop import Characters, new_model

from tunix.generate.sampler import Sampler
from tunix.models import safetensors_saver
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig


def in_order(shown, ordered):
  return ordered


def unchanged(shown, ordered):
  return shown


def batches(count, seed, answer=in_order):
  """Yields batches of rows "<73=37>"; the mask is 1 after "="."""
  for shown, ordered in questions(count, seed):
    answers = map(answer, shown, ordered)
    rows = [f"<{a}={b}>" for a, b in zip(shown, answers)]
    tokens = np.asarray([Characters().encode(row) for row in rows], np.int32)
    mask = np.zeros_like(tokens)
    mask[:, 4:] = 1
    yield {"input_tokens": tokens, "input_mask": mask}


def options(folder, steps):
  """Returns the settings of all trainers."""
  return {
    "max_steps": steps,
    "eval_every_n_steps": 20,
    "checkpoint_root_directory": str(folder),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=20),
    "pbar_description": None,
  }


def accuracy(model, answer=in_order):
  """Returns the share of held-out questions with the answer of `answer`."""
  ((shown, ordered),) = questions(1, seed=1)
  prompts = [f"{digits}=" for digits in shown]
  out = Sampler(model, Characters())(prompts, 3, 4)
  right = map(answer, shown, ordered)
  return sum(a == b for a, b in zip(out.text, right)) / PAIRS


def train(model, optimizer, folder, steps, logger, answer=in_order):
  """Trains the model; returns the held-out losses before and after."""
  trainer = PeftTrainer(
    model, optimizer, TrainingConfig(**options(folder, steps)), logger
  )
  held_out = list(batches(1, seed=1, answer=answer))
  trainer.train(batches(steps, seed=0, answer=answer), held_out)
  loss = logger.get_metric_history("", "loss", Mode.EVAL)
  trainer.close()
  return loss[0], loss[-1]


def main():
  args = arguments()
  model = new_model(seed=0)
  first, last = train(
    model,
    optax.adam(2e-3),
    args.output / "checkpoints",
    args.steps,
    log(args.output),
  )
  print(f"held-out loss {first:.2f} -> {last:.2f}")
  print(f"sorted answers: {accuracy(model):.0%}")
  safetensors_saver.save_pretrained(model, args.output / "model")


if __name__ == "__main__":
  main()
