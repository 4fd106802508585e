"""Models and tokenizers of the arguments --model, --adapter and --tokenizer."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from flax import nnx

from tunix.data.images import ImageReader
from tunix.generate.tokenizer import files as tokenizer_files
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, calling, families, hub, lora
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files
from tunix.models.transformer.model import Transformer

_TOKENIZER = "tokenizer.json"
_ADAPTER = "adapter_config.json"

# Default number of new tokens of a generation.
_NEW_TOKENS = 128

_ADAPTER_NEEDS_BASE = (
  "give the model that it was trained on (and the adapter as --adapter where a command "
  "takes one), or merge them with `tunix export --kind merged`"
)


def new_tokens(model: nnx.Module, prompts: Sequence[int], requested: int | None) -> int:
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
  most = calling.config_value(model, "max_position")
  return _NEW_TOKENS if most is None else min(_NEW_TOKENS, most - max(prompts))


def check(name: str, folder: str) -> None:
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
  folder: str,
  adapter: str | None = None,
  dtype: str | None = None,
  images: bool | None = None,
  quantize: str | None = None,
  batch_invariant: bool | None = None,
) -> Transformer:
  """Loads the model of a Hugging Face folder, with a PEFT adapter if one is given.

  Args:
    folder, dtype, images, quantize, batch_invariant: see `AutoModel.from_pretrained`.
    adapter: folder of the adapter.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: the adapter does not fit the model.
  """
  model = AutoModel.from_pretrained(
    folder,
    dtype=dtype,
    images=images,
    quantize=quantize,
    batch_invariant=batch_invariant,
  )
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
  check(name, folder)
  if adapter is not None:
    _check_adapter_folder(adapter)
  if adapter is None or not (pathlib.Path(adapter) / _TOKENIZER).is_file():
    return named_tokenizer("--tokenizer", folder)
  # The model's own configuration lists the tokens that end a generation.
  eos_ids = tokenizer_files.read_eos_ids(automodel.resolve_folder(folder))
  trained = TokenizerAdapter.from_pretrained(adapter)
  return TokenizerAdapter(trained, eos_ids=eos_ids)


def image_reader(
  name: str, images: bool | None, revision: str | None = None
) -> ImageReader | None:
  """Returns the reader of records with images; None for a model that reads text alone.

  Weights are neither read nor downloaded.

  Args:
    name: folder or hub id of the model. Of a hub id, its configuration must be in the
      cache.
    images: see `AutoModel.from_pretrained`.
    revision: commit, tag or branch of a hub id.
  """
  folder, file = pathlib.Path(name).expanduser(), "config.json"
  if hub.is_id(name) and hub.is_cached(name, file, revision):
    folder = hub.download(name, hub.TOKENIZER_FILES, revision)
  if not (folder / file).is_file():
    return None
  model_type = tensor_files.read_json(folder / file).get("model_type")
  if not families.has_tower(model_type, images):
    return None
  return ImageReader(folder, automodel.config_of_folder(folder, images=images))


def _check_adapter_folder(folder: str) -> None:
  """Refuses a folder without an adapter, before a model is loaded for it."""
  path = pathlib.Path(folder).expanduser()
  if path.is_dir() and not (path / _ADAPTER).is_file():
    inner = path / "export"
    near = f"give {inner}" if (inner / _ADAPTER).is_file() else "give a PEFT folder"
    raise ValueError(f"--adapter is {folder!r}, which has no {_ADAPTER}: {near}")
