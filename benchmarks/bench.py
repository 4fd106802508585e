"""One measured job a process; prints one JSON line last.

  python -m benchmarks.bench sft [--lora 16] [--lib plain]
  python -m benchmarks.bench generate --batch 8
  python -m benchmarks.bench loss --vocab 256000 --layers 2 --batch 4 --length 512
  python -m benchmarks.bench shard --fsdp 4 --tp 2
  python -m benchmarks.bench compile --layers 32
  python -m benchmarks.bench load
  python -m benchmarks.bench pairs -n 5 --key cpu_median_s 'sft' 'sft --lib plain'

`--lib plain` is the hand-written limit of plain.py. The model is a random Qwen 3 of 58
million parameters, written to `--models` once. `pairs` runs two jobs in turn, each in a
fresh process, and prints the ratio of a figure with its spread: a median that is closer
to 1 than the spread is a tie.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

DEVICES = "--xla_force_host_platform_device_count=8"


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  jobs = ("sft", "generate", "loss", "shard", "compile", "load", "pairs")
  parser.add_argument("job", choices=jobs)
  parser.add_argument("commands", nargs="*", help="of pairs: two jobs")
  parser.add_argument("--lib", choices=("tunix", "plain"), default="tunix")
  parser.add_argument("--models", default=f"{tempfile.gettempdir()}/tunix-bench")
  parser.add_argument("--layers", type=int, default=8)
  parser.add_argument("--vocab", type=int, default=32000)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--length", type=int, default=256)
  parser.add_argument("--prompt", type=int, default=64)
  parser.add_argument("--new", type=int, default=128)
  parser.add_argument("--steps", type=int, default=6)
  parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights")
  parser.add_argument("--run", type=int, default=0, help="of loss: evaluations to time")
  parser.add_argument("--fsdp", type=int, default=8)
  parser.add_argument("--tp", type=int, default=1)
  parser.add_argument("-n", type=int, default=5, help="of pairs")
  parser.add_argument("--key", default="cpu_median_s", help="of pairs")
  return parser.parse_args()


def main() -> None:
  options = arguments()
  if options.job == "pairs":
    print(json.dumps(pairs(options)))
    return
  if options.job == "shard":
    os.environ["XLA_FLAGS"] = DEVICES  # before jax looks
  figures = globals()[f"job_{options.job}"](options)
  about = {"job": options.job, "lib": options.lib}
  print(json.dumps(about | figures))


def pairs(options: argparse.Namespace) -> dict:
  """A B A B ...; the ratio pair by pair."""
  first, second = options.commands

  def figure(command: str) -> float:
    argv = [sys.executable, "-m", "benchmarks.bench", *shlex.split(command)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])[options.key])

  ratios = []
  for number in range(options.n):
    a, b = figure(first), figure(second)
    ratios.append(a / b)
    print(f"pair {number + 1}: {a:.4g} / {b:.4g} = {a / b:.3f}", flush=True)
  return {
    "key": options.key,
    "min": round(min(ratios), 3),
    "median": round(statistics.median(ratios), 3),
    "max": round(max(ratios), 3),
  }


def library(options: argparse.Namespace):
  if options.lib == "plain":
    from benchmarks.plain import Plain

    return Plain()
  from benchmarks.adapter import Adapter

  return Adapter()


def model_folder(options: argparse.Namespace) -> str:
  """A random model in Hugging Face's form, written when it is not there yet."""
  folder = pathlib.Path(options.models) / f"qwen3-{options.layers}-{options.vocab}"
  if folder.exists():
    return str(folder)
  from tests.toys_text import chat_tokenizer
  from tunix.models import safetensors_saver
  from tunix.models.automodel import AutoModel
  from tunix.models.qwen3.model import ModelConfig

  config = ModelConfig(
    num_layers=options.layers,
    vocab_size=options.vocab,
    embed_dim=512 if options.vocab < 10**5 else 256,
    hidden_dim=1536 if options.vocab < 10**5 else 768,
    num_heads=8 if options.vocab < 10**5 else 4,
    num_kv_heads=4 if options.vocab < 10**5 else 2,
    head_dim=64,
    tie_embeddings=False,
  )
  model = AutoModel.from_config(config, seed=0, dtype="float32")
  safetensors_saver.save_pretrained(model, folder)
  chat_tokenizer().save(folder)
  return str(folder)


