"""`tunix train --tiny`: a configuration's own code path, at a size for this machine.

The model becomes the smallest of its family, saved as a checkpoint and loaded like the
real one; lengths, batches, steps and mesh shrink with it, and the rate is constant.
Data, reward functions, losses, adapters, precision and all else stay as they are, so
that what would fail on the chips after an hour fails here within a minute.
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
from tunix.cli.build import build, mesh as mesh_axes
from tunix.cli.jobs.rl import PromptSettings
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import keys
from tunix.cli.settings.run import RunSettings
from tunix.generate import tokenizer_loading
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import tiny as tiny_models
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.rl.config import PromptSizes

_DEVICES = 8  # simulated ones, where there is only a CPU
_STEPS = 2
_LENGTH = 256  # tokens, which are bytes, of a row or a prompt
_NEW_TOKENS = 16
_SPECIAL = ("<pad>", "<begin>", "<end>")
_TEMPLATE = (
  "{% for m in messages %}<begin>{{ m['role'] }}\n{{ m['content'] }}<end>{% endfor %}"
  "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)
# What names a model, besides model.path.
_ROLES = ("rl.reference", "rl.critic", "reward.model", "distill.teacher")
_PROMPTS = [field.name for field in dataclasses.fields(PromptSizes)]


def load(argv: Sequence[str]) -> RunSettings:
  """The settings that a command line describes, made tiny.

  Raises:
    FileNotFoundError, ValueError: see `config.load` and `layer`.
    OSError: the folder cannot be written.
  """
  return config_lib.load(argv, last=("--tiny", layer(config_lib.load(argv))))


def layer(config: RunSettings) -> dict[str, Any]:
  """The keys that make a configuration tiny, to be laid over it; writes the model.

  Returns: nested keys. The folder of the run is that of the configuration with "-tiny"
    behind it, so that neither is taken for the other.

  Raises:
    ValueError: no folder for the run, or a model whose sizes are not known.
    OSError: the folder cannot be written.
  """
  if config.output_dir is None:
    raise ValueError("output_dir is not set: give --output_dir=FOLDER, for FOLDER-tiny")
  _simulate()
  output = f"{config.output_dir.rstrip('/')}-tiny"
  model = str(write_model(config, pathlib.Path(output) / "model"))
  mesh = fitted_mesh(config.mesh, jax.device_count())
  # Half a prompt is another question.
  whole = isinstance(config.data, PromptSettings)
  values: dict[str, Any] = {
    "output_dir": output,
    "model": {"path": model, "name": None, "args": None, "attention": None},
    "tokenizer": {"path": None, "chat_template": None},
    "mesh": mesh,
    "training": _training(config, _shards(mesh)),
    "data": {"overlong": "drop" if whole else "truncate", "num_epochs": None},
    # Its steps are those of a long run.
    "schedule": {"name": None, "args": None},
    "logging": {"wandb": False},
    "distributed": {"coordinator": None},
  }
  limits = {
    "data.max_length": _LENGTH,
    "preference.max_prompt_length": _LENGTH // 2,
    "preference.max_response_length": _LENGTH // 2,
  }
  if JOBS[config.job].rollout(config) is not None:
    limits["rollout.max_prompt_length"] = _LENGTH
    limits["rollout.max_tokens_to_generate"] = _NEW_TOKENS
  for key, most in limits.items():
    if (length := _value(config, key)) is not None:
      _set(values, key, min(length, most))
  for key in _ROLES:
    if _value(config, key) not in (None, "actor"):
      _set(values, key, model)
  for name in _PROMPTS:
    if name.endswith("_size") and _value(config, f"rl.{name}") is not None:
      _set(values, f"rl.{name}", _shards(mesh))
  return values


def write_model(config: RunSettings, folder: pathlib.Path) -> pathlib.Path:
  """A checkpoint of the family's smallest model, whose tokens are bytes; the folder.

  Raises:
    ValueError: the sizes of the model are not known here: it is at the hub, and none of
      the presets is made like it.
    OSError: the folder cannot be written.
  """
  tokenizer = make_tokenizer()
  # As many words as eight devices divide.
  words = -(-tokenizer.vocab_size // 64) * 64
  sizes = tiny_models.shrink(build.sizes_of_model(config), words)
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
  """Every byte is a token, and so is each end of a turn; with a chat template."""
  pad, begin, end = _SPECIAL
  return TokenizerAdapter(
    tokenizer_loading.of_bytes(_SPECIAL),
    chat_template=_TEMPLATE,
    bos_token=begin,
    eos_token=end,
    pad_token=pad,
  )


def fitted_mesh(mesh: Mapping[str, int], devices: int) -> dict[str, int]:
  """The axes of a mesh, the largest halved until as many devices hold it; of devices
  that are left over the first axis that splits batches takes its share, as an axis of
  size -1 does."""
  sizes = dict(mesh)
  while (used := math.prod(max(1, size) for size in sizes.values())) > devices:
    largest = max(sizes, key=lambda axis: sizes[axis])
    sizes[largest] //= 2
  if -1 not in sizes.values() and (splitting := mesh_axes.data_axes(sizes)):
    sizes[splitting[0]] *= devices // used
  return sizes


def _simulate() -> None:
  """As many CPU devices as the drills have, unless JAX runs, or was told, already."""
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", _DEVICES)


def _shards(mesh: Mapping[str, int]) -> int:
  """Over how many devices a batch is split; those that -1 stands for counted."""
  named = math.prod(size for size in mesh.values() if size > 0)
  sizes = {a: n if n > 0 else jax.device_count() // named for a, n in mesh.items()}
  return math.prod(sizes[axis] for axis in mesh_axes.data_axes(sizes))


def _training(config: RunSettings, shards: int) -> dict[str, Any]:
  """Two steps; one micro-batch of a row a device, two where there are several."""
  training = config.training
  values: dict[str, Any] = {"max_steps": _STEPS, "global_batch_size": shards}
  if (rows := getattr(training, "micro_batch_size", None)) is not None:
    several = training.global_batch_size > rows
    values |= {"micro_batch_size": shards, "global_batch_size": shards * (1 + several)}
  for name in ("eval_batch_size", "eval_every_n_steps"):
    if getattr(training, name) is not None:
      values[name] = shards if name == "eval_batch_size" else 1
  return values


def _value(config: RunSettings, key: str) -> Any:
  """What a dotted key is set to; None where the job has no such key."""
  return keys.flatten(config).get(key)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
  section, _, name = key.partition(".")
  values.setdefault(section, {})[name] = value
