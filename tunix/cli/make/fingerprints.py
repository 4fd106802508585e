"""Digests of what a run reads; a resumed run must find the same ones.

A digest depends on contents and not on paths, so files may be moved or copied.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.cli.make import objects
from tunix.cli.settings import keys
from tunix.cli.settings.run import RunSettings
from tunix.data.reading.stored import Records
from tunix.data.reading.stream import Streamed
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel
from tunix.models.files import tensor_files
from tunix.models.gguf import tensors as gguf_tensors

# Bytes that are read at the start and at the end of each tensor. Whole files would take
# minutes, and training or merging changes every number of a tensor.
SAMPLE_BYTES = 4 * 1024

# Files that define the vocabulary of a tokenizer; the first entry that exists counts.
_VOCABULARIES = (
  ("tokenizer.json",),
  ("tokenizer.model",),
  ("vocab.json", "merges.txt"),
)


def of_inputs(
  config: RunSettings,
  tokenizer: TokenizerAdapter,
  records: Mapping[str, Records | Streamed],
) -> dict[str, str]:
  """Returns digests of the data files, of the tokenizer and of the chat template."""
  return {
    **{name: part.fingerprint for name, part in records.items()},
    "chat_template": digest(tokenizer.chat_template),
    "tokenizer": of_tokenizer(
      tokenizer, config.tokenizer.path or config.model.path or ""
    ),
  }


def of_config(config: RunSettings) -> dict[str, str]:
  """Returns the digests of all models that the configuration names.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  entries, digests = keys.of_config(config), {}
  for dotted, path in keys.models(config).items():
    revision = config.model.revision if dotted == "model.path" else None
    name = entries[dotted].facts.fingerprint
    assert name is not None
    if objects.is_name(path):
      digests[name] = of_object(objects.get(path))
    else:
      digests[name] = of_model(automodel.resolve_folder(path, revision))
  return digests


def of_models(paths: Mapping[str, str | None]) -> dict[str, str]:
  """Returns the digests of models by name; names without a path are left out.

  Args:
    paths: folder or hub id by name.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  return {
    name: of_model(automodel.resolve_folder(path))
    for name, path in paths.items()
    if path is not None
  }


def of_model(folder: pathlib.Path) -> str:
  """Returns the digest of config.json and of every tensor.

  Of a tensor it covers name, dtype, shape and the first and last `SAMPLE_BYTES`.

  Raises:
    FileNotFoundError, ValueError: weights are missing or damaged.
  """
  config = tensor_files.read_json(folder / "config.json")
  gguf = folder / gguf_tensors.NAME
  tensors = (
    gguf_tensors.as_bytes(gguf) if gguf.exists() else tensor_files.open_folder(folder)
  )
  weights = [_of_tensor(tensors[name]) for name in sorted(tensors)]
  return digest([json.dumps(config, sort_keys=True), weights])


def of_object(model: nnx.Module) -> str:
  """Returns the digest of a model in memory: a sample of every array.

  Of an array it covers path, dtype, shape and the first `SAMPLE_BYTES`; of an array
  that several processes hold, no values.
  """
  parts = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
    held = (jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape)
    if leaf.is_fully_addressable:
      count = SAMPLE_BYTES // leaf.dtype.itemsize
      held = (*held, np.asarray(leaf.reshape(-1)[:count]).tobytes())
    parts.append(held)
  return digest(parts)


def _of_tensor(tensor: tensor_files.StoredTensor) -> Any:
  raw = tensor.map().reshape(-1).view(np.uint8)  # mapped: only the samples are read
  samples = raw[:SAMPLE_BYTES].tobytes() + raw[-SAMPLE_BYTES:].tobytes()
  sample = hashlib.sha256(samples).hexdigest()
  return tensor.name, str(tensor.dtype), tensor.shape, sample


def of_file(path: str) -> str:
  """Returns the SHA-256 of a file.

  Raises:
    FileNotFoundError: there is no such file.
  """
  with pathlib.Path(path).expanduser().open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def of_tokenizer(tokenizer: TokenizerAdapter, source: str) -> str:
  """Returns the digest of a tokenizer: vocabulary files, size and special tokens.

  Args:
    tokenizer: the tokenizer.
    source: folder or file that it was loaded from; or a hub id or a GGUF file, whose
      vocabulary is left out.
  """
  place = pathlib.Path(source).expanduser()
  folder = place.parent if place.name == "tokenizer.json" else place
  for names in _VOCABULARIES:
    files = [folder / name for name in names if (folder / name).is_file()]
    if files:
      break
  contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
  roles = (tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id())
  special = sorted(tokenizer.special_tokens().items())
  return digest([contents, tokenizer.vocab_size, roles, special])


def digest(value: object) -> str:
  """Returns the SHA-256 of a plain value."""
  return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()
