"""Fine-tuning with tunix: a small model learns to answer, all its weights trained.

    python examples/sft.py --output out

It sees two digits and is shown the answer, the digits in order: "<73=37>". What
follows "=" is learnt. The same command again goes on where it was stopped; the result
is a Hugging Face folder. `tunix train --job=sft` does it from a file of conversations,
by the model's own tokenizer and chat template.
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


def as_they_stand(shown, ordered):
  return shown


def batches(count, seed, answer=in_order):
  """Rows "<73=37>" as token ids; what follows "=" is learnt."""
  for shown, ordered in questions(count, seed):
    answers = map(answer, shown, ordered)
    rows = [f"<{a}={b}>" for a, b in zip(shown, answers)]
    tokens = np.asarray([Characters().encode(row) for row in rows], np.int32)
    mask = np.zeros_like(tokens)
    mask[:, 4:] = 1
    yield {"input_tokens": tokens, "input_mask": mask}


def options(folder, steps):
  """What all trainers are told."""
  return {
    "max_steps": steps,
    "eval_every_n_steps": 20,
    "checkpoint_root_directory": str(folder),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=20),
    "pbar_description": None,
  }


def accuracy(model, answer=in_order):
  """The share of held-out questions that are answered as `answer` does."""
  ((shown, ordered),) = questions(1, seed=1)
  prompts = [f"{digits}=" for digits in shown]
  out = Sampler(model, Characters())(prompts, 3, 4)
  right = map(answer, shown, ordered)
  return sum(a == b for a, b in zip(out.text, right)) / PAIRS


def train(model, optimizer, folder, steps, logger, answer=in_order):
  """Trains in place; returns held-out losses before and after."""
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
  print(f"answers in order: {accuracy(model):.0%}")
  safetensors_saver.save_pretrained(model, args.output / "model")


if __name__ == "__main__":
  main()
