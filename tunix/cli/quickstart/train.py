"""The two trainings of the quickstart: a fresh model, then `tunix train` on it."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import sys
from typing import Any
from collections.abc import Iterator

import jax
import optax

from tunix.cli import config as config_lib, train_main
from tunix.cli.plots import Series
from tunix.cli.quickstart.data import QuickstartData
from tunix.cli.quickstart.settings import Settings
from tunix.data.formats import JsonlRecords
from tunix.data.pipeline import build_dataset
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import RopeConfig
from tunix.models.transformer.model import Transformer
from tunix.sft import metrics_logger as metrics
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils import io

_ADAM: dict[str, Any] = {"b2": 0.98, "weight_decay": 0.05}
_WARMUP = 0.05  # share of the steps
_FLOOR = 0.05  # last learning rate over the peak
_EVALUATIONS = 4

_FINETUNE = """\
# Teaches the pretrained model to describe a function from its signature.
# All keys and their meanings: `tunix train --help` names the file.
output_dir: {output_dir}
seed: {seed}
model:
  path: {model}
data:
  train: {train}
  eval: {eval}
  max_length: {max_length}
  packing: true
  overlong: drop
optimizer:
  name: adamw
  args: {optimizer}
schedule:
  name: warmup_cosine_decay_schedule
  args: {schedule}
training:
  learning_rate: {rate}
  max_steps: {steps}
  global_batch_size: {batch_size}
  eval_every_n_steps: {eval_every}
"""


def new_model(settings: Settings) -> Transformer:
  """A small Llama-style model with fresh weights."""
  config = ModelConfig(
    num_layers=settings.num_layers,
    vocab_size=settings.vocab_size,
    embed_dim=settings.embed_dim,
    hidden_dim=settings.hidden_dim,
    num_heads=settings.num_heads,
    num_kv_heads=settings.num_kv_heads,
    head_dim=settings.embed_dim // settings.num_heads,
    rope=RopeConfig(theta=10_000.0),
    tie_embeddings=True,
    max_position=4 * settings.row_length,
  )
  return AutoModel.from_config(config, seed=settings.seed)


def pretrain(
  settings: Settings, data: QuickstartData, tokenizer: TokenizerAdapter
) -> Transformer:
  """Trains a fresh model on running text and saves it in Hugging Face's format.

  Raises:
    Stopped: SIGINT or SIGTERM.
    OSError: the disk is full or not writable.
  """
  model = new_model(settings)
  steps = settings.pretrain_steps
  rate = optax.warmup_cosine_decay_schedule(
    **_schedule(steps, settings.pretrain_rate), peak_value=settings.pretrain_rate
  )
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, **_ADAM))
  logs = settings.pretrain / "logs"
  trainer = PeftTrainer(
    model,
    tx,
    TrainingConfig(
      max_steps=steps,
      eval_every_n_steps=_eval_every(steps),
      learning_rate=rate,
      pbar_description="pretraining",
    ),
    metrics.MetricsLogger(
      metrics.MetricsLoggerOptions(
        logs, backend_factories=[functools.partial(metrics.JsonlBackend, logs)]
      )
    ),
  )
  batches = functools.partial(
    build_dataset,
    tokenizer=tokenizer,
    batch_size=settings.batch_size,
    max_length=settings.row_length,
    packing=True,
    overlong="truncate",
    seed=settings.seed,
  )
  trainer.train(
    batches(JsonlRecords(data.path("pretrain")), num_epochs=None),
    batches(JsonlRecords(data.path("pretrain_eval")), shuffle=False),
  )
  trainer.close()
  tokenizer.save(settings.tokenizer)
  save_pretrained(
    model,
    settings.checkpoint,
    source=settings.tokenizer,
    hf_fields={
      "bos_token_id": tokenizer.bos_id(),
      "eos_token_id": tokenizer.eos_id(),
      "pad_token_id": tokenizer.pad_id(),
    },
  )
  return model


def finetune(settings: Settings, data: QuickstartData) -> train_main.Result:
  """Writes the configuration and does what `tunix train --config` does with it.

  Raises:
    Stopped: SIGINT or SIGTERM.
    OSError: the disk is full or not writable.
  """
  io.write_atomic(settings.config_file, _finetune_yaml(settings, data).encode())
  return train_main.run(config_lib.load(["--config", str(settings.config_file)]))


def _finetune_yaml(settings: Settings, data: QuickstartData) -> str:
  steps = settings.finetune_steps
  # JSON's strings and tables are YAML as well, whatever characters a path has.
  values = {
    "output_dir": str(settings.finetune.absolute()),
    "seed": settings.seed,
    "model": str(settings.checkpoint.absolute()),
    "train": str(data.path("finetune").absolute()),
    "eval": str(data.path("finetune_eval").absolute()),
    "max_length": settings.row_length,
    "optimizer": _ADAM,
    "schedule": _schedule(steps, settings.finetune_rate),
    "rate": settings.finetune_rate,
    "steps": steps,
    "batch_size": settings.batch_size,
    "eval_every": _eval_every(steps),
  }
  return _FINETUNE.format(**{name: json.dumps(v) for name, v in values.items()})


def _schedule(steps: int, peak: float) -> dict[str, Any]:
  return {
    "init_value": 0.0,
    "warmup_steps": max(1, round(_WARMUP * steps)),
    "decay_steps": max(2, steps),
    "end_value": _FLOOR * peak,
  }


def _eval_every(steps: int) -> int:
  return -(-steps // _EVALUATIONS)


def read_losses(folder: pathlib.Path) -> dict[str, Series]:
  """{"train": ..., "eval": ...}: steps and losses of a run's `logs/metrics.jsonl`."""
  losses: dict[str, list[tuple[int, float]]] = {"train": [], "eval": []}
  with (folder / "logs" / "metrics.jsonl").open() as file:
    for line in file:
      record = json.loads(line)
      if "loss" in record:
        losses[record["mode"]].append((record["step"], float(record["loss"])))
  return dict(losses)


@contextlib.contextmanager
def progress_lines() -> Iterator[None]:
  """Prints every evaluation where no progress bar is drawn: trainers announce their
  metrics to `jax.monitoring`."""

  def heard(event: str, value: float | int, **labels: str | int) -> None:
    if event == "eval/loss":
      print(f"  step {labels['step']}: held-out loss {value:.3f}", flush=True)

  if sys.stderr.isatty():
    yield
    return
  jax.monitoring.register_scalar_listener(heard)
  try:
    yield
  finally:
    jax.monitoring.unregister_scalar_listener(heard)