def token_ids(options: argparse.Namespace, *shape: int):
  import numpy as np

  rng = np.random.default_rng(0)
  return rng.integers(3, options.vocab, shape).astype(np.int32)


def peak_mb() -> int:
  import resource

  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def job_sft(options: argparse.Namespace) -> dict:
  """Adam steps on random rows: seconds and CPU seconds a step, losses, peak memory."""
  if options.steps < 3:
    raise SystemExit(f"--steps is {options.steps}: at least 3, the first compile")
  ids = token_ids(options, options.steps, options.batch, options.length)
  out = library(options).sft(model_folder(options), ids, options.lora)
  return {**out, "peak_rss_mb": peak_mb()}


def job_generate(options: argparse.Namespace) -> dict:
  """Greedy tokens a second, of all rows together."""
  import hashlib

  ids = token_ids(options, options.batch, options.prompt)
  out = library(options).generate(model_folder(options), ids, options.new)
  tokens = out.pop("tokens")
  out["tokens_sha256"] = hashlib.sha256(tokens.astype("int32").tobytes()).hexdigest()
  out["tokens_per_s"] = round(tokens.size / out["median_s"], 1)
  return out


def job_loss(options: argparse.Namespace) -> dict:
  """XLA's temporaries of loss and gradient, and CPU seconds of evaluations."""
  import jax

  loss, params = library(options).loss_and_params(model_folder(options))
  ids = jax.numpy.asarray(token_ids(options, options.batch, options.length))
  program = jax.jit(jax.value_and_grad(loss)).lower(params, ids).compile()
  seconds = []
  for _ in range(options.run + bool(options.run)):
    start = time.process_time()
    jax.block_until_ready(program(params, ids))
    seconds.append(time.process_time() - start)
  out = {"temp_mb": program.memory_analysis().temp_size_in_bytes >> 20}
  if seconds:
    out["cpu_median_s"] = round(statistics.median(seconds[1:]), 3)
  return out


def job_shard(options: argparse.Namespace) -> dict:
  """The train step on 8 simulated devices: temporaries of one, and collectives."""
  import jax

  mesh = jax.make_mesh((options.fsdp, options.tp), ("fsdp", "tp"))
  ids = token_ids(options, options.batch, options.length)
  lowered = library(options).lowered_sft(model_folder(options), mesh, ids, options.lora)
  program = lowered.compile()
  kinds = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
  found = re.findall(rf" ({kinds})(?:-start)?\(", program.as_text())
  plan = program.memory_analysis()
  return {
    "temp_mb": plan.temp_size_in_bytes >> 20,
    "arguments_mb": plan.argument_size_in_bytes >> 20,
    "collectives": collections.Counter(found),
  }


def job_compile(options: argparse.Namespace) -> dict:
  """Seconds to lower and compile the train step with scanned layers."""
  import jax
  import numpy as np
  import optax

  from tunix.models.automodel import AutoModel
  from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

  path = model_folder(options)
  model = AutoModel.from_pretrained(path, dtype="float32", scan_layers=True)
  trainer = PeftTrainer(model, optax.adamw(1e-4), TrainingConfig())
  ids = token_ids(options, options.batch, options.length)
  jax.block_until_ready(jax.tree.leaves(trainer.optimizer.opt_state))
  wall, cpu = time.perf_counter(), time.process_time()
  batch = {"input_tokens": ids, "input_mask": np.ones_like(ids)}
  trainer.lower_train_step(batch).compile()
  return {
    "compile_s": round(time.perf_counter() - wall, 2),
    "cpu_s": round(time.process_time() - cpu, 2),
  }


def job_load(options: argparse.Namespace) -> dict:
  """Best of five loads, beside the raw bytes (`--lib plain`)."""
  path = model_folder(options)
  runs = [library(options).load(path)["load_s"] for _ in range(5)]
  return {"load_s": min(runs), "peak_rss_mb": peak_mb()}


if __name__ == "__main__":
  main()
