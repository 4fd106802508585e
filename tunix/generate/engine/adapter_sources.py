"""Reader of the adapters that a bank loads: PEFT folders and models with adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tunix.models.adapters import (
  files as adapter_files,
  lora_modules,
  token_rows,
  whole_modules,
)
from tunix.models.adapters.lora_modules import Adapter
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib

Source = str | os.PathLike[str] | Transformer | Mapping[str, Adapter]


def read(
  name: str, source: Source, config: TransformerConfig, dtype: DTypeLike
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Returns A [..., in, r] and scale * B [..., r, out] by the path of the module.

  Paths are those of an unstacked model ("layers.0.attn.q_proj"). `r` may differ between
  modules.

  Args:
    name: the adapter's name, for messages.
    source: a folder that `save_adapter` or PEFT wrote, a model with adapters, or
      adapters by the path of their module in a stacked or unstacked model.
    config: the configuration of the base model.
    dtype: dtype of the results.

  Raises:
    FileNotFoundError: the folder or one of its two files does not exist.
    ValueError: the adapter is no plain LoRA adapter, adapts no module, has another
      number of layers than the model, is not finite in `dtype`, or see
      `adapter_files.load_adapter`.
  """
  adapters = _adapters(name, source, config)
  if not adapters:
    raise ValueError(
      f"adapter {name!r} adapts no module; expected at least one. Check its targets"
    )
  out = {}
  for path, adapter in adapters.items():
    if adapter.magnitude is not None:
      raise ValueError(
        f"adapter {name!r} has magnitudes (lora_magnitude) in {path}: it is a DoRA "
        "adapter; expected plain LoRA. Merge it and run the merged model"
      )
    a, b = (np.asarray(x, np.float32) for x in (adapter.a, adapter.b))
    with np.errstate(over="ignore"):  # infinite numbers are refused below
      pair = a.astype(dtype), (b * adapter.scale).astype(dtype)
    # One inf or NaN in B would reach every row, because 0 * inf is NaN.
    if not all(np.isfinite(x.astype(np.float32)).all() for x in pair):
      raise ValueError(
        f"adapter {name!r} has NaN or infinite numbers in A or scale * B of {path} as "
        f"{np.dtype(dtype)}; expected finite ones. Check the run that trained it"
      )
    # A stack of experts has a second leading axis and keeps it. The bank refuses it.
    stacked = a.ndim > 2 and path.startswith("layers.") and not _is_layer(path)
    parts = zip(*pair) if stacked else (pair,)
    names = layer_paths(path, config) if stacked else [path]
    if stacked and len(names) != a.shape[0]:
      raise ValueError(
        f"adapter {name!r} has {a.shape[0]} layers in {path}; expected {len(names)}, "
        "the number of layers of the model's stack"
      )
    out |= dict(zip(names, parts))
  return out


def layer_paths(path: str, config: TransformerConfig) -> list[str]:
  """Returns the paths that the modules of a stack have in the unstacked model."""
  generic = params.without_structure(path, config)
  layers = config.layers_of(path)
  return [generic.replace("layers.", f"layers.{i}.", 1) for i in layers]


def _is_layer(path: str) -> bool:
  return path.split(".")[1].isdigit()


def _adapters(
  name: str, source: Source, config: TransformerConfig
) -> Mapping[str, Adapter]:
  if isinstance(source, Mapping):
    return source
  if isinstance(source, Transformer):
    adapters, whole = _of_model(source), whole_modules.of(source)
    whole = {**whole, **token_rows.of(source)}
  else:
    # A folder is read for the stacked model without adapters. It needs no arrays.
    shapes = sharding.abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    adapters, whole = adapter_files.read_adapter(nnx.merge(*shapes), source)
  if whole:
    raise ValueError(
      f"adapter {name!r} has modules that were trained whole: {', '.join(whole)}; "
      "expected only LoRA factors. Merge it and run the merged model"
    )
  return adapters


def _of_model(model: Transformer) -> dict[str, Adapter]:
  lora_modules.require_adapters(model)
  out = {}
  for path, linear in lora_modules.adapted(model).items():
    a, b = (mesh_lib.to_host(x) for x in lora_modules.pair_of(linear))
    magnitude = lora_modules.magnitude_of(linear)
    out[path] = Adapter(a=a, b=b, magnitude=magnitude, scale=linear.lora_scale)
  return out
