"""The jobs of docs/guides/laptop.md by TRL: the same data, steps and learning rates.

  python benchmarks/laptop_trl.py sft --model SMOLLM2 --data tickets/train.jsonl
  python benchmarks/laptop_trl.py dpo --model SMOLLM2 --data pairs/train.jsonl
  python benchmarks/laptop_trl.py grpo --model sums/export --data sums_1000.jsonl

This needs TRL and PEFT. It writes the adapter to `--out`, which `tunix eval --adapter`
measures, and prints the CPU seconds and the memory. The records of grpo have a prompt
and the right `answer`; they are scored as reasoning-gym scores sums. Settings that
examples/real_model does not name have TRL's defaults.
"""

import argparse
import json
import pathlib
import resource
import time

STEPS = {"sft": 50, "dpo": None, "grpo": 60}
RATES = {"sft": 1e-3, "dpo": 1e-4, "grpo": 1e-4}


def scores(completions, answer, **columns):
  """Returns each answer's share of the characters of the text that contains it."""
  del columns
  texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
  texts = [text.strip() for text in texts]
  return [
    len(a) / len(text) if text and a in text else 0.0
    for text, a in zip(texts, answer, strict=True)
  ]


def records(job, file):
  """Returns the records in TRL's form."""
  out = []
  for line in pathlib.Path(file).read_text().splitlines():
    row = json.loads(line)
    if job == "sft":
      reply = [{"role": "assistant", "content": row["response"]}]
      row = {"prompt": row["prompt"], "completion": reply}
    elif job == "dpo":
      names = "chosen", "rejected"
      replies = {x: [{"role": "assistant", "content": row[x]}] for x in names}
      row = {"prompt": row["prompt"], **replies}
    out.append(row)
  return out


def main():
  """Trains, saves the adapter and prints what it took."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("job", choices=STEPS)
  parser.add_argument("--model", required=True)
  parser.add_argument("--data", required=True)
  parser.add_argument("--out", default="trl")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--steps", type=int, help="default: as in examples/real_model")
  args = parser.parse_args()
  began = time.time()

  import datasets
  import peft
  import torch
  import trl
  from transformers import AutoModelForCausalLM, AutoTokenizer

  model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
  tokenizer = AutoTokenizer.from_pretrained(args.model)
  data = datasets.Dataset.from_list(records(args.job, args.data))
  shared = {
    "output_dir": args.out,
    "learning_rate": RATES[args.job],
    "per_device_train_batch_size": 8,
    "max_steps": args.steps or STEPS[args.job] or -1,
    "num_train_epochs": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": args.seed,
    "logging_steps": 5,
    "save_strategy": "no",
  }
  schedule = {"lr_scheduler_type": "cosine", "warmup_steps": 5}
  if args.job == "sft":
    config = trl.SFTConfig(**shared, **schedule, max_length=192)
    make, more = trl.SFTTrainer, {}
  elif args.job == "dpo":
    config = trl.DPOConfig(**shared, lr_scheduler_type="constant", max_length=192)
    make, more = trl.DPOTrainer, {}
  else:
    shared |= {"per_device_train_batch_size": 64, "lr_scheduler_type": "constant"}
    config = trl.GRPOConfig(
      **shared, num_generations=8, max_completion_length=8, beta=0.0, temperature=1.0
    )
    make, more = trl.GRPOTrainer, {"reward_funcs": scores}
  lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
  trainer = make(
    model=model,
    args=config,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=lora,
    **more,
  )
  trainer.train()
  trainer.save_model(args.out)
  used = resource.getrusage(resource.RUSAGE_SELF)
  print(
    json.dumps(
      {
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(time.time() - began, 1),
        "memory_gib": round(used.ru_maxrss / 2**20, 2),
        "steps": trainer.state.global_step,
      }
    )
  )


if __name__ == "__main__":
  main()
