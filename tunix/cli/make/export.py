"""Writes a trained model or adapter, and chooses the dtype of the written weights."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from tunix.cli.make import former, gguf as gguf_export, objects
from tunix.cli.make.loading import ModelLoader
from tunix.cli.settings.run import RunSettings, TokenizerSettings
from tunix.models import automodel, lora, safetensors_saver
from tunix.models.files import stored_formats, sums as file_sums, tensor_files
from tunix.models.transformer.model import Transformer


def export(
  config: RunSettings,
  model: Transformer,
  kind: str,
  folder: pathlib.Path,
  gguf: str | None = None,
) -> None:
  """Writes a model (with adapters merged) or an adapter, with the tokenizer.

  Args:
    config: settings of the run.
    model: the trained model.
    kind: "full", "merged" or "adapter".
    folder: folder to write.
    gguf: type of the tensors of a GGUF file; None: safetensors.

  Raises:
    ValueError: `kind` does not fit the model.
    OSError: the disk is full or not writable.
  """
  config = dataclasses.replace(config, tokenizer=_saved_settings(config))
  if gguf is None:
    _export_folder(config, model, kind, folder)
  else:
    gguf_export.export(config, model, kind, folder, gguf)
  if jax.process_index() == 0 and config.export.checksums:
    file_sums.write(folder)


def _export_folder(
  config: RunSettings, model: Transformer, kind: str, folder: pathlib.Path
) -> None:
  path = None if objects.is_name(config.model.path) else config.model.path
  if kind == "adapter":
    lora.save_adapter(model, folder, base=path, revision=config.model.revision)
  else:
    source, files = None, config.tokenizer.path
    if path is not None:
      source = ModelLoader(config).folder()
    elif files is not None and not objects.is_name(files):
      source = automodel.resolve_folder(files)
    dtype = export_dtype(config, model)
    safetensors_saver.save_pretrained(model, folder, source=source, dtype=dtype)
  if jax.process_index() != 0:
    return
  # A model without settings of the tokenizer has a copy of the tokenizer of `source`.
  if kind == "adapter" or config.tokenizer != TokenizerSettings():
    ModelLoader(config).tokenizer().save(folder)


def _saved_settings(config: RunSettings) -> TokenizerSettings:
  """Returns the settings of the tokenizer that change its saved files."""
  as_is = dataclasses.replace(config.tokenizer, messages=None, add_bos=None)
  # Older versions put BOS before plain texts in training, and not into the files.
  add_bos = config.tokenizer.add_bos
  if add_bos is None or former.has_all(config):
    return as_is
  files = dataclasses.replace(config, tokenizer=as_is)
  is_own = ModelLoader(files).tokenizer().add_bos == add_bos
  return as_is if is_own else dataclasses.replace(as_is, add_bos=add_bos)


def export_dtype(config: RunSettings, model: Transformer) -> Any:
  """Returns the dtype in which a whole model is written.

  It is `export.dtype`; else the source checkpoint's, so that fine-tuning a bfloat16
  folder gives a bfloat16 folder; without a checkpoint the dtype of the computation.

  Raises:
    FileNotFoundError, ValueError: the checkpoint's files are missing or damaged.
  """
  if config.export.dtype is not None:
    return jnp.dtype(config.export.dtype)
  source = config.model
  # Without model.dtype the model computes in the checkpoint's dtype.
  if source.path is None or source.dtype is None or objects.is_name(source.path):
    return jnp.dtype(model.config.dtype)
  return _stored_dtype(automodel.resolve_folder(source.path, source.revision))


def describe_precision(config: RunSettings, model: Transformer) -> str:
  """Returns a line with the dtypes of weights, computation and export."""
  frozen = config.lora is not None
  weights = f"{'frozen ' if frozen else ''}weights {_name(model.config.param_dtype)}"
  parts = [weights, f"computation {_name(model.config.dtype)}"]
  if config.export_kind in ("full", "merged"):
    parts.append(f"export {_name(export_dtype(config, model))}")
  return "precision: " + ", ".join(parts)


def _stored_dtype(folder: pathlib.Path) -> Any:
  """Returns the dtype that config.json names, else the dtype of the first tensor."""
  hf = tensor_files.read_json(folder / "config.json")
  named = automodel.named_dtype(hf)
  if named is not None:
    return named
  tensors = stored_formats.decoded(hf, tensor_files.open_folder(folder))
  return next(iter(tensors.values())).dtype


def _name(dtype: Any) -> str:
  return jnp.dtype(dtype).name
