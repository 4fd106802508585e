"""Learning rates with a real model: training loss and held-out loss of short runs.

  python -m benchmarks.rates --model SMOLLM2

Trains on the tickets of examples/real_model, without the instruction, in rows of about
75 tokens: `--steps` updates of `--rows` rows with each rate, for all weights and for
LoRA of rank 16, in float32 with a constant rate and the default optimizer. A line is
one run: the mean loss of its last five steps, and the loss of 8 other tickets before
the first step and after the last, in nats per token.
"""

import argparse
import json
import pathlib
import sys

RATES = {"lora": (2e-4, 1e-3, 1e-2, 1e-5), "full": (1e-5, 1e-4, 1e-3, 1e-6)}
HELD_OUT = 8


def records(count, seed):
  """Returns tickets with their fields, as plain texts."""
  sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "real_model"))
  import tickets

  return [
    {
      "prompt": f"{row['prompt'][1]['content']}\n",
      "completion": f"{row['response']}<|im_end|>",
    }
    for row in tickets.records(count, seed)
  ]


def main():
  """Trains with each rate."""
  import tunix

  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", required=True)
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--programs", help="folder of compiled programs")
  args = parser.parse_args()
  train, held_out = records(args.steps * args.rows, 1), records(HELD_OUT, 2)
  for kind, rates in RATES.items():
    for rate in rates:
      result = tunix.sft(
        model={"path": args.model, "dtype": "float32"},
        data={"train": train, "eval": held_out, "chat": False, "max_length": 96},
        lora={"rank": 16, "alpha": 32} if kind == "lora" else None,
        learning_rate=rate,
        global_batch_size=args.rows,
        max_steps=args.steps,
        compilation_cache=args.programs,
      )
      losses = result.history["train/loss"][1]
      line = {"kind": kind, "rate": rate, "last five": float(losses[-5:].mean())}
      line["held out"] = result.history["eval/loss"][1].tolist()
      print(json.dumps(line), flush=True)


if __name__ == "__main__":
  main()
