"""Models and tokenizers that a command line names."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from tunix.cli.run_folder import RunFolder
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


def of_run(folder: str, adapter: str | None) -> tuple[str, str | None]:
  """(model, adapter): those of the export where `folder` is that of a run.

  Raises:
    FileNotFoundError: the run has exported nothing.
  """
  run = RunFolder(pathlib.Path(folder).expanduser())
  if not run.config_file.is_file() or (run.path / "config.json").is_file():
    return folder, adapter
  if (run.export / "config.json").is_file():
    return str(run.export), adapter
  base = run.read_config().model.path
  if base is None or not (run.export / "adapter_config.json").is_file():
    raise FileNotFoundError(
      f"{folder} is a run's folder and has no export: `tunix export --run {folder} "
      "--to FOLDER` writes the model of a checkpoint"
    )
  return base, str(run.export) if adapter is None else adapter


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
  folder: str, adapter: str | None = None, tokenizer: str | None = None
) -> TokenizerAdapter:
  """The tokenizer that was named, else the adapter's if it has one, else the model's.

  An adapter may have been trained with another chat template than its model's.

  Raises:
    FileNotFoundError, ValueError: there is none.
  """
  if tokenizer is not None:
    return TokenizerAdapter.from_pretrained(tokenizer)
  if adapter is None or not (pathlib.Path(adapter) / _TOKENIZER).is_file():
    return TokenizerAdapter.from_pretrained(folder)
  # What ends a generation stands in the model's own configuration.
  ends = tokenizer_files.read_eos_ids(pathlib.Path(folder).expanduser())
  trained = TokenizerAdapter.from_pretrained(adapter)
  return TokenizerAdapter(trained, eos_ids=ends)
