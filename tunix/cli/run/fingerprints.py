"""What a run reads, as short digests that are compared when it is resumed.

Contents count, not places: files that were moved or copied are the same.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix.cli.settings.run import RunSettings
from tunix.data.stored import Records
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, tensor_files

# Read at the start and at the end of each tensor. Whole files would take minutes;
# training and merging change every number of a tensor that they change.
SAMPLE_BYTES = 4 * 1024

# What defines a tokenizer besides its special tokens; the first that is there.
_VOCABULARIES = (
  ("tokenizer.json",),
  ("tokenizer.model",),
  ("vocab.json", "merges.txt"),
)


def of_inputs(
  config: RunSettings, tokenizer: TokenizerAdapter, records: Mapping[str, Records]
) -> dict[str, str]:
  """Digests of the data files, of the tokenizer and of the chat template."""
  return {
    **{name: part.fingerprint for name, part in records.items()},
    "chat_template": digest(tokenizer.chat_template),
    "tokenizer": of_tokenizer(
      tokenizer, config.tokenizer.path or config.model.path or ""
    ),
  }


def of_base(config: RunSettings) -> dict[str, str]:
  """{"model": digest of the checkpoint}; empty for a model from scratch.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  path, revision = config.model.path, config.model.revision
  if path is None:
    return {}
  return {"model": of_model(automodel.resolve_folder(path, revision))}


def of_models(paths: Mapping[str, str | None]) -> dict[str, str]:
  """Digests of the models that are named, in folders or by hub ids.

  Raises:
    FileNotFoundError, ValueError: see `of_model`.
  """
  return {
    name: of_model(automodel.resolve_folder(path))
    for name, path in paths.items()
    if path is not None
  }


def of_model(folder: pathlib.Path) -> str:
  """Of config.json, and of every tensor's name, dtype, shape and samples.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  config = tensor_files.read_json(folder / "config.json")
  tensors = tensor_files.open_folder(folder)
  weights = [_of_tensor(tensors[name]) for name in sorted(tensors)]
  return digest([json.dumps(config, sort_keys=True), weights])


def _of_tensor(tensor: tensor_files.StoredTensor) -> Any:
  raw = tensor.map().reshape(-1).view(np.uint8)  # read where it is touched
  samples = raw[:SAMPLE_BYTES].tobytes() + raw[-SAMPLE_BYTES:].tobytes()
  sample = hashlib.sha256(samples).hexdigest()
  return tensor.name, str(tensor.dtype), tensor.shape, sample


def of_file(path: str) -> str:
  """SHA-256 of a file.

  Raises:
    FileNotFoundError: there is none.
  """
  with pathlib.Path(path).expanduser().open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def of_tokenizer(tokenizer: TokenizerAdapter, source: str) -> str:
  """Of the vocabulary's files, where `source` is a folder, and the special tokens."""
  place = pathlib.Path(source).expanduser()
  folder = place.parent if place.is_file() else place
  for names in _VOCABULARIES:
    files = [folder / name for name in names if (folder / name).is_file()]
    if files:
      break
  contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
  roles = (tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id())
  special = sorted(tokenizer.special_tokens().items())
  return digest([contents, tokenizer.vocab_size, roles, special])


def digest(value: Any) -> str:
  """SHA-256 of a plain value."""
  return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()
