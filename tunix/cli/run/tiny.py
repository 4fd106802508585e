"""`tunix train --tiny`: two steps of a configuration at a size for this machine.

The model becomes the smallest of its family, saved as a checkpoint and loaded like the
real one. Lengths, batches, steps and mesh shrink with it, and the learning rate is
constant. Data, reward functions, losses, adapters, precision and all other settings
stay, so that an error which would stop a long run after an hour shows within a minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tunix.cli import config as config_lib
from tunix.cli.jobs.rl_settings import PromptSettings
from tunix.cli.jobs.table import JOBS
from tunix.cli.make.loading import ModelLoader
from tunix.cli.settings import keys, mesh as mesh_axes
from tunix.cli.settings.run import RunSettings
from tunix.generate.tokenizer import loading as tokenizer_loading
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import tiny as tiny_models
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.rl.config import PromptSizes
from tunix.rl.roles import REMOTE

_DEVICES = 8  # simulated devices on a machine with only a CPU
_STEPS = 2
_LENGTH = 256  # most tokens of a row or a prompt; a token is a byte
_NEW_TOKENS = 16
_SPECIAL = ("<pad>", "<begin>", "<end>")
# Prints the tool calls too: a template that drops them is an error for their records.
_TEMPLATE = (
  "{% for m in messages %}<begin>{{ m['role'] }}\n{{ m['content'] }}"
  "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}<end>{% endfor %}"
  "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)
# Keys that limit lengths, with their largest values here.
_LENGTHS = {
  "data.max_length": _LENGTH,
  "preference.max_prompt_length": _LENGTH // 2,
  "preference.max_response_length": _LENGTH // 2,
}
_ROLLOUT_LENGTHS = {
  "rollout.max_prompt_length": _LENGTH,
  "rollout.max_tokens_to_generate": _NEW_TOKENS,
}


def load(argv: Sequence[str]) -> RunSettings:
  """Returns the settings of a command line, made tiny; writes the tiny model.

  Raises:
    FileNotFoundError, ValueError: as for `config.load` and `layer`.
    OSError: the folder cannot be written.
  """
  return config_lib.load(argv, last=("--tiny", layer(config_lib.load(argv))))


def layer(config: RunSettings) -> dict[str, Any]:
  """Returns the nested keys that make a configuration tiny; writes the tiny model.

  The run's folder gets the suffix "-tiny", so that it never mixes with the real run.

  Raises:
    ValueError: output_dir is not set, or the sizes of the model are not known.
    OSError: the folder cannot be written.
  """
  if config.output_dir is None:
    raise ValueError("output_dir is not set. Give --output_dir=FOLDER, for FOLDER-tiny")
  _simulate_devices()
  output = f"{config.output_dir.rstrip('/')}-tiny"
  model = str(write_model(config, pathlib.Path(output) / "model"))
  devices, rollout = jax.device_count(), config.rollout_axes
  if rollout and devices > 1:
    rollout = fitted_mesh(rollout, devices // 2, fills=False)
    devices -= math.prod(rollout.values())
  mesh = fitted_mesh(config.mesh, devices)
  shards = _shards(mesh, devices)
  current = keys.flatten(config)
  values: dict[str, Any] = {
    "output_dir": output,
    "model": {"path": model, "name": None, "args": None, "attention": None},
    "tokenizer": {"path": None, "chat_template": None},
    "mesh": mesh,
    "training": _training(config, shards),
    # RL does not cut prompts: half a prompt is another question.
    "data": {
      "overlong": "drop" if isinstance(config.data, PromptSettings) else "truncate",
      "num_epochs": None,
    },
    # The schedule's lengths are those of a long run.
    "schedule": {"name": None, "args": None},
    "logging": {"wandb": False},
    "distributed": {"coordinator": None},
  }
  limits = dict(_LENGTHS)
  if JOBS[config.job].rollout(config) is not None:
    limits |= _ROLLOUT_LENGTHS
  changed = {
    key: min(current[key], most) for key, most in limits.items() if key in current
  }
  if "preference.max_prompt_length" in changed:
    changed["data.max_length"] = None  # the sum of the two lengths
  changed |= {key: model for key in keys.models(config) if key != "model.path"}
  sizes = [f"rl.{f.name}" for f in dataclasses.fields(PromptSizes)]
  changed |= {
    key: shards
    for key in sizes
    if key.endswith("_size") and current.get(key) is not None
  }
  if rollout:
    # On one device the actor's mesh samples.
    changed["rl.rollout_mesh"] = rollout if jax.device_count() > 1 else None
  if current.get("rollout.engine") == REMOTE:
    # The hosts have the real model, and may be sampling for a run.
    changed |= {"rollout.engine": "vanilla", "rl.rollout_hosts": []}
    changed["rollout.engine_options"] = None
  for key, value in changed.items():
    section, _, name = key.partition(".")
    values.setdefault(section, {})[name] = value
  return values


def write_model(config: RunSettings, folder: pathlib.Path) -> pathlib.Path:
  """Writes a checkpoint of the family's smallest model; returns its folder.

  The tokens of the model are bytes.

  Raises:
    ValueError: the sizes of the model are not known: it is a hub id that is not
      downloaded and resembles no preset.
    OSError: the folder cannot be written.
  """
  tokenizer = make_tokenizer()
  # A multiple of 64, so that eight devices divide the vocabulary.
  vocab_size = -(-tokenizer.vocab_size // 64) * 64
  sizes = tiny_models.shrink(ModelLoader(config).sizes(), vocab_size)
  sizes = dataclasses.replace(sizes, num_scores=None, attention="auto")
  model = AutoModel.from_config(sizes, seed=config.seed, dtype=sizes.dtype)
  ids = {
    "bos_token_id": tokenizer.bos_id(),
    "eos_token_id": tokenizer.eos_id(),
    "pad_token_id": tokenizer.pad_id(),
  }
  folder.mkdir(parents=True, exist_ok=True)
  save_pretrained(model, folder, hf_fields=ids)
  tokenizer.save(folder)
  return folder


def make_tokenizer() -> TokenizerAdapter:
  """Returns a tokenizer of bytes and special tokens, with a chat template."""
  pad, begin, end = _SPECIAL
  return TokenizerAdapter(
    tokenizer_loading.of_bytes(_SPECIAL),
    chat_template=_TEMPLATE,
    bos_token=begin,
    eos_token=end,
    pad_token=pad,
  )


def fitted_mesh(
  mesh: Mapping[str, int], devices: int, *, fills: bool = True
) -> dict[str, int]:
  """Returns the mesh with its largest axes halved until it fits the devices.

  The first axis that splits batches is multiplied by the devices that are left over,
  unless an axis has the size -1, which takes them already.

  Args:
    mesh: sizes by axis.
    devices: number of devices.
    fills: if False, devices may be left over.
  """
  sizes = dict(mesh)
  while (used := math.prod(max(1, size) for size in sizes.values())) > devices:
    largest = max(sizes, key=lambda axis: sizes[axis])
    sizes[largest] //= 2
  if fills and -1 not in sizes.values() and (splitting := mesh_axes.data_axes(sizes)):
    sizes[splitting[0]] *= devices // used
  return sizes


def _simulate_devices() -> None:
  """Makes one CPU count as 8 devices, unless JAX has started already."""
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", _DEVICES)


def _shards(mesh: Mapping[str, int], devices: int) -> int:
  """Returns the number of devices that split the batch axis, with -1 resolved."""
  named = math.prod(size for size in mesh.values() if size > 0)
  sizes = {a: n if n > 0 else devices // named for a, n in mesh.items()}
  return math.prod(sizes[axis] for axis in mesh_axes.data_axes(sizes))


def _training(config: RunSettings, shards: int) -> dict[str, Any]:
  """Returns the keys of two steps with one row per device in a micro-batch.

  A step has two micro-batches if it has several in the configuration.
  """
  training = config.training
  values: dict[str, Any] = {"max_steps": _STEPS, "global_batch_size": shards}
  if (rows := getattr(training, "micro_batch_size", None)) is not None:
    several = training.global_batch_size > rows
    values |= {"micro_batch_size": shards, "global_batch_size": shards * (1 + several)}
  if training.eval_batch_size is not None:
    values["eval_batch_size"] = shards
  if training.eval_every_n_steps is not None:
    values["eval_every_n_steps"] = 1
  return values
