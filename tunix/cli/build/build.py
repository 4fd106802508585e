"""From a configuration to tokenizer, model and the trainer's settings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.cli.build import data_sources, loading, mesh as mesh_axes, precision
from tunix.cli.settings import keys
from tunix.cli.settings.run import (
  MicroBatchSettings,
  RunSettings,
  TokenizerSettings,
  values_for,
)
from tunix.cli.utils import call_strings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import (
  automodel,
  families,
  hub,
  lora,
  quantisation,
  safetensors_saver,
)
from tunix.models.transformer.model import Transformer
from tunix.perf.metrics import PerfMetricsOptions
from tunix.sft import metrics_logger as metrics
from tunix.sft.config import Schedule, TrainingConfig

_NO_MODEL = (
  "model.path is not set: give --model.path=FOLDER, or --model.name=PRESET to start "
  "from scratch"
)

# Keys that name files and folders, ...
_READ = (
  *("model.path", "tokenizer.path", "tokenizer.chat_template"),
  *("rl.reference", "rl.critic", "preference.reference"),
  *("distill.teacher", "reward.model"),
)
# ... and folders that a run makes.
_WRITTEN = (
  *("output_dir", "compilation_cache", "preference.reference_logps", "distill.cache"),
)


def absolute_paths(config: RunSettings) -> RunSettings:
  """The settings with absolute paths, so that a run can be resumed from anywhere.

  What does not exist and is to be read stays as it is: it may be a hub id.
  """
  known = keys.flatten(config)
  for key in (*_READ, *_WRITTEN):
    if (value := known.get(key)) is None:
      continue
    path = pathlib.Path(value).expanduser()
    if key in _WRITTEN or path.exists():
      config = with_value(config, key, str(path.absolute()))
  for key in ("data.train", "data.eval"):
    if (names := known.get(key)) is not None:
      config = with_value(config, key, data_sources.with_absolute_paths(names))
  if (functions := known.get("reward.functions")) is None:
    return config
  entries = [functions] if isinstance(functions, str) else functions
  places = tuple(call_strings.with_absolute_path(entry) for entry in entries)
  return with_value(config, "reward.functions", places)


def with_value(config: Any, key: str, value: Any) -> Any:
  """The settings with another value of a dotted key."""
  name, _, below = key.partition(".")
  if below:
    value = with_value(getattr(config, name), below, value)
  return dataclasses.replace(config, **{name: value})


def build_tokenizer(config: RunSettings) -> TokenizerAdapter:
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
  revision = config.model.revision if source == config.model.path else None
  read = functools.partial(
    loading.named_tokenizer, "tokenizer.path", source, revision=revision
  )
  if template is None:
    return read()
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
  return read(chat_template=text)


def check_model(config: RunSettings) -> None:
  """Looks whether there is such a model, before anything takes time.

  Raises:
    FileNotFoundError: no such folder.
    ValueError: no model named, an unknown preset or fields it does not have.
  """
  if config.model.name is not None:
    preset_config(config)
  elif config.model.path is not None:
    loading.check_model_folder("model.path", config.model.path)
    model_folder(config)
  else:
    raise ValueError(_NO_MODEL)


def model_folder(config: RunSettings) -> pathlib.Path:
  """The folder that `model.path` names; a hub id is downloaded.

  Raises:
    FileNotFoundError: there is no such folder, id or revision.
    ValueError: a revision of a folder.
  """
  assert config.model.path is not None
  try:
    return automodel.resolve_folder(config.model.path, config.model.revision)
  except ValueError as error:
    raise ValueError(f"model.{error}") from error


def settle_revision(config: RunSettings) -> RunSettings:
  """The configuration with the commit that a hub id means now: a branch may move while
  the run stands still, and its export is of the model that it was trained on."""
  path = config.model.path
  if path is None or pathlib.Path(path).expanduser().is_dir():
    return config
  return with_value(config, "model.revision", hub.commit_of(model_folder(config)))


def preset_config(config: RunSettings) -> Any:
  """The preset `model.name` with the fields of `model.args`.

  Raises:
    ValueError: an unknown preset, an unknown field, or a field out of range.
  """
  assert config.model.name is not None
  if "/" in config.model.name:
    raise ValueError(
      f"model.name is {config.model.name!r}, a hub id or a folder: give it as "
      f"model.path (--model.path={config.model.name}); model.name is a preset's, which "
      "starts from scratch"
    )
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


def build_model(config: RunSettings, mesh: Mesh | None) -> Transformer:
  """The model, loaded or fresh, with adapters when `lora.rank` is set.

  Raises:
    FileNotFoundError, ValueError: see `AutoModel` and `lora.apply`.
  """
  source, options = config.model, _model_options(config)
  if source.name is not None:
    preset = preset_config(config)
    model = automodel.AutoModel.from_config(preset, mesh, seed=config.seed, **options)
    if source.quantise is not None:
      model = quantisation.quantise(model, source.quantise)
  else:
    model = automodel.AutoModel.from_pretrained(
      source.path or "",
      mesh,
      revision=source.revision,
      quantise=source.quantise,
      **options,
    )
  return _adapted(model, config)


def _model_options(config: RunSettings) -> dict[str, Any]:
  options: dict[str, Any] = {
    name: getattr(config.model, name)
    for name in ("dtype", "param_dtype", "remat", "scan_layers", "attention")
  }
  # A head of scores is what the job trains, and no adapter.
  options["num_scores"] = None if config.fits_adapter else 1
  return options


def _adapted(model: Transformer, config: RunSettings) -> Transformer:
  if config.lora is None:
    return model
  try:
    return lora.apply(model, config.lora, seed=config.seed)
  except ValueError as error:
    raise ValueError(f"lora: {error}; change its targets or patterns") from error


def shapes_of_model(config: RunSettings, mesh: Mesh | None) -> Transformer:
  """The model that `build_model` makes, as shapes on a mesh: of a folder only its
  `config.json` is read, and of a hub id not even that (`automodel.sizes_of`).

  Raises:
    FileNotFoundError, ValueError: see `build_model`.
  """
  assert mesh is not None

  def change(model: Transformer) -> Transformer:
    if config.model.quantise is not None:
      model = quantisation.quantise(model, config.model.quantise)
    return _adapted(model, config)

  return automodel.of_shapes(sizes_of_model(config), mesh, change)


def sizes_of_model(config: RunSettings) -> Any:
  """The ModelConfig of the model, with the options of the configuration.

  Raises:
    FileNotFoundError, ValueError: see `build_model`.
  """
  if config.model.name is not None:
    sizes = preset_config(config)
  elif config.model.path is not None:
    sizes = automodel.sizes_of(config.model.path, config.model.revision)
  else:
    raise ValueError(_NO_MODEL)
  options = _model_options(config)
  if options["param_dtype"] is None:
    options["param_dtype"] = options["dtype"]
  return automodel.with_options(sizes, **options)


def settle_lora(config: RunSettings) -> RunSettings:
  """The configuration with the modules that are trained whole written out: a head of
  scores is drawn, and left frozen it would never say anything."""
  if config.lora is None or config.lora.modules_to_save is not None:
    return config
  names = () if config.fits_adapter else ("score",)
  return with_value(config, "lora.modules_to_save", names)


def build_reference(
  config: RunSettings,
  path: str | None,
  mesh: Mesh | None,
  *,
  of_shapes: bool = False,
) -> Any:
  """What a policy is compared with; None: itself, without its adapters.

  Args:
    config: of the run.
    path: folder of a model; None: the policy before its first step, also when the run
      is resumed, which adapters alone keep below them.
    mesh: of the policy.
    of_shapes: as `shapes_of_model` gives it.

  Raises:
    FileNotFoundError, ValueError: see `AutoModel`.
  """
  if path is None:
    # Below modules that are trained whole nothing of the model before is kept.
    shares = config.lora is not None and not config.lora.modules_to_save
    make = shapes_of_model if of_shapes else build_model
    return None if shares else make(config, mesh)
  return load(path, mesh, of_shapes=of_shapes, dtype=config.model.dtype)


def load(
  path: str, mesh: Mesh | None, *, of_shapes: bool = False, **options: Any
) -> Transformer:
  """The model of a folder beside the one that is trained; `of_shapes` from its
  `config.json` alone, on a mesh. `options` are AutoModel's.

  Raises:
    FileNotFoundError, ValueError: see `AutoModel`.
  """
  if not of_shapes:
    return automodel.AutoModel.from_pretrained(path, mesh, **options)
  assert mesh is not None
  sizes = automodel.sizes_of(path)
  if options.get("param_dtype") is None:
    options = {**options, "param_dtype": options.get("dtype")}
  return automodel.of_shapes(automodel.with_options(sizes, **options), mesh)


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
  config: RunSettings, output_dir: pathlib.Path | None, learning_rate: float | Schedule
) -> dict[str, Any]:
  """The settings that a TrainingConfig has, with those that follow from other keys."""
  training, accumulation = config.training, None
  if isinstance(training, MicroBatchSettings):
    accumulation = training.micro_batches
  return values_for(TrainingConfig, training) | {
    "gradient_accumulation_steps": accumulation,
    "checkpoint_root_directory": output_dir and str(output_dir / "checkpoints"),
    "checkpointing_options": config.checkpoint,
    "perf_metrics_options": output_dir and perf_options(config, output_dir),
    "data_sharding_axis": mesh_axes.data_axes(config.mesh),
    "pbar_description": "training" if config.logging.progress_bar else None,
    "learning_rate": learning_rate,
  }


def perf_options(
  config: RunSettings, output_dir: pathlib.Path
) -> PerfMetricsOptions | None:
  """What is traced; the file lies beside the metrics unless a folder is named."""
  wanted = config.training.perf_metrics_options
  if wanted is None or wanted.trace_dir:
    return wanted
  return dataclasses.replace(wanted, trace_dir=str(output_dir / "logs"))


def build_logger(
  config: RunSettings, output_dir: pathlib.Path | None
) -> metrics.MetricsLogger:
  """The metrics of the run, under `output_dir/logs`; without one, of nothing."""
  logger = metrics.MetricsLogger(logging_options(config, output_dir))
  if output_dir is not None:
    logger.log_config(keys.flatten(config))
  return logger


def logging_options(
  config: RunSettings, output_dir: pathlib.Path | None
) -> metrics.MetricsLoggerOptions | None:
  """Returns the backends of the run's metrics; None without a folder."""
  if output_dir is None:
    return None
  section = config.logging
  return metrics.MetricsLoggerOptions(
    output_dir / "logs",
    project_name=section.project_name,
    run_name=section.run_name,
    # A backend's key has the backend's name; JSON lines are always written.
    backends={name: getattr(section, name, None) for name in metrics.BACKENDS},
  )


def export(
  config: RunSettings, model: Transformer, kind: str, folder: pathlib.Path
) -> None:
  """Writes a model (adapters merged) or an adapter, with the tokenizer.

  Raises:
    ValueError: `kind` does not fit the model.
    OSError: the disk is full or not writable.
  """
  if kind == "adapter":
    revision = config.model.revision
    lora.save_adapter(model, folder, base=config.model.path, revision=revision)
    if jax.process_index() == 0:
      build_tokenizer(config).save(folder)
    return
  if config.model.path is not None:
    source = model_folder(config)
  else:
    assert config.tokenizer.path is not None  # the tokenizer was built of it
    source = automodel.resolve_folder(config.tokenizer.path)
  safetensors_saver.save_pretrained(
    model, folder, source=source, dtype=precision.of_export(config, model)
  )
  if config.tokenizer != TokenizerSettings() and jax.process_index() == 0:
    build_tokenizer(config).save(folder)
