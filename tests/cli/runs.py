"""A tiny model folder and data files, and the command run in this process."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp

from tests import forks, toys_text
from tunix.cli import main as cli
from tunix.models import safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig

ROOT = pathlib.Path(__file__).parent.parent.parent

QUESTIONS = [
  ("How many days are in a week?", "There are seven days in a week."),
  ("What is the sum of two and three?", "The teacher answers that it is five."),
  ("Please write about the sea.", "The sea is wide, the sea is deep."),
  ("Who runs slowly past the old mill?", "The river runs slowly past the old mill."),
]


def write_model(folder):
  """A two-layer Llama with the toy tokenizer, as a Hugging Face folder."""
  tokenizer = toys_text.chat_tokenizer("chatml")
  config = ModelConfig(
    num_layers=2,
    vocab_size=tokenizer.vocab_size,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
  )
  model = AutoModel.from_config(config, seed=3, dtype=jnp.float32)
  safetensors_saver.save_pretrained(
    model, folder, hf_fields={"eos_token_id": tokenizer.eos_id()}
  )
  tokenizer.save(folder)
  return folder


def write_records(file, count=16, start=0):
  """Chat records, different ones for every start."""
  lines = []
  for i in range(start, start + count):
    question, answer = QUESTIONS[i % len(QUESTIONS)]
    messages = [
      {"role": "user", "content": f"{question} {i}"},
      {"role": "assistant", "content": f"{answer} {i}"},
    ]
    lines.append(json.dumps({"messages": messages}))
  pathlib.Path(file).write_text("\n".join(lines) + "\n")
  return file


def arguments(**keys):
  """training__max_steps=3 -> --training.max_steps=3"""
  return [f"--{name.replace('__', '.')}={value}" for name, value in keys.items()]


def training(keys):
  """A function: output folder -> the command of a run as a process of its own."""

  def command(folder):
    argv = arguments(**(keys | {"output_dir": folder}))
    return [sys.executable, "-m", "tunix.cli.main", "train", *argv]

  return command


def tunix(*argv):
  """The exit code of the command, run in this process."""
  return cli.main([str(word) for word in argv])


def spawn(*argv, max_file_blocks=None):
  """The command in a fork; `max_file_blocks`: no file can grow beyond this many blocks
  of 512 bytes, as if the disk were full, in an interpreter of its own."""
  command = [sys.executable, "-m", "tunix.cli.main", *map(str, argv)]
  env, popen = dict(os.environ), forks.popen
  if max_file_blocks is not None:
    command = ["sh", "-c", f'ulimit -f {max_file_blocks}; exec "$@"', "sh", *command]
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # JAX complains when it cannot write
    popen = subprocess.Popen
  return popen(
    command,
    cwd=ROOT,
    env=env,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def without_progress(stderr):
  """What a run wrote to standard error besides its lines of progress."""
  lines = stderr.splitlines(keepends=True)
  return "".join(
    x for x in lines if not re.match(r"\w+: (step \d|compiling|evaluating|sampling)", x)
  )


def metrics(output_dir, mode="train"):
  """{step: record} of a run's metrics file."""
  lines = (pathlib.Path(output_dir) / "logs" / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  return {r["step"]: r for r in records if r["mode"] == mode}
