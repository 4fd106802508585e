"""A model -> a Hugging Face folder that `transformers` loads back."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tunix.models import families, lora_modules, tensor_files
from tunix.models.families import Family
from tunix.models.lora_modules import CastError
from tunix.models.tensor_files import NewTensor
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig, canonical
from tunix.models.transformer.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib, tree

MAX_SHARD_BYTES = 5 * 10**9

_log = logging.getLogger(__name__)

# What else a Hugging Face folder needs to be used: copied from the model's source.
_COMPANIONS = (
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "merges.txt",
  "preprocessor_config.json",
  "processor_config.json",
  "special_tokens_map.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "vocab.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


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

  Adapters are merged into their weights, in float32, one parameter at a time, and what
  the rounding to `dtype` cost is logged. Quantised kernels are written dequantised.
  Nothing is left behind after an error; see `tensor_files.staged_folder` for a folder
  that exists. A model that is spread over several processes is saved by all of them,
  each writing its part of the files into a folder that they share; one parameter at a
  time is whole in every process.

  Args:
    model: stacked or unstacked, adapted or not; unchanged.
    folder: where to; its parents are made.
    source: folder whose tokenizer, chat template, generation config and token ids are
      taken over, usually the one the model was loaded from.
    dtype: of the weights written; None keeps the model's.
    max_shard_bytes: largest file, in bytes; a single larger tensor gets its own.
    hf_fields: more fields of `config.json`, for example {"eos_token_id": 2}.
    family: the kind of model; None: found by the config's class.

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
      f"there is no folder {origin}: give the folder that the tokenizer files lie in"
    )
  config = model.config
  if dtype is not None and isinstance(config, TransformerConfig):
    config = dataclasses.replace(config, param_dtype=jnp.dtype(dtype))
  hf = family.config_to_hf(config)
  if isinstance(config, TransformerConfig):
    _check_complete(config, hf, family)
  hf = hf | _token_ids(origin) | dict(hf_fields or {})
  errors: list[CastError] = []
  tensors = list(_tensors(model, family, dtype, errors))
  together = tensor_files.is_spread(model)
  with tensor_files.staged_folder(pathlib.Path(folder), together=together) as staging:
    tensor_files.write_shards(staging, tensors, max_shard_bytes, together=together)
    if not together or jax.process_index() == 0:
      for name in _COMPANIONS:
        if origin is not None and (origin / name).is_file():
          shutil.copyfile(origin / name, staging / name)
      (staging / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
  lora_modules.tell(errors, None, _log)


def _check_complete(
  config: TransformerConfig, hf: Mapping[str, Any], family: Family
) -> None:
  """Refuses a model that the family's `config.json` cannot describe: it would be read
  back as another one.

  Raises:
    ValueError: names the field and its value.
  """
  back = canonical(family.config_from_hf(hf))
  for name, value in vars(canonical(config)).items():
    reread = getattr(back, name)
    close = isinstance(value, float) and isinstance(reread, float)
    if value != reread and not (close and math.isclose(value, reread, rel_tol=1e-6)):
      raise ValueError(
        f"{name} is {value!r}, which a config.json of {family.name} cannot say (it "
        f"would be read as {reread!r}): save the model as another family, see family="
      )


def _token_ids(origin: pathlib.Path | None) -> dict[str, Any]:
  if origin is None or not (origin / "config.json").is_file():
    return {}
  hf = tensor_files.read_json(origin / "config.json")
  return {name: hf[name] for name in _TOKEN_IDS if hf.get(name) is not None}


def _tensors(
  model: Transformer,
  family: Family,
  dtype: DTypeLike | None,
  errors: list[CastError],
) -> Iterator[NewTensor]:
  """The model's tensors, parameter by parameter, each fetched when written; what
  merging cost is added to `errors` then."""
  linears = lora_modules.linears(model)
  for path, value in tree.flatten(nnx.state(model, nnx.Param)).items():
    module, _, field = path.rpartition(".")
    if field.startswith("lora_") or field == "scales":
      continue
    if field == "codes":  # and the scales: one quantised kernel
      path, (module, _, field) = module, module.rpartition(".")
    linear = linears.get(module) if field == "kernel" else None
    shape, held = value.shape, value.dtype
    if linear is not None:
      shape, held = linear.kernel.shape, linear.kernel.dtype
    place = params.place(family.names, path, model.config)
    target = np.dtype(held if dtype is None else jnp.dtype(dtype))
    leaf = _Leaf(path, value, linear, target, errors)
    for i, key in enumerate(place.keys):
      yield NewTensor(
        key,
        target,
        place.tensor_shape(shape),
        functools.partial(
          leaf.read,
          tuple(map(int, np.unravel_index(i, place.lead))) if place.lead else (),
          place.transpose,
          i + 1 == len(place.keys),
        ),
      )


class _Leaf:
  """One parameter, brought to the host once for all of its tensors."""

  def __init__(
    self,
    path: str,
    value: jax.Array,
    linear: Linear | None,
    dtype: np.dtype,
    errors: list[CastError],
  ):
    self.errors = errors
    self.path = path
    self.value = value
    self.linear = linear
    self.dtype = dtype
    self.host: np.ndarray | None = None

  def read(self, at: tuple[int, ...], transpose: bool, last: bool) -> np.ndarray:
    if self.host is None:
      self.host = self._fetch()
    out = self.host[at]
    out = np.ascontiguousarray(out.T if transpose else out, self.dtype)
    if last:
      self.host = None
    return out

  def _fetch(self) -> np.ndarray:
    value = self.value
    linear = self.linear
    if linear is not None and linear.lora_a is not None:
      value, error = lora_modules.merged_kernel(self.path, linear, self.dtype)
      self.errors.append(error)
    elif linear is not None and lora_modules.is_quantised(linear):
      value = lora_modules.dense_kernel(linear, linear.kernel.dtype)
    if not value.is_fully_addressable:
      return mesh_lib.to_host(value)
    # A new jax.Array around the same buffers: the one of the model would keep its
    # host copy for as long as it lives.
    parts = [shard.data for shard in value.addressable_shards]
    return np.asarray(
      jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)
    )
