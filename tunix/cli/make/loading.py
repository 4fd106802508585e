"""Loads models and tokenizers that a configuration or an argument names."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from tunix.cli.make import objects
from tunix.cli.settings.run import ModelSettings, RunSettings
from tunix.cli.settings.spelling import did_you_mean
from tunix.generate.tokenizer import files as tokenizer_files
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, families, lora, quantization
from tunix.models.automodel import AutoModel
from tunix.models.transformer.model import Transformer
from tunix.utils import text_files
from tunix.utils.setting import shared_values

_TOKENIZER = "tokenizer.json"
_ADAPTER = "adapter_config.json"

# Default number of new tokens of a generation.
_NEW_TOKENS = 128

_NO_MODEL = (
  "model.path is not set. Give --model.path=FOLDER, or --model.name=PRESET to start "
  "from scratch"
)
_ADAPTER_NEEDS_BASE = (
  "give the model that it was trained on (and the adapter as --adapter where a command "
  "takes one), or merge them with `tunix export --kind merged`"
)


@dataclasses.dataclass(frozen=True)
class ModelLoader:
  """Loads the models and the tokenizer that a configuration names.

  Attributes:
    config: settings of the run.
    mesh: devices of the models; None: one device. Shapes need a mesh.
    of_shapes: makes shapes in place of weights. Of a folder only `config.json` is read,
      and a hub id is not downloaded (see `automodel.sizes_of`).
  """

  config: RunSettings
  mesh: Mesh | None = None
  of_shapes: bool = False

  def check(self) -> None:
    """Refuses a model that does not exist, before anything takes time.

    A hub id is downloaded.

    Raises:
      FileNotFoundError: there is no such folder or hub id.
      ValueError: no model is named, or an unknown preset or field of a preset.
    """
    source = self.config.model
    if source.name is not None:
      self._preset()
    elif objects.is_name(source.path):
      self._check_object()
    elif source.path is not None:
      check_model_folder("model.path", source.path)
      self.folder()
    else:
      raise ValueError(_NO_MODEL)

  def folder(self) -> pathlib.Path:
    """Returns the folder of `model.path`; a hub id is downloaded.

    Raises:
      FileNotFoundError: there is no such folder, hub id or revision.
      ValueError: a revision is given for a folder.
    """
    source = self.config.model
    assert source.path is not None
    try:
      return automodel.resolve_folder(source.path, source.revision)
    except ValueError as error:
      raise ValueError(f"model.{error}") from error

  def tokenizer(self) -> TokenizerAdapter:
    """Loads the tokenizer, with the chat template of the configuration if it names one.

    Raises:
      FileNotFoundError: there is no such folder or template file.
      ValueError: no folder is named, its files are damaged, or the template is no text.
    """
    settings, model = self.config.tokenizer, self.config.model
    source = settings.path or model.path
    if source is None:
      raise ValueError(
        "tokenizer.path is not set. model.name starts from scratch, so name the folder "
        "of a tokenizer"
        if model.name
        else _NO_MODEL
      )
    if objects.is_name(source) and settings.path is None:
      raise ValueError(
        f"tokenizer.path is not set and model.path is {source}, an object, which has "
        "no tokenizer. Give tokenizer=, a TokenizerAdapter or a folder"
      )
    options: dict[str, Any] = {
      "template_args": settings.template_args,
      "add_bos": settings.add_bos,
    }
    if settings.chat_template is not None:
      options["chat_template"] = _read_template(settings.chat_template)
    if objects.is_name(source):
      loaded = TokenizerAdapter(objects.get(source), **options)
    else:
      revision = model.revision if source == model.path else None
      loaded = named_tokenizer("tokenizer.path", source, revision=revision, **options)
    return TokenizerAdapter(loaded, message_form=settings.messages)

  def sizes(self) -> Any:
    """Returns the ModelConfig of the model, with the options of the configuration.

    Raises:
      FileNotFoundError, ValueError: as for `model`.
    """
    source = self.config.model
    if source.name is not None:
      sizes = self._preset()
    elif objects.is_name(source.path):
      return objects.get(source.path).config
    elif source.path is not None:
      sizes = automodel.sizes_of(source.path, source.revision)
    else:
      raise ValueError(_NO_MODEL)
    return _with_options(sizes, self._options())

  def model(self) -> Transformer:
    """Loads the model that is trained, or makes a fresh one, and adds the adapters.

    Raises:
      FileNotFoundError, ValueError: as for `AutoModel` and `lora.apply`.
    """
    source = self.config.model
    if self.of_shapes:
      assert self.mesh is not None
      change = lambda model: self._adapted(self._quantized(model))
      return automodel.of_shapes(self.sizes(), self.mesh, change)
    options = self._options()
    if source.name is not None:
      seed = self.config.seed
      model = AutoModel.from_config(self._preset(), self.mesh, seed=seed, **options)
      return self._adapted(self._quantized(model))
    if objects.is_name(source.path):
      held = objects.get(source.path)
      return held if lora.config_of(held) else self._adapted(held)
    options |= {"revision": source.revision, "quantize": source.quantize}
    return self._adapted(
      AutoModel.from_pretrained(source.path or "", self.mesh, **options)
    )

  def reference(self, path: str | None) -> Any:
    """Loads the reference model of the policy.

    Args:
      path: folder of the reference; None: the policy before its first step, also when
        the run is resumed.

    Returns:
      The model; None if the policy without its adapters is the reference.

    Raises:
      FileNotFoundError, ValueError: as for `AutoModel`.
    """
    if path is not None:
      return self.load(path, dtype=self.config.model.dtype)
    source = self.config.model.path
    if objects.is_name(source) and lora.config_of(objects.get(source)):
      return nnx.clone(objects.get(source))  # its adapters are part of the policy
    # Modules that are trained whole overwrite the weights that a reference needs.
    if self.config.lora is not None and not self.config.lora.modules_to_save:
      return None
    # A second load is a copy; an object is trained in place.
    model = self.model()
    return nnx.clone(model) if objects.is_name(source) else model

  def load(self, path: str, **options: Any) -> Transformer:
    """Loads a further model: a reference, a teacher, a critic or a reward model.

    Args:
      path: folder or hub id.
      **options: options of AutoModel.

    Raises:
      FileNotFoundError, ValueError: as for `AutoModel`.
    """
    if objects.is_name(path):
      return objects.get(path)
    if not self.of_shapes:
      return AutoModel.from_pretrained(path, self.mesh, **options)
    assert self.mesh is not None
    sizes = _with_options(automodel.sizes_of(path), options)
    return automodel.of_shapes(sizes, self.mesh)

  def _check_object(self) -> None:
    """Refuses an object that is no model of ours, and settings that nothing reads.

    Raises:
      ValueError: names the key, and the call that makes the model.
    """
    source = self.config.model
    assert source.path is not None
    model = objects.get(source.path)
    if not isinstance(model, Transformer):
      raise ValueError(
        f"model.path is {source.path}; expected a model of AutoModel. Train "
        "a module of your own with PeftTrainer or RLCluster"
      )
    if source != ModelSettings(path=source.path):
      changed = shared_values(ModelSettings, source)
      unread = [n for n, v in changed.items() if v and n != "path"]
      raise ValueError(
        f"model.{unread[0]} is {changed[unread[0]]!r} and model.path is "
        f"{source.path}, which is loaded already. Give it to "
        "AutoModel.from_pretrained instead"
      )
    if not self.config.fits_adapter and model.config.num_scores != 1:
      raise ValueError(
        f"model.path is {source.path} without a head of one score. Load it with "
        "AutoModel.from_pretrained(..., num_scores=1)"
      )

  def _preset(self) -> Any:
    """Returns the preset `model.name` with the fields of `model.args`.

    Raises:
      ValueError: an unknown preset, an unknown field, or a field out of range.
    """
    name, args = self.config.model.name, self.config.model.args
    assert name is not None
    if "/" in name:
      raise ValueError(
        f"model.name is {name!r}, a hub id or a folder; expected a preset, which "
        f"starts from scratch. Give --model.path={name}"
      )
    family, preset = families.preset(name)
    known = [field.name for field in dataclasses.fields(family.config_class)]
    for arg in args:
      if arg not in known:
        remedy = did_you_mean(arg, known, f"fields are {', '.join(known)}")
        raise ValueError(f"model.args.{arg} is no field of {name}: {remedy}")
    try:
      return preset(**args)
    except (TypeError, ValueError) as error:
      raise ValueError(f"model.args: {error}; correct that field") from error

  def _options(self) -> dict[str, Any]:
    names = ("dtype", "param_dtype", "remat", "scan_layers", "attention")
    options: dict[str, Any] = {n: getattr(self.config.model, n) for n in names}
    # The job reward trains a head of one score.
    options["num_scores"] = None if self.config.fits_adapter else 1
    return options

  def _quantized(self, model: Transformer) -> Transformer:
    method = self.config.model.quantize
    return model if method is None else quantization.quantize(model, method)

  def _adapted(self, model: Transformer) -> Transformer:
    if self.config.lora is None:
      return model
    try:
      return lora.apply(model, self.config.lora, seed=self.config.seed)
    except ValueError as error:
      raise ValueError(f"lora: {error}; change its targets or patterns") from error


def _read_template(name: str) -> str:
  file = pathlib.Path(name).expanduser()
  if not file.is_file():
    raise FileNotFoundError(
      f"tokenizer.chat_template {name!r}: no such file; give a file of jinja source"
    )
  try:
    return text_files.read(file)
  except ValueError as error:
    raise ValueError(f"tokenizer.chat_template: {error}") from error


def _with_options(sizes: Any, options: dict[str, Any]) -> Any:
  """Returns a ModelConfig with options as AutoModel applies them to a checkpoint."""
  if options.get("param_dtype") is None:
    options = {**options, "param_dtype": options.get("dtype")}
  return automodel.with_options(sizes, **options)


def check_vocabulary(model: Transformer, tokenizer: TokenizerAdapter) -> None:
  """Refuses a tokenizer with ids beyond the model's embedding table.

  Raises:
    ValueError: names both sizes.
  """
  if tokenizer.vocab_size > model.config.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids and the model has "
      f"{model.config.vocab_size}, so they belong to two models. Set tokenizer.path to "
      "the model's own"
    )


# Models and tokenizers of the arguments --model, --adapter and --tokenizer.


def new_tokens(model: Any, prompts: Sequence[int], requested: int | None) -> int:
  """Returns the number of tokens to generate.

  The default is 128, or fewer if the model has no more positions after the longest
  prompt.

  Args:
    model: model with a `config.max_position`, if its positions are limited.
    prompts: lengths of the prompts in tokens.
    requested: number that the user gave; None: the default.
  """
  if requested is not None:
    return requested
  most = getattr(getattr(model, "config", None), "max_position", None)
  return _NEW_TOKENS if most is None else min(_NEW_TOKENS, most - max(prompts))


def check_model_folder(name: str, folder: str) -> None:
  """Refuses the folder of a run or an adapter, and names the model's folder instead.

  Args:
    name: setting that names the folder, for the message.
    folder: folder or hub id; a hub id passes.

  Raises:
    FileNotFoundError: there is no such folder, and the name is no hub id.
    ValueError: the folder holds a run or an adapter.
  """
  path = pathlib.Path(folder).expanduser()
  if not path.exists() and "/" not in folder:
    raise FileNotFoundError(
      f"{name} is {folder!r}, and there is no such folder. Give a folder with "
      "config.json, a GGUF file, or a hub id 'owner/name'"
    )
  if not path.is_dir() or (path / "config.json").is_file():
    return
  if (path / "config.yaml").is_file():
    export = path / "export"
    what = f"{name} is {folder!r}, the folder of a run"
    if (export / "config.json").is_file():
      raise ValueError(f"{what}: give its model, {export}")
    if (export / _ADAPTER).is_file():
      raise ValueError(
        f"{what}, whose export {export} is an adapter: {_ADAPTER_NEEDS_BASE}"
      )
    raise ValueError(
      f"{what} without an exported model: run `tunix export --run {folder} --to MODEL` "
      "and give MODEL"
    )
  if (path / _ADAPTER).is_file():
    raise ValueError(f"{name} is {folder!r}, an adapter: {_ADAPTER_NEEDS_BASE}")


def named_tokenizer(name: str, folder: str, **options: Any) -> TokenizerAdapter:
  """Loads the tokenizer of a folder or hub id.

  Args:
    name: setting that names the folder, for the message.
    folder: folder or hub id.
    **options: options of `TokenizerAdapter.from_pretrained`.

  Raises:
    FileNotFoundError, ValueError: there is no tokenizer.
  """
  try:
    return TokenizerAdapter.from_pretrained(folder, **options)
  except ImportError as error:  # files other than tokenizer.json need transformers
    if not pathlib.Path(folder).expanduser().is_dir():
      raise
    raise ValueError(
      f"{folder} has no {_TOKENIZER}: name the folder of its tokenizer with {name} "
      "(other kinds of files are read where the package transformers is)"
    ) from error


def load_model(
  folder: str, adapter: str | None = None, dtype: str | None = None
) -> Transformer:
  """Loads the model of a Hugging Face folder, with a PEFT adapter if one is given.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: the adapter does not fit the model.
  """
  model = AutoModel.from_pretrained(folder, dtype=dtype)
  return model if adapter is None else lora.load_adapter(model, adapter)


def load_tokenizer(
  folder: str,
  adapter: str | None = None,
  tokenizer: str | None = None,
  *,
  name: str = "--model",
) -> TokenizerAdapter:
  """Loads the tokenizer of `tokenizer`, else the adapter's, else the model's.

  The adapter's comes first because it may have been trained with another chat template
  than its model.

  Args:
    folder: folder or hub id of the model.
    adapter: folder of the adapter; None without one.
    tokenizer: folder or hub id of the tokenizer; None if the user named none.
    name: argument that names `folder`, for messages.

  Raises:
    FileNotFoundError, ValueError: there is no tokenizer.
  """
  if tokenizer is not None:
    return named_tokenizer("--tokenizer", tokenizer)
  check_model_folder(name, folder)
  if adapter is not None:
    _check_adapter_folder(adapter)
  if adapter is None or not (pathlib.Path(adapter) / _TOKENIZER).is_file():
    return named_tokenizer("--tokenizer", folder)
  # The model's own configuration lists the tokens that end a generation.
  eos_ids = tokenizer_files.read_eos_ids(automodel.resolve_folder(folder))
  trained = TokenizerAdapter.from_pretrained(adapter)
  return TokenizerAdapter(trained, eos_ids=eos_ids)


def _check_adapter_folder(folder: str) -> None:
  """Refuses a folder without an adapter, before a model is loaded for it."""
  path = pathlib.Path(folder).expanduser()
  if path.is_dir() and not (path / _ADAPTER).is_file():
    inner = path / "export"
    near = f"give {inner}" if (inner / _ADAPTER).is_file() else "give a PEFT folder"
    raise ValueError(f"--adapter is {folder!r}, which has no {_ADAPTER}: {near}")
