"""The same real records with the defaults of tunix and of TRL: CPU seconds and memory.

  python -m benchmarks.real sft --model SMOLLM2
  PYTHON_WITH_TRL benchmarks/real.py sft --lib trl --model SMOLLM2
  python -m benchmarks.real gradient --model SMOLLM2 --dtype bfloat16
  python -m benchmarks.real invariant --model SMOLLM2 --dtype bfloat16
  python -m benchmarks.real pairs sft --model SMOLLM2 --trl PYTHON_WITH_TRL -n 5

Jobs: sft, dpo and grpo, all with LoRA of rank 8, in float32 or, with `--dtype
bfloat16`, in bfloat16 (TRL then gets `bf16=True` besides). The 96 records have
log-normal lengths: 98 tokens on average with SmolLM2's tokenizer, 294 at most. 12 steps
of 8 records (`--steps`) are one pass over them; a step of grpo has 2 prompts with 8
completions of 64 tokens each, and beta 0 in both libraries. `cpu_s` is the CPU time
from step 3 on, with the compilations that fall into it; `wall_s` is the time from the
first import to the end of the last step. `pairs` runs the libraries in turn, each in a
fresh process. `gradient` prints the median seconds and CPU seconds of five gradients of
all weights, for 4 rows of 256 tokens with all logits in memory. `invariant` computes
the gradient of the log-probabilities of 4 completions of 128 tokens to one prompt of
128 tokens: with a model, with its shared prompt, and with the batch-invariant model.
It prints seconds (`wall_s`) and CPU seconds (`cpu_s`) of one gradient, and the ratios
of the batch-invariant model's to those of the others.
"""

import argparse
import json
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

START = time.time()
LEFT_OUT = 2
COMPLETIONS, NEW_TOKENS, PROMPTS = 8, 64, 2
JOBS = ("sft", "dpo", "grpo", "gradient", "invariant", "pairs")
VOCABULARY = (
  "printer invoice login delay refund screen battery order parcel account update error "
  "password device network cable shipment meeting report customer"
)


def texts():
  """Yields 96 pairs of a question and an answer."""
  draw, words = random.Random(7), VOCABULARY.split()
  for _ in range(96):
    count = min(400, max(8, int(draw.lognormvariate(3.6, 0.8))))
    sizes = count, max(3, count // 3)
    yield tuple(" ".join(draw.choice(words) for _ in range(size)) for size in sizes)


def records(job):
  """Returns the records of a job, in the form of both libraries."""
  out = []
  for question, answer in texts():
    user = {"role": "user", "content": question}
    said = {"role": "assistant", "content": answer}
    other = {"role": "assistant", "content": answer[::-1]}
    out.append(
      {
        "sft": {"messages": [user, said]},
        "dpo": {"prompt": [user], "chosen": [said], "rejected": [other]},
        "grpo": {"prompt": [user]},
      }[job]
    )
  return out


def reward(completions, **columns):
  """Returns the share of the letter e in each completion."""
  del columns
  contents = [x if isinstance(x, str) else x[0]["content"] for x in completions]
  return [text.count("e") / max(1, len(text)) for text in contents]


def by_tunix(job, model, folder, steps, dtype):
  """Trains with the command, and returns the CPU time after each step."""
  import jax

  from tunix.cli import main

  data = folder / "records.jsonl"
  data.write_text("".join(json.dumps(record) + "\n" for record in records(job)))
  marks = {}

  def mark(event, value, **more):
    del value
    if event == ("train/rewards/score/mean" if job == "grpo" else "train/loss"):
      marks[more["step"]] = time.process_time()

  jax.monitoring.register_scalar_listener(mark)
  settings = {
    "model.path": model,
    "model.dtype": dtype,
    "data.train": data,
    "lora.rank": 8,
    "training.global_batch_size": PROMPTS if job == "grpo" else 8,
    "training.max_steps": steps,
    "output_dir": folder / "out",
  }
  if job == "grpo":
    settings |= {
      "algorithm.beta": 0,
      "algorithm.num_generations": COMPLETIONS,
      "rollout.max_tokens_to_generate": NEW_TOKENS,
      "rollout.eos_tokens": "[49151]",  # an id that is hardly drawn
      "rollout.max_prompt_length": 1024,
      "reward.functions": f"[{pathlib.Path(__file__).absolute()}:reward]",
    }
  words = [f"--{key}={value}" for key, value in settings.items()]
  main.main(["train", f"--job={job}", *words])
  return [marks[step] for step in sorted(marks)]


def by_trl(job, model, folder, steps, dtype):
  """Trains with TRL, and returns the CPU time after each step."""
  import torch
  import trl
  from datasets import Dataset
  from peft import LoraConfig
  from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

  marks = []

  class Marks(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
      marks.append(time.process_time())

  options = {
    "output_dir": str(folder),
    "per_device_train_batch_size": PROMPTS * COMPLETIONS if job == "grpo" else 8,
    "max_steps": steps,
    "learning_rate": 1e-5,
    "bf16": dtype == "bfloat16",
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
  }
  more = {"processing_class": AutoTokenizer.from_pretrained(model)}
  if job == "grpo":
    options |= {
      "num_generations": COMPLETIONS,
      "max_completion_length": NEW_TOKENS,
      "generation_kwargs": {"min_new_tokens": NEW_TOKENS},
    }
    more["reward_funcs"] = reward
  else:
    options["max_length"] = 1024
  name = job.upper()
  trainer = getattr(trl, f"{name}Trainer")(
    AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)),
    args=getattr(trl, f"{name}Config")(**options),
    train_dataset=Dataset.from_list(records(job)),
    peft_config=LoraConfig(r=8, lora_alpha=8, target_modules="all-linear"),
    **more,
  )
  trainer.add_callback(Marks())
  trainer.train()
  return marks


