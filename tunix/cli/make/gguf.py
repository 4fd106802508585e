"""Export of a model or an adapter as a GGUF file, for llama.cpp and Ollama."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from tunix.cli.make import objects, ollama
from tunix.cli.make.loading import ModelLoader
from tunix.cli.settings.run import RunSettings
from tunix.generate.tokenizer import files as tokenizer_files
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.files import tensor_files
from tunix.models.gguf import (
  tensors as gguf_tensors,
  tokenizer_keys,
  writer,
)
from tunix.models.transformer.model import Transformer
from tunix.utils import checks

_MODELFILE = "Modelfile"


def check(config: RunSettings, kind: str, tensors: str) -> None:
  """Refuses what cannot be exported, before the weights are loaded.

  Args:
    config: settings of the run.
    kind: "full", "merged" or "adapter".
    tensors: type of the tensors.

  Raises:
    ImportError: the package `gguf` is missing.
    ValueError: the type is unknown, or llama.cpp has no such model or tokenizer.
  """
  if tensors not in writer.KINDS:
    raise ValueError(f"gguf is {tensors!r}; expected one of {', '.join(writer.KINDS)}")
  if config.export.dtype is not None:
    raise ValueError(
      f"dtype is {config.export.dtype!r} and gguf {tensors!r}, which is a type of the "
      "tensors too. Omit dtype"
    )
  loader = ModelLoader(config)
  sizes = loader.sizes()
  writer.check(sizes)
  if kind != "adapter":
    _metadata(loader.tokenizer(), sizes.vocab_size)


def export(
  config: RunSettings, model: Transformer, kind: str, folder: pathlib.Path, tensors: str
) -> None:
  """Writes a GGUF file and its Modelfile.

  Args:
    config, kind, tensors: see `check`.
    model: the trained model.
    folder: folder to write.

  Raises:
    ImportError, ValueError: see `check`.
    OSError: the disk is full or not writable.
  """
  tokenizer = ModelLoader(config).tokenizer()
  is_adapter = kind == "adapter"
  name = f"{'adapter' if is_adapter else 'model'}-{tensors}.gguf"
  with tensor_files.staged_folder(folder) as staging:
    if is_adapter:
      writer.write_adapter(model, staging / name, tensors)
      text = ollama.modelfile(tokenizer, _base(config), f"./{name}")
    else:
      metadata = _metadata(tokenizer, model.config.vocab_size)
      writer.write_model(model, staging / name, tensors, metadata)
      text = ollama.modelfile(tokenizer, f"./{name}", None)
    (staging / _MODELFILE).write_text(text)


def _base(config: RunSettings) -> str:
  """Returns the base model of an adapter: a folder, or a file beside the adapter."""
  path = config.model.path
  if path is None or objects.is_name(path):
    return "./model.gguf"
  folder = ModelLoader(config).folder()
  file = folder / gguf_tensors.NAME  # the model was read from a GGUF file
  return str(file.resolve() if file.exists() else folder.absolute())


def _metadata(tokenizer: TokenizerAdapter, rows: int) -> dict[str, Any]:
  """Returns the metadata of a tokenizer.

  Args:
    tokenizer: the tokenizer.
    rows: rows of the model's embedding.
  """
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer.save(scratch)
    files = tokenizer_files.read_folder(pathlib.Path(scratch))
    if files.tokenizer_json is None:
      raise ValueError(
        f"the tokenizer is {checks.type_of(tokenizer.tokenizer)}, which saves no "
        "tokenizer.json. Set tokenizer.path to a folder that has it"
      )
    content = json.loads(files.tokenizer_json.read_text(encoding="utf-8"))
  keys = tokenizer_keys.metadata_of(
    content,
    roles=files.tokens,
    eos_ids=tokenizer.eos_ids(),
    chat_template=tokenizer.chat_template,
    add_bos=tokenizer.add_bos,
    rows=rows,
  )
  # Special tokens take the spaces after them in models with this name only.
  strips = any(x["special"] and x["rstrip"] for x in content.get("added_tokens") or ())
  return keys | ({"general.name": "phi3"} if strips else {})
