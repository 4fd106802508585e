"""Runs one training job of the kill drills: python -m tests.drill_worker JOB FOLDER."""

import json
import pathlib
import sys

from tests import optimizers, toys, toys_text
from tunix.data import formats, pipeline
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import CheckpointOptions, PeftTrainer, TrainingConfig

LENGTH = 64


def chat_dataset(folder: pathlib.Path, *, packing: bool):
  """(train, eval) Grain datasets over a small file of chat records."""
  tokenizer = toys_text.chat_tokenizer("chatml")
  path = folder / "chat.jsonl"
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(300)))
  records = formats.JsonlRecords(path)
  options = {"batch_size": 8, "max_length": LENGTH, "overlong": "truncate"}
  train = pipeline.build_dataset(
    records, tokenizer, packing=packing, shuffle=True, num_epochs=None, **options
  )
  return (
    train,
    [
      b
      for b, _ in zip(
        pipeline.build_dataset(records, tokenizer, shuffle=False, **options), range(2)
      )
    ],
    tokenizer,
  )


def record(i: int) -> dict:
  words = " ".join(toys_text.WORDS).split()
  answer = " ".join(words[i % len(words) :][: 3 + i % 9])
  question = f"what is the sum of {i} and {i % 7}?"
  return {"prompt": question, "response": answer}


def trainer_for(job: str, folder: pathlib.Path) -> tuple[PeftTrainer, object, object]:
  """The trainer and data of a job: 'full' or 'lora', with '-packed'."""
  train, evaluation, tokenizer = chat_dataset(folder, packing="packed" in job)
  model = toys.model(
    vocab_size=tokenizer.vocab_size,
    embed_dim=64,
    hidden_dim=128,
    head_dim=16,
    lora_rank=4 if "lora" in job else 0,
  )
  config = TrainingConfig(
    max_steps=36,
    eval_every_n_steps=4,
    gradient_accumulation_steps=2,
    checkpoint_root_directory=str(folder / "checkpoints"),
    checkpointing_options=CheckpointOptions(save_every_n_steps=3),
    metrics_logging_options=MetricsLoggerOptions(folder / "logs"),
  )
  return PeftTrainer(model, optimizers.adamw(1e-3), config), train, evaluation


def main() -> None:
  job, folder = sys.argv[1], pathlib.Path(sys.argv[2])
  trainer, train, evaluation = trainer_for(job, folder)
  print(f"starts from step {trainer.train_steps}", flush=True)
  trainer.train(train, evaluation)
  trainer.close()


if __name__ == "__main__":
  main()
