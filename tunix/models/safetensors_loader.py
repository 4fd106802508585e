"""Loader that builds a model from stored tensors.

For each device, only the slice that it holds is read from the files. A stacked
parameter is assembled from the tensors of its layers. On a CPU, the peak of memory is
the model, its largest slice and some megabytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix.models import quantization
from tunix.models.families import Family
from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.files.weight_reader import WeightReader
from tunix.models.quantization import QuantizationConfig
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.dense.layers import fresh as fresh_weights
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.utils import tree

_log = logging.getLogger(__name__)


def load_model(
  tensors: Mapping[str, StoredTensor],
  config: object,
  family: Family,
  mesh: Mesh | None = None,
  quantize: QuantizationConfig | str | None = None,
) -> Transformer:
  """Builds a model and fills it with the tensors of a checkpoint.

  Args:
    tensors: the tensors of the checkpoint, see `tensor_files.open_folder`.
    config: the configuration that the family's class is built with.
    family: the class and the table of tensor names.
    mesh: the mesh that the weights are laid out on; None for the default device.
    quantize: the method that stores the layers' kernels in 4 or 8 bits, each quantized
      when it is read; None keeps their dtype.

  Raises:
    ValueError: a tensor is missing, has another shape, or has no place in the model.
  """
  graph, state = sharding.abstract(lambda: family.model_class(config, rngs=nnx.Rngs(0)))
  shapes = tree.flatten(state)
  places = {path: params.place(family.names, path, config) for path in shapes}
  fresh = {path for path in places if _is_fresh(places[path], tensors)}
  for path, place in places.items():
    for key in place.keys if path not in fresh else ():
      _check(tensors.get(key), key, place.tensor_shape(shapes[path].shape), path)
  used = {key for place in places.values() for key in place.keys}
  _check_extra(set(tensors) - used, config, family)

  targets = None
  if mesh is not None:
    targets = tree.flatten(sharding.named_shardings(state, mesh))

  packer = None
  if quantize is not None and not isinstance(config, TransformerConfig):
    raise ValueError(
      f"quantize is {quantize!r}: only our decoder is quantized on loading, not a "
      f"{family.name}; leave it out"
    )
  if quantize is not None:
    packer = quantization.OnLoad(quantize, nnx.merge(graph, state))

  with WeightReader(tensors) as reader:

    def load(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.Array:
      name = tree.path_name(path)
      where = targets[name] if targets else None
      if name in fresh:
        return _draw(leaf, where)
      value = reader.load(places[name], leaf.shape, leaf.dtype, where)
      if packer is None:
        return value
      reader.settle()
      return packer.packed(name, value)

    model = nnx.merge(graph, jax.tree_util.tree_map_with_path(load, state))
    return model if packer is None else packer.finish(model)


def _is_fresh(place: params.Placement, tensors: Mapping[str, StoredTensor]) -> bool:
  """Returns True for a score head that the checkpoint of a language model lacks."""
  return place.path == "score.kernel" and place.keys[0] not in tensors


def _draw(leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding | None) -> jax.Array:
  """Draws a score head from a fixed key, so that all processes get the same one."""
  _log.warning("the checkpoint has no score head: it is initialized randomly")
  value = fresh_weights(jax.random.key(0), leaf.shape).astype(leaf.dtype)
  return value if where is None else jax.device_put(value, where)


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
      "point: quantized checkpoints are not supported"
    )


def _check_extra(extra: set[str], config: object, family: Family) -> None:
  """Refuses tensors that have no place in the model and are not harmless."""
  harmless = list(family.harmless)
  ours = isinstance(config, TransformerConfig)
  unneeded = ours and (config.tie_embeddings or config.num_scores is not None)
  if unneeded and "lm_head.kernel" in family.names:
    # Some writers store a tied embedding table twice. As in transformers, the copy is
    # ignored.
    harmless.append(re.escape(family.names["lm_head.kernel"].key))
  if family.mtp is not None and isinstance(config, TransformerConfig):
    mtp = family.mtp.of(config.num_layers)
    # A layer behind the last one can also be one that config.json does not count.
    if any(key.startswith(f"{mtp.join}.") for key in extra):
      harmless.append(re.escape(mtp.prefix) + ".*")
  unknown = sorted(
    key for key in extra if not any(re.fullmatch(p, key) for p in harmless)
  )
  if unknown:
    rest = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    raise ValueError(
      f"the checkpoint has the tensors {', '.join(map(repr, unknown[:3]))}{rest}, "
      f"which a {family.name} model of this config does not have. Check config.json"
    )
