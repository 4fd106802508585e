"""From a configuration to tokenizer, model, mesh and the trainer's settings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
from typing import Any

from jax.sharding import Mesh

from tunix.cli import precision
from tunix.cli.schema import Config, TokenizerKeys
from tunix.cli.schema_mesh import check_mesh, data_axes
from tunix.cli.utils import call_strings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import (
  automodel,
  families,
  lora,
  quantisation,
  safetensors_saver,
)
from tunix.models.transformer.model import Transformer
from tunix.sft import metrics_logger as metrics
from tunix.sft.config import CheckpointOptions, Schedule, TrainingConfig
from tunix.utils import env, mesh as mesh_lib

_NO_MODEL = (
  "model.path is not set: give --model.path=FOLDER, or --model.name=PRESET to start "
  "from scratch"
)

_PATHS = {
  "": ("output_dir", "compilation_cache"),
  "model": ("path",),
  "tokenizer": ("path", "chat_template"),
  "data": ("train", "eval"),
  "rl": ("reference", "critic"),
  "preference": ("reference", "reference_logps"),
  "distill": ("teacher", "cache"),
  "reward": ("model",),
}

# Of these, folders that a run makes.
_WRITTEN = ("reference_logps", "cache")


def absolute_paths(config: Config) -> Config:
  """The configuration with absolute paths, so that a run can be resumed from anywhere.

  What does not exist stays as it is: it may be a hub id.
  """

  def absolute(value: str | None, always: bool) -> str | None:
    if value is None:
      return None
    path = pathlib.Path(value).expanduser()
    return str(path.absolute()) if always or path.exists() else value

  for section, names in _PATHS.items():
    owner = getattr(config, section) if section else config
    changed = {
      name: absolute(getattr(owner, name), not section or name in _WRITTEN)
      for name in names
    }
    owner = dataclasses.replace(owner, **changed)
    config = dataclasses.replace(config, **{section: owner}) if section else owner
  functions = tuple(call_strings.with_absolute_path(f) for f in config.reward.entries)
  reward = dataclasses.replace(config.reward, functions=functions)
  return dataclasses.replace(config, reward=reward)


def build_mesh(config: Config) -> Mesh | None:
  """The mesh over all devices; None when none is asked for.

  Raises:
    ValueError: its sizes do not fit the devices, or the batches do not divide over it.
  """
  if not config.mesh:
    return None
  mesh = mesh_lib.create_mesh(config.mesh)
  check_mesh({axis: int(size) for axis, size in mesh.shape.items()}, config.batch_rows)
  return mesh


def build_tokenizer(config: Config) -> TokenizerAdapter:
  """The tokenizer, with the chat template of the configuration if it names one.

  Raises:
    FileNotFoundError: no such folder or template file.
    ValueError: no folder was named, its files are damaged, or the template is no text.
  """
  source = config.tokenizer.path or config.model.path
  if source is None:
    raise ValueError(
      "tokenizer.path is not set: model.name starts from scratch, so name the folder "
      "of a tokenizer"
      if config.model.name
      else _NO_MODEL
    )
  template = config.tokenizer.chat_template
  if template is None:
    return TokenizerAdapter.from_pretrained(source)
  file = pathlib.Path(template).expanduser()
  if not file.is_file():
    raise FileNotFoundError(
      f"tokenizer.chat_template {template!r}: no such file; give a file of jinja source"
    )
  try:
    text = file.read_text("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"tokenizer.chat_template {template!r} is no UTF-8 text ({error}): give a file "
      "of jinja source"
    ) from error
  return TokenizerAdapter.from_pretrained(source, chat_template=text)


def check_model(config: Config) -> None:
  """Looks whether there is such a model, before anything takes time.

  Raises:
    FileNotFoundError: no such folder.
    ValueError: no model named, an unknown preset or fields it does not have.
  """
  if config.model.name is not None:
    preset_config(config)
  elif config.model.path is not None:
    automodel.resolve_folder(config.model.path)
  else:
    raise ValueError(_NO_MODEL)


def preset_config(config: Config) -> Any:
  """The preset `model.name` with the fields of `model.args`.

  Raises:
    ValueError: an unknown preset, an unknown field, or a field out of range.
  """
  assert config.model.name is not None
  family, preset = families.preset(config.model.name)
  known = [field.name for field in dataclasses.fields(family.config_class)]
  for name in config.model.args:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      remedy = f"did you mean {near[0]}?" if near else f"fields are {', '.join(known)}"
      raise ValueError(
        f"model.args.{name} is no field of {config.model.name}: {remedy}"
      )
  try:
    return preset(**config.model.args)
  except (TypeError, ValueError) as error:
    raise ValueError(f"model.args: {error}; correct that field") from error


def build_model(config: Config, mesh: Mesh | None) -> Transformer:
  """The model, loaded or fresh, with adapters when `lora.rank` is set.

  Raises:
    FileNotFoundError, ValueError: see `AutoModel` and `lora.apply`.
  """
  keys = config.model
  options: dict[str, Any] = {
    name: getattr(keys, name)
    for name in ("dtype", "param_dtype", "remat", "scan_layers", "attention")
  }
  options["num_scores"] = 1 if config.job == "reward" else None
  if keys.name is not None:
    preset = preset_config(config)
    model = automodel.AutoModel.from_config(preset, mesh, seed=config.seed, **options)
    if keys.quantise is not None:
      model = quantisation.quantise(model, keys.quantise)
  else:
    model = automodel.AutoModel.from_pretrained(
      keys.path or "", mesh, quantise=keys.quantise, **options
    )
  if config.lora.rank is None:
    return model
  try:
    return lora.apply(model, lora_config(config), seed=config.seed)
  except ValueError as error:
    raise ValueError(f"lora: {error}; change its targets or patterns") from error


def build_reference(config: Config, path: str | None, mesh: Mesh | None) -> Any:
  """What a policy is compared with; None: itself, without its adapters.

  Args:
    config: of the run.
    path: folder of a model; None: the policy before its first step, also when the run
      is resumed.
    mesh: of the policy.

  Raises:
    FileNotFoundError, ValueError: see `AutoModel`.
  """
  if path is not None:
    return automodel.AutoModel.from_pretrained(path, mesh, dtype=config.model.dtype)
  return None if config.lora.rank is not None else build_model(config, mesh)


def lora_config(config: Config) -> lora.LoraConfig:
  """The adapters' settings."""
  keys = config.lora
  assert keys.rank is not None
  given = {
    "alpha": keys.alpha,
    "targets": keys.targets,
    "dtype": keys.dtype,
    "dropout": keys.dropout,
    "use_rslora": keys.rslora,
    "use_dora": keys.dora,
    "rank_pattern": keys.rank_pattern,
    "alpha_pattern": keys.alpha_pattern,
  }
  given = {name: value for name, value in given.items() if value is not None}
  return lora.LoraConfig(rank=keys.rank, **given)


