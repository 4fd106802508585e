"""What a run reads, as short digests that are compared when it is resumed.

Contents count, not places: files that were moved or copied are the same.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tunix.cli.schema import Config
from tunix.data.formats import JsonlRecords
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, tensor_files

# Read of each weight file behind its header and at its end. Whole files would take
# minutes; training changes every weight, and so also these.
SAMPLE_BYTES = 64 * 1024

# What defines a tokenizer besides its special tokens; the first that is there.
_VOCABULARIES = (
  ("tokenizer.json",),
  ("tokenizer.model",),
  ("vocab.json", "merges.txt"),
)


def of_inputs(
  config: Config, tokenizer: TokenizerAdapter, records: Mapping[str, JsonlRecords]
) -> dict[str, str]:
  """Digests of the data files, of the tokenizer and of the chat template."""
  return {
    **{name: part.fingerprint for name, part in records.items()},
    "chat_template": digest(tokenizer.chat_template),
    "tokenizer": of_tokenizer(
      tokenizer, config.tokenizer.path or config.model.path or ""
    ),
  }


def of_base(config: Config) -> dict[str, str]:
  """{"model": digest of the checkpoint}; empty for a model from scratch.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  if config.model.path is None:
    return {}
  return {"model": of_model(automodel.resolve_folder(config.model.path))}


def of_model(folder: pathlib.Path) -> str:
  """Of config.json and of every weight file's name, size, header and samples.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  config = tensor_files.read_json(folder / "config.json")
  tensors = tensor_files.open_folder(folder).values()
  files = sorted({tensor.file for tensor in tensors})
  return digest([json.dumps(config, sort_keys=True), *map(_of_weights, files)])


def _of_weights(file: pathlib.Path) -> list[Any]:
  size = file.stat().st_size
  with file.open("rb") as stream:
    length = stream.read(8)
    head = stream.read(int.from_bytes(length, "little") + SAMPLE_BYTES)
    stream.seek(max(0, size - SAMPLE_BYTES))
    tail = stream.read()
  return [file.name, size, *(hashlib.sha256(part).hexdigest() for part in (head, tail))]


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
