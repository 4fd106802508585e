"""Writer of a model as a Hugging Face folder, which `transformers` can load."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tunix.models import families
from tunix.models.adapters import lora_modules, token_rows
from tunix.models.adapters.lora_modules import CastError
from tunix.models.families import Family
from tunix.models.files import tensor_files
from tunix.models.files.tensor_files import NewTensor
from tunix.models.transformer import params
from tunix.models.transformer.config import ShardingRules, TransformerConfig
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib, tree

MAX_SHARD_BYTES = 5 * 10**9

_log = logging.getLogger(__name__)

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields of a source's `config.json` that are about weights or code in other files.
_NOT_WRITTEN = {"auto_map", "compression_config", "num_nextn_predict_layers"}
_NOT_WRITTEN |= {"quantization_config", "mtp_num_hidden_layers"}


def save_pretrained(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  source: str | os.PathLike[str] | None = None,
  dtype: DTypeLike | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  hf_fields: Mapping[str, Any] | None = None,
  family: Family | None = None,
) -> None:
  """Writes `config.json`, safetensors and the source's tokenizer files.

  Adapters are merged into their weights in float32, one parameter at a time, and the
  error of rounding to `dtype` is logged. Quantized kernels are written dequantized.
  After an error no files are left behind; `tensor_files.staged_folder` describes saving
  into an existing folder. A model that is spread over several processes must be saved
  by all of them, into a folder that they share. Each process writes its part of the
  files and holds one whole parameter at a time.

  Args:
    model: the model, stacked or unstacked, with or without adapters. It is unchanged.
    folder: the folder to write; its parents are created.
    source: a folder whose tokenizer, chat templates, generation config, token ids and
      unknown fields of `config.json` are copied, usually the folder that the model was
      loaded from.
    dtype: dtype of the written weights; None keeps the model's.
    max_shard_bytes: largest size of a file in bytes; a larger tensor gets its own file.
    hf_fields: further fields of `config.json`, for example {"eos_token_id": 2}.
    family: the kind of model; None selects it by the class of the configuration.

  Raises:
    FileNotFoundError: `source` is no folder.
    ValueError: a parameter has no Hugging Face name, or the family's `config.json`
      cannot describe the model.
    OSError: the disk is full or not writable.
  """
  family = family or families.of_config(model.config)
  origin = None if source is None else pathlib.Path(source)
  if origin is not None and not origin.is_dir():
    raise FileNotFoundError(
      f"there is no folder {origin}: give the folder with the tokenizer files (that of "
      "a GGUF file is automodel.resolve_folder(FILE))"
    )
  config = model.config
  if dtype is not None and isinstance(config, TransformerConfig):
    config = dataclasses.replace(config, param_dtype=jnp.dtype(dtype))
  hf = described(config, family)
  known = {}
  if origin is not None and (origin / "config.json").is_file():
    known = tensor_files.read_json(origin / "config.json")
  hf = _unknown_fields(known, hf, family) | hf | _token_ids(known)
  hf |= hf_fields or {}
  errors: list[CastError] = []
  tensors = list(new_tensors(model, family, dtype, errors))
  together = tensor_files.is_spread(model)
  with tensor_files.staged_folder(pathlib.Path(folder), together=together) as staging:
    tensor_files.write_shards(staging, tensors, max_shard_bytes, together=together)
    if not together or jax.process_index() == 0:
      if origin is not None:
        tensor_files.copy_companions(origin, staging)
      (staging / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
  lora_modules.report_errors(errors, None, _log)


def described(config: Any, family: Family) -> dict[str, Any]:
  """Returns the family's `config.json` of a model.

  Raises:
    ValueError: a field is read back with another value, so that the file would be read
      as another model; the message names both values.
  """
  hf = family.config_to_hf(config)
  if isinstance(config, TransformerConfig):
    _check_complete(config, hf, family)
  return hf


def _check_complete(
  config: TransformerConfig, hf: Mapping[str, Any], family: Family
) -> None:
  back = vars(_canonical(family.config_from_hf(hf)))
  for name, value in vars(_canonical(config)).items():
    reread = back[name]
    close = isinstance(value, float) and isinstance(reread, float)
    if value != reread and not (close and math.isclose(value, reread, rel_tol=1e-6)):
      raise ValueError(
        f"{name} is {value!r}, which a config.json of {family.name} cannot express (it "
        f"would be read as {reread!r}): save the model as another family, see family="
      )


def _canonical(config: TransformerConfig) -> TransformerConfig:
  """Returns a configuration that compares equal for equal mathematical functions.

  Fields that do not change the function, such as dtypes and sharding, are reset.
  """
  types = set(config.layer_types or ())
  slides = "sliding" in types
  moe = config.moe and dataclasses.replace(config.moe, implementation="ragged")
  layers = map(config.of_layer, range(config.num_layers))
  has_mlp = moe is None or any(layer.moe is None for layer in layers)
  return dataclasses.replace(
    config,
    layer_types=config.layer_types if types - {"full"} or config.type_fields else None,
    sliding_window=config.sliding_window if slides else None,
    local_rope=(config.local_rope or config.rope) if slides else None,
    query_scale=config.query_scale or config.head_dim**-0.5,
    moe=moe,
    hidden_dim=config.hidden_dim if has_mlp else 1,  # no layer has such an MLP
    param_dtype=jnp.float32,
    dtype=jnp.float32,
    remat="none",
    attention="auto",
    batch_invariant=False,
    scan_layers=None,
    sharding=ShardingRules(),
  )


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
  return {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}


def _unknown_fields(
  source: Mapping[str, Any], hf: Mapping[str, Any], family: Family
) -> dict[str, Any]:
  """Returns the fields of the source's `config.json` that say nothing about the model.

  Args:
    source: the source's `config.json`.
    hf: the one that is written. Fields with which it is read as another model, such as
      another spelling of a setting that was changed, are left out.
    family: the family of the model.
  """
  extra: dict[str, Any] = {}
  if not source or source.get("model_type") != hf.get("model_type"):
    return extra  # for example the text part of a model of texts and images
  config = family.config_from_hf(hf)
  for name, value in source.items():
    if name in hf or name in _NOT_WRITTEN:
      continue
    with contextlib.suppress(ValueError):
      if family.config_from_hf({**extra, **hf, name: value}) == config:
        extra[name] = value
  return extra


def new_tensors(
  model: Transformer,
  family: Family,
  dtype: DTypeLike | None,
  errors: list[CastError],
) -> Iterator[NewTensor]:
  """Yields the model's tensors, with adapters merged, parameter by parameter.

  A parameter is fetched when its first tensor is read, so that tensors are read in this
  order.

  Args:
    model: see `save_pretrained`.
    family: the kind of model.
    dtype: dtype of the tensors; None keeps the model's.
    errors: gets the rounding error of each merged adapter when it is fetched.
  """
  model = token_rows.merged(model)
  linears = lora_modules.linears(model)
  for path, value in tree.flatten(nnx.state(model, nnx.Param)).items():
    module, _, field = path.rpartition(".")
    if field.startswith("lora_") or field == "scales":
      continue
    if field == "codes":  # codes and scales together are one quantized kernel
      path, (module, _, field) = module, module.rpartition(".")
    linear = linears.get(module) if field == "kernel" else None
    parameter = value if linear is None else linear.stored
    place = params.place(family.names, path, model.config)
    target = np.dtype(parameter.dtype if dtype is None else jnp.dtype(dtype))
    leaf = _Leaf(path, value, linear, place, target, errors)
    shape = place.tensor_shape(parameter.shape)
    for i, key in enumerate(place.keys):
      yield NewTensor(key, target, shape, functools.partial(leaf.read, i))


class _Leaf:
  """One parameter, copied to the host once for all of its tensors."""

  def __init__(
    self,
    path: str,
    value: jax.Array,
    linear: Linear | None,
    place: params.Placement,
    dtype: np.dtype,
    errors: list[CastError],
  ):
    self.errors = errors
    self.place = place
    self.path = path
    self.value = value
    self.linear = linear
    self.dtype = dtype
    self.host: list[np.ndarray] | None = None

  def read(self, number: int) -> np.ndarray:
    """Returns the tensor `place.keys[number]`; the last one frees the host's copy.

    Tensors are read in order, see `tensor_files.write_file`.
    """
    if self.host is None:
      self.host = self.place.split(self._fetch())
    out = np.asarray(self.host[number], self.dtype, order="C")  # keeps scalars
    if number + 1 == len(self.host):
      self.host = None
    return out

  def _fetch(self) -> np.ndarray:
    value = self.value
    linear = self.linear
    if linear is not None and linear.lora_a is not None:
      value, error = lora_modules.merged_kernel(self.path, linear, self.dtype)
      self.errors.append(error)
    elif linear is not None and lora_modules.is_quantized(linear):
      value = lora_modules.dense_kernel(linear, linear.stored.dtype)
    if not value.is_fully_addressable:
      return mesh_lib.to_host(value)
    # A jax.Array caches its host copy as long as it exists. A new jax.Array with the
    # same buffers is deleted after the copy, so the model's array caches nothing.
    parts = [shard.data for shard in value.addressable_shards]
    return np.asarray(
      jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)
    )
