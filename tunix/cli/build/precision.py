"""The dtypes of a run's weights: while they are trained, and when they are written."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp

from tunix.cli.settings.run import RunSettings
from tunix.models import automodel, tensor_files
from tunix.models.transformer.model import Transformer


def settle(config: RunSettings) -> RunSettings:
  """The configuration with the dtype of trained weights written out: float32.

  A bfloat16 weight has 8 bits: an update below 1/256 of it is rounded away, and at the
  usual learning rates nearly all are. Weights that adapters leave frozen keep null,
  which means the checkpoint's dtype.
  """
  if config.lora is not None or config.model.param_dtype is not None:
    return config
  model = dataclasses.replace(config.model, param_dtype="float32")
  return dataclasses.replace(config, model=model)


def of_export(config: RunSettings, model: Transformer) -> Any:
  """The dtype in which a whole model is written.

  That of `export.dtype`; else the source checkpoint's, so that a bfloat16 folder is
  fine-tuned to a bfloat16 folder; without a checkpoint that of the computation.

  Raises:
    FileNotFoundError, ValueError: the checkpoint's files are gone or damaged.
  """
  if config.export.dtype is not None:
    return jnp.dtype(config.export.dtype)
  # Without model.dtype the computation has the checkpoint's already.
  source = config.model
  if source.path is None or source.dtype is None:
    return jnp.dtype(model.config.dtype)
  return _stored(automodel.resolve_folder(source.path, source.revision))


def describe(config: RunSettings, model: Transformer) -> str:
  """One line for the user to check before the run."""
  frozen = config.lora is not None
  weights = f"{'frozen ' if frozen else ''}weights {_name(model.config.param_dtype)}"
  parts = [weights, f"computation {_name(model.config.dtype)}"]
  if config.export_kind in ("full", "merged"):
    parts.append(f"export {_name(of_export(config, model))}")
  return "precision: " + ", ".join(parts)


def _stored(folder: pathlib.Path) -> Any:
  """What config.json names, else the dtype of the first tensor."""
  hf = tensor_files.read_json(folder / "config.json")
  named = hf.get("dtype") or hf.get("torch_dtype")
  if named is not None:
    return jnp.dtype(named)
  return next(iter(tensor_files.open_folder(folder).values())).dtype


def _name(dtype: Any) -> str:
  return jnp.dtype(dtype).name
