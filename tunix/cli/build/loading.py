"""Models and tokenizers that a command line names."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from tunix.generate import tokenizer_files
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.models.transformer.model import Transformer

_TOKENIZER = "tokenizer.json"

# New tokens where nobody says how many, and as many fit.
_NEW_TOKENS = 128


def add_model(parser: argparse.ArgumentParser) -> None:
  """The arguments that name a model."""
  parser.add_argument(
    "--model",
    metavar="FOLDER",
    required=True,
    help="Hugging Face folder, or output_dir of a run that has exported",
  )
  parser.add_argument("--adapter", metavar="FOLDER", help="PEFT folder")
  parser.add_argument(
    "--tokenizer", metavar="FOLDER", help="the adapter's or the model's if not given"
  )
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))


def new_tokens(model: Any, prompts: Sequence[int], asked: int | None) -> int:
  """Tokens to generate: those asked for, else 128, or what the model's positions leave
  of them beside the longest prompt.

  Args:
    model: whose positions count, if it says how many it has.
    prompts: lengths, in tokens.
    asked: None: nothing was.
  """
  most = getattr(getattr(model, "config", None), "max_position", None)
  room = _NEW_TOKENS if most is None else most - max(prompts)
  return min(_NEW_TOKENS, room) if asked is None else asked


def check_model_folder(name: str, folder: str) -> None:
  """Says of a folder that holds a run or an adapter where the model is.

  Args:
    name: of the setting, for the message.
    folder: which was given; what is no folder here is not looked at.

  Raises:
    ValueError: it holds something else than a model.
  """
  path = pathlib.Path(folder).expanduser()
  if not path.is_dir() or (path / "config.json").is_file():
    return
  if (path / "config.yaml").is_file():
    export = path / "export"
    what = f"{name} is {folder!r}, the folder of a run"
    if (export / "config.json").is_file():
      raise ValueError(f"{what}: give its model, {export}")
    if (export / _ADAPTER).is_file():
      raise ValueError(f"{what}, whose export {export} is an adapter: {_BASE}")
    raise ValueError(
      f"{what} without an exported model: run `tunix export --run {folder} --to MODEL` "
      "and give MODEL"
    )
  if (path / _ADAPTER).is_file():
    raise ValueError(f"{name} is {folder!r}, an adapter: {_BASE}")


_ADAPTER = "adapter_config.json"
_BASE = (
  "give the model that it was trained on (and the adapter as --adapter where a command "
  "takes one), or merge them with `tunix export --kind merged`"
)


def check_adapter_folder(folder: str) -> None:
  """Refuses a folder without an adapter, before a model is loaded for it.

  Raises:
    ValueError: says what it holds.
  """
  path = pathlib.Path(folder).expanduser()
  if path.is_dir() and not (path / _ADAPTER).is_file():
    inner = path / "export"
    near = f"give {inner}" if (inner / _ADAPTER).is_file() else "give a PEFT folder"
    raise ValueError(f"--adapter is {folder!r}, which has no {_ADAPTER}: {near}")


def named_tokenizer(name: str, folder: str, **options: str | None) -> TokenizerAdapter:
  """The tokenizer of a folder or hub id; a folder without one is told by its setting.

  Raises:
    FileNotFoundError, ValueError: there is none.
  """
  try:
    return TokenizerAdapter.from_pretrained(folder, **options)
  except ImportError as error:  # what is no tokenizer.json is left to transformers
    if not pathlib.Path(folder).expanduser().is_dir():
      raise
    raise ValueError(
      f"{folder} has no {_TOKENIZER}: name the folder of its tokenizer with {name} "
      "(other kinds of files are read where the package transformers is)"
    ) from error


def load_model(
  folder: str, adapter: str | None = None, dtype: str | None = None
) -> Transformer:
  """The model of a Hugging Face folder, with a PEFT adapter if one is given.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: the two do not fit.
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
  """The tokenizer that was named, else the adapter's if it has one, else the model's.

  An adapter may have been trained with another chat template than its model's.

  Args:
    folder, adapter, tokenizer: as they were named.
    name: of the argument that `folder` is, for messages.

  Raises:
    FileNotFoundError, ValueError: there is none.
  """
  if tokenizer is not None:
    return named_tokenizer("--tokenizer", tokenizer)
  check_model_folder(name, folder)
  if adapter is not None:
    check_adapter_folder(adapter)
  if adapter is None or not (pathlib.Path(adapter) / _TOKENIZER).is_file():
    return named_tokenizer("--tokenizer", folder)
  # What ends a generation stands in the model's own configuration.
  ends = tokenizer_files.read_eos_ids(pathlib.Path(folder).expanduser())
  trained = TokenizerAdapter.from_pretrained(adapter)
  return TokenizerAdapter(trained, eos_ids=ends)
