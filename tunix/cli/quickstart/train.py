"""The two trainings of the quickstart, both by `tunix train`: sft, then grpo."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator

import jax

from tunix.cli import config as config_lib, train_main
from tunix.cli.jobs import rl
from tunix.cli.plots import Series
from tunix.cli.quickstart import task
from tunix.cli.quickstart.data import QuickstartData
from tunix.cli.quickstart.settings import Settings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import RopeConfig
from tunix.models.transformer.model import Transformer
from tunix.utils import io

_WARMUP = 0.1  # share of the steps
_EVALUATIONS = 5

# What the curves show of a stage: {stage: metric}.
METRICS = {"sft": "loss", "grpo": rl.REWARD}

# All keys and their meanings: `tunix train --help` names the file.
_CONFIGS = {
  "sft": """\
# Teaches a fresh model to answer sums in brackets, until it half knows them.
job: sft
output_dir: {output_dir}
seed: {seed}
model:
  path: {model}
data:
  train: {train}
  eval: {eval}
  max_length: {row_length}
  packing: true
optimizer:
  name: adamw
  args: {{b2: 0.98, weight_decay: 0.05}}
schedule:
  name: warmup_constant_schedule
  args: {{init_value: 0.0, warmup_steps: {warmup}}}
training:
  learning_rate: {rate}
  max_steps: {steps}
  global_batch_size: {batch_size}
  eval_every_n_steps: {eval_every}
logging:
  tensorboard: false
""",
  "grpo": """\
# Lets the model try, and reinforces what is right.
job: grpo
output_dir: {output_dir}
seed: {seed}
model:
  path: {model}
data:
  train: {train}
  eval: {eval}
algorithm:
  num_generations: {generations}
  beta: 0.0
  pass_threshold: {right}
rollout:
  max_prompt_length: {prompt_tokens}
  max_tokens_to_generate: {answer_tokens}
  eval_temperature: 0.0
reward:
  functions: {functions}
  weights: {weights}
training:
  learning_rate: {rate}
  max_steps: {steps}
  global_batch_size: {batch_size}
  eval_batch_size: {held_out}
  eval_every_n_steps: {eval_every}
samples:
  every_n_rollouts: {samples_every}
logging:
  tensorboard: false
""",
}


def new_model(settings: Settings, vocab_size: int) -> Transformer:
  """A small Llama-style model with fresh weights."""
  config = ModelConfig(
    num_layers=settings.num_layers,
    vocab_size=vocab_size,
    embed_dim=settings.embed_dim,
    hidden_dim=settings.hidden_dim,
    num_heads=settings.num_heads,
    num_kv_heads=settings.num_heads,
    head_dim=settings.embed_dim // settings.num_heads,
    rope=RopeConfig(theta=10_000.0),
    tie_embeddings=True,
    max_position=2 * settings.row_length,
  )
  return AutoModel.from_config(config, seed=settings.seed)


def write_model(settings: Settings, tokenizer: TokenizerAdapter) -> int:
  """Saves a fresh model in Hugging Face's format; returns its parameters.

  Raises:
    OSError: the disk is full or not writable.
  """
  model = new_model(settings, tokenizer.vocab_size)
  roles = {"bos": tokenizer.bos_id(), "eos": tokenizer.eos_id()}
  roles["pad"] = tokenizer.pad_id()
  ids = {f"{role}_token_id": number for role, number in roles.items()}
  save_pretrained(model, settings.model, hf_fields=ids)
  tokenizer.save(settings.model)
  return sum(leaf.size for leaf in jax.tree.leaves(model))


def train(settings: Settings, data: QuickstartData, stage: str) -> train_main.Result:
  """Writes the configuration of a stage, "sft" or "grpo", and does what `tunix train
  --config` does with it.

  Raises:
    Stopped: SIGINT or SIGTERM.
    OSError: the disk is full or not writable.
  """
  file = settings.config_file(stage)
  io.write_atomic(file, config_text(settings, data, stage).encode())
  return train_main.run(config_lib.load(["--config", str(file)]))


def config_text(settings: Settings, data: QuickstartData, stage: str) -> str:
  """The configuration of a stage, as YAML."""
  s = settings
  steps = {"sft": s.sft_steps, "grpo": s.grpo_steps}[stage]
  name = {"sft": "sft", "grpo": "prompts"}[stage]
  values = {
    "output_dir": str(s.run(stage).absolute()),
    "seed": s.seed,
    "model": str({"sft": s.model, "grpo": s.export("sft")}[stage].absolute()),
    "train": str(data.path(name).absolute()),
    "eval": str(data.path(f"{name}_eval").absolute()),
    "steps": steps,
    "eval_every": -(-steps // _EVALUATIONS),
    "batch_size": {"sft": s.sft_rows, "grpo": s.prompts}[stage],
    "rate": {"sft": s.sft_rate, "grpo": s.grpo_rate}[stage],
    "warmup": max(1, round(_WARMUP * steps)),
    "row_length": s.row_length,
    "generations": s.generations,
    "right": task.RIGHT,
    "prompt_tokens": s.prompt_tokens,
    "answer_tokens": s.answer_tokens,
    "functions": task.REWARDS,
    "weights": task.WEIGHTS,
    "held_out": s.held_out,
    "samples_every": max(1, steps // 20),
  }
  # JSON's strings and lists are YAML as well, whatever characters a path has.
  text = {name: json.dumps(value) for name, value in values.items()}
  return _CONFIGS[stage].format(**text)


def read_series(folder: pathlib.Path, metric: str) -> dict[str, Series]:
  """{"train": ..., "eval": ...}: steps and values of a metric in a run's
  `logs/metrics.jsonl`."""
  found: dict[str, list[tuple[int, float]]] = {"train": [], "eval": []}
  with (folder / "logs" / "metrics.jsonl").open() as file:
    for line in file:
      record = json.loads(line)
      if metric in record:
        found[record["mode"]].append((record["step"], float(record[metric])))
  return dict(found)


@contextlib.contextmanager
def progress_lines() -> Iterator[None]:
  """Prints every evaluation where no progress bar is drawn: trainers announce their
  metrics to `jax.monitoring`."""
  shown = {
    "eval/loss": "held-out loss",
    "eval/rewards/score/mean": "held-out reward",
    "eval/pass@1": "held-out accuracy",
  }

  def heard(event: str, value: float | int, **labels: str | int) -> None:
    if event in shown:
      print(f"  step {labels['step']}: {shown[event]} {value:.3f}", flush=True)

  if sys.stderr.isatty():
    yield
    return
  jax.monitoring.register_scalar_listener(heard)
  try:
    yield
  finally:
    jax.monitoring.unregister_scalar_listener(heard)