def pairs(args):
  """Runs both libraries in turn and prints the ratios of their figures."""
  pythons = {"tunix": sys.executable, "trl": args.trl}
  results = {lib: [] for lib in pythons}
  for _ in range(args.n):
    for lib, python in pythons.items():
      words = [python, __file__, args.what, "--lib", lib, "--model", args.model]
      words += ["--steps", str(args.steps), "--dtype", args.dtype]
      out = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
      results[lib].append(json.loads(out.splitlines()[-1]))
      print(out.splitlines()[-1], flush=True)
  print_ratios(results, ("cpu_s", "wall_s", "peak_mb"))


def gradient(model, dtype):
  """Prints the seconds of the gradient of all weights."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from tunix.models.automodel import AutoModel

  module = AutoModel.from_pretrained(model, dtype=dtype)
  ids = jax.random.randint(jax.random.key(0), (4, 256), 0, 40_000)
  places = jnp.broadcast_to(jnp.arange(256), ids.shape)

  def loss(module):
    logits = module(ids, places)[0].astype(jnp.float32)[:, :-1]
    logps = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logps, ids[:, 1:, None], axis=2))

  run = nnx.jit(nnx.value_and_grad(loss))
  jax.block_until_ready(run(module))
  figures = []
  for _ in range(5):
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(module))
    figures.append((time.perf_counter() - wall, time.process_time() - cpu))
  wall, cpu = map(statistics.median, zip(*figures))
  print(f"{dtype}, jax {jax.__version__}: {wall:.2f} s, {cpu:.2f} CPU s")


def invariant(model, dtype, n):
  """Prints the cost of a gradient of a batch-invariant model."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from tunix.generate import scoring
  from tunix.models.automodel import AutoModel

  def run_of(is_invariant, group_size):
    options = {"dtype": dtype, "batch_invariant": is_invariant}
    module = AutoModel.from_pretrained(model, **options)
    ids = jax.random.randint(jax.random.key(0), (5, 128), 0, 40_000)
    prompts, whole = jnp.broadcast_to(ids[4], (4, 128)), jnp.ones((4, 128), bool)
    rows = prompts, whole, ids[:4], whole

    def loss(module):
      scores = scoring.score_completions(module, *rows, group_size=group_size)
      return jnp.mean(scores.logps)

    step = nnx.jit(nnx.value_and_grad(loss))
    return lambda: jax.block_until_ready(step(module))

  runs = {"plain": run_of(False, 1), "shared prompt": run_of(False, 4)}
  runs["batch-invariant"] = run_of(True, 1)
  figures = {name: [] for name in runs}
  for _ in range(n + 1):  # the first ones compile
    for name, run in runs.items():
      wall, cpu = time.perf_counter(), time.process_time()
      run()
      seconds = time.perf_counter() - wall, time.process_time() - cpu
      figures[name].append(dict(zip(("wall_s", "cpu_s"), seconds)))
  figures = {name: seconds[1:] for name, seconds in figures.items()}
  for name in ("plain", "shared prompt"):
    pair = {key: figures[key] for key in (name, "batch-invariant")}
    print_ratios(pair, ("wall_s", "cpu_s"))


def print_ratios(results, keys):
  """Prints the medians of two groups of runs, and the range of single ratios."""
  first, second = results
  for key in keys:
    ours, theirs = ([one[key] for one in runs] for runs in results.values())
    ratios = sorted(b / a for a, b in zip(ours, theirs))
    both = statistics.median(ours), statistics.median(theirs)
    print(
      f"{key}: {first} {both[0]:.4g}, {second} {both[1]:.4g}; {second} / {first} "
      f"{both[1] / both[0]:.2f} (pairs {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("job", choices=JOBS)
  parser.add_argument("what", nargs="?", choices=("sft", "dpo", "grpo"))
  parser.add_argument("--lib", choices=("tunix", "trl"), default="tunix")
  parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
  parser.add_argument("--trl", help="of pairs: an interpreter that has TRL")
  parser.add_argument("-n", type=int, default=5, help="of pairs and invariant")
  parser.add_argument("--steps", type=int, default=12)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  args = parser.parse_args()
  if args.job == "pairs":
    pairs(args)
    return
  if args.job == "gradient":
    gradient(args.model, args.dtype)
    return
  if args.job == "invariant":
    invariant(args.model, args.dtype, args.n)
    return
  run = {"tunix": by_tunix, "trl": by_trl}[args.lib]
  with tempfile.TemporaryDirectory() as folder:
    marks = run(args.job, args.model, pathlib.Path(folder), args.steps, args.dtype)
  assert len(marks) == args.steps, marks
  figures = {
    "job": args.job,
    "lib": args.lib,
    "dtype": args.dtype,
    "cpu_s": round(marks[-1] - marks[LEFT_OUT - 1], 2),
    "wall_s": round(time.time() - START, 1),
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
  }
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