def check_vocabulary(model: Transformer, tokenizer: TokenizerAdapter) -> None:
  """Refuses a tokenizer whose ids the model's table does not have.

  Raises:
    ValueError: both sizes.
  """
  if tokenizer.vocab_size > model.config.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids and the model has "
      f"{model.config.vocab_size}: they belong to two models; set tokenizer.path to "
      "the model's own"
    )


def training_options(
  config: Config, output_dir: pathlib.Path, learning_rate: float | Schedule
) -> dict[str, Any]:
  """The settings of a trainer that is given whole batches."""
  return {
    "gradient_accumulation_steps": config.training.micro_batches,
    **cadence(config, output_dir, learning_rate),
  }


def training_config(
  config: Config, output_dir: pathlib.Path, learning_rate: float | Schedule
) -> TrainingConfig:
  """The trainer's settings."""
  return TrainingConfig(**training_options(config, output_dir, learning_rate))


def cadence(
  config: Config, output_dir: pathlib.Path, learning_rate: float | Schedule
) -> dict[str, Any]:
  """The settings that all trainers share."""
  every = config.checkpoint.every_n_steps
  seconds = config.checkpoint.min_interval_secs
  return {
    "eval_every_n_steps": config.training.eval_every_n_steps,
    "max_steps": config.training.max_steps,
    "checkpoint_root_directory": str(output_dir / "checkpoints"),
    "checkpointing_options": CheckpointOptions(
      save_every_n_steps=every,
      min_interval_secs=180 if seconds is None else seconds,
      max_to_keep=config.checkpoint.max_to_keep,
      asynchronous=config.checkpoint.asynchronous,
    ),
    "data_sharding_axis": data_axes(config.mesh),
    "pbar_description": "training" if config.logging.progress_bar else None,
    "learning_rate": learning_rate,
  }


def build_logger(config: Config, output_dir: pathlib.Path) -> metrics.MetricsLogger:
  """The metrics of the run, under `output_dir/logs`."""
  return metrics.MetricsLogger(logging_options(config, output_dir))


def logging_options(
  config: Config, output_dir: pathlib.Path
) -> metrics.MetricsLoggerOptions:
  """Where the metrics go."""
  keys, folder = config.logging, output_dir / "logs"
  factories: list[metrics.BackendFactory] = [
    functools.partial(metrics.JsonlBackend, folder)
  ]
  if keys.tensorboard:
    factories.append(functools.partial(metrics.TensorboardBackend, folder))
  if keys.wandb or (keys.wandb is None and env.wandb_requested()):
    factories.append(
      functools.partial(metrics.WandbBackend, keys.project_name, keys.run_name, folder)
    )
  if keys.console:
    factories.append(metrics.ConsoleBackend)
  return metrics.MetricsLoggerOptions(folder, backend_factories=factories)


def export(config: Config, model: Transformer, kind: str, folder: pathlib.Path) -> None:
  """Writes a model (adapters merged) or an adapter, with the tokenizer.

  Raises:
    ValueError: `kind` does not fit the model.
    OSError: the disk is full or not writable.
  """
  if kind == "adapter":
    lora.save_adapter(model, folder, base=config.model.path)
    build_tokenizer(config).save(folder)
    return
  path = config.model.path or config.tokenizer.path
  assert path is not None
  source = automodel.resolve_folder(path)
  safetensors_saver.save_pretrained(
    model, folder, source=source, dtype=precision.of_export(config, model)
  )
  if config.tokenizer != TokenizerKeys():
    build_tokenizer(config).save(folder)
