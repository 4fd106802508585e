"""Safetensors -> a model whose weights are read straight to where they belong.

Each device gets the slice it holds; a stacked parameter is put together from its
layers' tensors. The peak is the model and one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.models import quantisation
from tunix.models.families import Family
from tunix.models.quantisation import QuantisationConfig
from tunix.models.tensor_files import StoredTensor
from tunix.models.transformer import params, sharding
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.model import Transformer
from tunix.utils import tree

Index = tuple[slice, ...]

# Rows turned at a time: a transposed copy in one go runs 3 to 5 times slower, because
# neither side is read along cache lines.
_ROWS = 32
_THREADS = 8


def load_model(
  tensors: Mapping[str, StoredTensor],
  config: TransformerConfig,
  family: Family,
  mesh: Mesh | None = None,
  quantise: QuantisationConfig | str | None = None,
) -> Transformer:
  """Builds a model and fills it.

  Args:
    tensors: of the checkpoint, see `tensor_files.open_folder`.
    config: shapes, dtypes and sharding rules; weights are cast to `param_dtype`.
    family: the class and the name table.
    mesh: where the weights go; None: the default device.
    quantise: how the layers' kernels are stored, each quantised when it is read; None:
      as they are.

  Raises:
    ValueError: a tensor is missing, has another shape, or has no place in the model.
  """
  graph, state = sharding.abstract(lambda: family.model_class(config, rngs=nnx.Rngs(0)))
  shapes = tree.flatten(state)
  places = {
    path: params.place(family.names, path, config.num_layers) for path in shapes
  }
  for path, place in places.items():
    for key in place.keys:
      _check(tensors.get(key), key, place.tensor_shape(shapes[path].shape), path)
  used = {key for place in places.values() for key in place.keys}
  _check_extra(set(tensors) - used, config, family)

  targets = None
  if mesh is not None:
    targets = tree.flatten(sharding.named_shardings(state, mesh))

  packer = None
  if quantise is not None:
    packer = quantisation.OnLoad(quantise, nnx.merge(graph, state))

  def load(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    name = tree.path_name(path)
    read = _reader(places[name], tensors, leaf.shape, leaf.dtype)
    value = _to_device(read, leaf.shape, targets[name] if targets else None)
    return value if packer is None else packer.packed(name, value)

  model = nnx.merge(graph, jax.tree_util.tree_map_with_path(load, state))
  return model if packer is None else packer.finish(model)


def _check(
  tensor: StoredTensor | None, key: str, shape: tuple[int, ...], path: str
) -> None:
  if tensor is None:
    hint = " or set tie_word_embeddings" if path.startswith("lm_head") else ""
    raise ValueError(
      f"tensor {key!r} is missing in the checkpoint, {path} needs it with shape "
      f"{shape}: use a complete checkpoint{hint}"
    )
  if tensor.shape != shape:
    raise ValueError(
      f"tensor {key!r} in {tensor.file.name} has shape {tensor.shape}, {path} needs "
      f"{shape}: config.json and the weights do not belong together"
    )
  if not jnp.issubdtype(tensor.dtype, jnp.floating):
    raise ValueError(
      f"tensor {key!r} in {tensor.file.name} holds {tensor.dtype}, expected floating "
      "point: quantised checkpoints are not supported"
    )


def _check_extra(
  extra: Iterable[str], config: TransformerConfig, family: Family
) -> None:
  """Every tensor must have a place, or be known as harmless."""
  harmless = list(family.harmless)
  if config.tie_embeddings and "lm_head.kernel" in family.names:
    # Some writers store the tied table twice; transformers ignores the copy too.
    harmless.append(re.escape(family.names["lm_head.kernel"].key))
  unknown = sorted(
    key for key in extra if not any(re.fullmatch(p, key) for p in harmless)
  )
  if unknown:
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    raise ValueError(
      f"the checkpoint holds {', '.join(map(repr, unknown[:3]))}{more}, which a "
      f"{family.name} model of this config has no place for: check config.json"
    )


def _reader(
  place: params.Placement,
  tensors: Mapping[str, StoredTensor],
  shape: tuple[int, ...],
  dtype: Any,
) -> Callable[[Index | None], np.ndarray]:
  """A function that reads any slice of one of our parameters, cast."""

  def read(index: Index | None) -> np.ndarray:
    index = (slice(None),) * len(shape) if index is None else index
    sizes = [len(range(*s.indices(n))) for s, n in zip(index, shape)]
    out = np.empty(sizes, dtype)
    keys = place.keys[index[0]] if place.stacked else place.keys
    inner = index[1:] if place.stacked else index
    targets = out if place.stacked else [out]

    def one(key: str, target: np.ndarray) -> None:
      _copy(target, tensors[key].map(), inner, place.transpose)

    # Copies release the interpreter's lock.
    with futures.ThreadPoolExecutor(min(len(keys), _THREADS)) as pool:
      for done in [pool.submit(one, *pair) for pair in zip(keys, targets)]:
        done.result()
    return out

  return read


def _copy(out: np.ndarray, source: np.ndarray, index: Index, transpose: bool) -> None:
  if not transpose:
    out[...] = source[index]
    return
  turned = source[index[::-1]]
  for row in range(0, turned.shape[0], _ROWS):
    out[:, row : row + _ROWS] = turned[row : row + _ROWS].T


def _to_device(
  read: Callable[[Index | None], np.ndarray],
  shape: tuple[int, ...],
  where: jax.sharding.Sharding | None,
) -> jax.Array:
  if where is None:
    return jax.device_put(read(None))
  return jax.make_array_from_callback(shape, where, read)
