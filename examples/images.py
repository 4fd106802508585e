"""Images with tunix: a small model learns to count shapes in drawn pictures.

    python examples/images.py --sft 45 --steps 60 --seeds 0 1 2 --plot rewards.png

The task and the model are those of `tunix.examples.shapes`. The model, vision tower
  included, is fine-tuned from random weights until it answers about half of the
  questions, then trained by GRPO. The accuracy is that of greedy answers to 200
  held-out pictures. For a model of yours give its folder or hub id instead of `fresh`:
  `tunix train --job=sft --model.path=FOLDER --data.train=FILE`.
"""

import argparse
import json
import pathlib
import tempfile
import time

import numpy as np

import tunix
from tunix.examples.shapes import ANSWER_LENGTH, PROMPT_LENGTH, Shapes, exact_match

ROWS, GENERATIONS = 32, 8
SFT_RATE, GRPO_RATE = 1e-3, 3e-4
_QUIET = {"progress_bar": False, "tensorboard": False}


def run(folder, seed, sft, steps):
  """Fine-tunes and runs GRPO; returns accuracies, and the rewards of every step."""
  task, start = Shapes(folder, seed), time.process_time()
  fresh = task.fresh_model()
  options = {"global_batch_size": ROWS, "seed": seed, "logging": _QUIET}
  tuned = tunix.sft(
    model={"path": fresh, "train_tower": True, "dtype": "float32"},
    data=task.lessons(sft * ROWS),
    output_dir=folder / "sft",
    max_length=PROMPT_LENGTH,
    max_steps=sft,
    learning_rate=SFT_RATE,
    **options,
  )
  out = {"seed": seed, "random": task.accuracy(fresh)}
  out["fine_tuned"] = task.accuracy(str(tuned.export))
  out["sft_cpu_s"] = round(time.process_time() - start)
  print(json.dumps(out), flush=True)
  if not steps:
    return out
  start = time.process_time()
  trained = tunix.grpo(
    model={"path": str(tuned.export), "train_tower": True, "dtype": "float32"},
    data=task.questions(steps * ROWS),
    rewards=exact_match,
    output_dir=folder / "grpo",
    algorithm={"num_generations": GENERATIONS, "beta": 0.0},
    rollout={
      "max_prompt_length": PROMPT_LENGTH,
      "max_tokens_to_generate": ANSWER_LENGTH,
    },
    max_steps=steps,
    learning_rate=GRPO_RATE,
    **options,
  )
  out["grpo"] = task.accuracy(str(trained.export))
  _, curve = trained.history["train/rewards/score/mean"]
  seconds = round(time.process_time() - start)
  return {**out, "grpo_cpu_s": seconds, "curve": [float(x) for x in curve]}


def plot(curves, file):
  """Plots means over ten steps, and the band of the seeds."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
  means = np.array([np.convolve(curve, np.full(10, 0.1), "valid") for curve in curves])
  x = np.arange(10, 10 + means.shape[1])
  axes.plot(x, means.mean(0))
  axes.fill_between(x, means.min(0), means.max(0), alpha=0.2)
  axes.set(xlabel="step", ylabel="mean reward of ten steps", ylim=(0, 1))
  axes.grid(alpha=0.3)
  pyplot.savefig(file, dpi=110)


def main():
  options = argparse.ArgumentParser(description="see the top of the file")
  options.add_argument("--seeds", type=int, nargs="+", default=[0])
  options.add_argument("--sft", type=int, default=45, help="steps of fine-tuning")
  options.add_argument("--steps", type=int, default=60, help="of GRPO")
  options.add_argument("--plot", type=pathlib.Path, help="a PNG to write")
  given, curves = options.parse_args(), []
  for seed in given.seeds:
    with tempfile.TemporaryDirectory() as folder:
      result = run(pathlib.Path(folder), seed, given.sft, given.steps)
    curves.append(result.pop("curve", []))
    print(json.dumps(result), flush=True)
  if given.plot:
    plot(curves, given.plot)


if __name__ == "__main__":
  main()
