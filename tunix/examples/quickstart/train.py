"""The two trainings of the quickstart, both by `tunix train`: sft, then grpo."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import jax

from tunix.cli import config as config_lib
from tunix.cli.commands import train as train_main
from tunix.cli.jobs import rl
from tunix.examples.quickstart import task
from tunix.examples.quickstart.settings import Settings
from tunix.examples.quickstart.task import QuickstartData
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import RopeConfig
from tunix.models.transformer.model import Transformer
from tunix.utils import io

# Optimizer steps and values, in order.
Series = Sequence[tuple[int, float]]

# What the curves show of a stage: {stage: metric}.
METRICS = {"sft": "loss", "grpo": rl.REWARD}

# Events of `jax.monitoring`, by which trainers announce their metrics: what is printed.
_ANNOUNCED = {
  "eval/loss": "held-out loss",
  "eval/rewards/score/mean": "held-out reward",
  "eval/pass@1": "held-out accuracy",
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
  ids = {
    "bos_token_id": tokenizer.bos_id(),
    "eos_token_id": tokenizer.eos_id(),
    "pad_token_id": tokenizer.pad_id(),
  }
  save_pretrained(model, settings.model, hf_fields=ids)
  tokenizer.save(settings.model)
  return sum(leaf.size for leaf in jax.tree.leaves(model))


def train(settings: Settings, data: QuickstartData, stage: str) -> None:
  """Writes the configuration of a stage, "sft" or "grpo", and does what `tunix train
  --config` does with it.

  Raises:
    Stopped: SIGINT or SIGTERM.
    OSError: the disk is full or not writable.
  """
  file = settings.config_file(stage)
  io.write_atomic(file, config_text(settings, data, stage).encode())
  train_main.run(config_lib.load(["--config", str(file)]))


def config_text(settings: Settings, data: QuickstartData, stage: str) -> str:
  """The configuration of a stage, as YAML; `tunix train --help` names the file that
  explains all keys."""
  return _CONFIGS[stage](settings, data)


def _yaml(value: pathlib.Path | tuple[str, ...]) -> str:
  # JSON's strings and lists are YAML as well, whatever characters a path has.
  return json.dumps(str(value.absolute()) if isinstance(value, pathlib.Path) else value)


def _sft(s: Settings, data: QuickstartData) -> str:
  return f"""\
# Teaches a fresh model to answer sums in brackets, until it half knows them.
job: sft
output_dir: {_yaml(s.run("sft"))}
seed: {s.seed}
model:
  path: {_yaml(s.model)}
data:
  train: {_yaml(data.path("sft"))}
  eval: {_yaml(data.path("sft_eval"))}
  max_length: {s.row_length}
  packing: true
optimizer:
  name: adamw
  args: {{b2: 0.98, weight_decay: 0.05}}
schedule:
  name: warmup_constant_schedule
  args: {{init_value: 0.0, warmup_steps: {max(1, round(0.1 * s.sft_steps))}}}
training:
  learning_rate: {s.sft_rate}
  max_steps: {s.sft_steps}
  global_batch_size: {s.sft_rows}
  eval_every_n_steps: {_a_fifth(s.sft_steps)}
logging:
  tensorboard: false
"""


def _grpo(s: Settings, data: QuickstartData) -> str:
  return f"""\
# Lets the model try, and reinforces what is right.
job: grpo
output_dir: {_yaml(s.run("grpo"))}
seed: {s.seed}
model:
  path: {_yaml(s.export("sft"))}
data:
  train: {_yaml(data.path("prompts"))}
  eval: {_yaml(data.path("prompts_eval"))}
algorithm:
  num_generations: {s.generations}
  beta: 0.0
  pass_threshold: {task.RIGHT}
rollout:
  max_prompt_length: {s.prompt_tokens}
  max_tokens_to_generate: {s.answer_tokens}
  eval_temperature: 0.0
reward:
  functions: {_yaml(task.REWARDS)}
  weights: {list(task.WEIGHTS)}
training:
  learning_rate: {s.grpo_rate}
  max_steps: {s.grpo_steps}
  global_batch_size: {s.prompts}
  eval_batch_size: {s.held_out}
  eval_every_n_steps: {_a_fifth(s.grpo_steps)}
samples:
  every_n_rollouts: {max(1, s.grpo_steps // 20)}
logging:
  tensorboard: false
"""


def _a_fifth(steps: int) -> int:
  return -(-steps // 5)


_CONFIGS: dict[str, Callable[[Settings, QuickstartData], str]] = {
  "sft": _sft,
  "grpo": _grpo,
}


def read_series(folder: pathlib.Path, metric: str) -> dict[str, Series]:
  """{"train": ..., "eval": ...}: steps and values of a metric in a run's
  `logs/metrics.jsonl`."""
  series: dict[str, list[tuple[int, float]]] = {"train": [], "eval": []}
  with (folder / "logs" / "metrics.jsonl").open() as file:
    for record in map(json.loads, file):
      if metric in record:
        series[record["mode"]].append((record["step"], float(record[metric])))
  return dict(series)


@contextlib.contextmanager
def progress_lines() -> Iterator[None]:
  """Prints every evaluation where no progress bar is drawn."""
  if sys.stderr.isatty():
    yield
    return

  def heard(event: str, value: float | int, **labels: str | int) -> None:
    if event in _ANNOUNCED:
      print(f"  step {labels['step']}: {_ANNOUNCED[event]} {value:.3f}", flush=True)

  jax.monitoring.register_scalar_listener(heard)
  try:
    yield
  finally:
    jax.monitoring.unregister_scalar_listener(heard)
