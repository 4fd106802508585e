"""Models and tokenizers that a command line names."""

from __future__ import annotations

import pathlib

from tunix.generate import tokenizer_files
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.models.transformer.model import Transformer

_TOKENIZER = "tokenizer.json"


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
