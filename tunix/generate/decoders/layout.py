"""Layout of a model's weights while tokens are generated.

In training, every weight is also sharded over the batch axes (fsdp), and all-gathered
before it is used. The all-gathers take little time compared with matrix products over
thousands of tokens. A decode step has one token per row, so they would take most of its
time. The weights are therefore resharded once per request (`decode.opened`), in one of
two ways that need no all-gather of weights in a step:

- whole: each device holds the weights as if the batch axes were not in the spec;
- split: the batch axes split the other dimension of each matrix, for models whose whole
  weights take too much memory. A device then computes its part of every product for all
  rows, and activations move between devices instead of weights.

In both cases the rows of the KV cache, and attention over them, stay on their devices.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.generate.decoders import decoders
from tunix.models import calling
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.dense import qwix_seam
from tunix.models.transformer.dense.cpu_products import TransposedKernel
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.perf.chips import chip_of
from tunix.utils import mesh as mesh_lib

# Share of a device's memory that the resharded weights may take by default. The device
# also holds the training copy of the weights, the optimizer state and the KV cache.
_SHARE = 0.25

# Smallest number of columns (or rows) of a split weight on a device. A narrower weight,
# such as that of an adapter, stays whole: splitting it would save little memory.
_MIN_WIDTH = 8

# Option of `Sampler` and RolloutConfig, see `for_decoding`.
GatherWeights = bool | Literal["split"] | None

_Entries = list[tuple[str, ...]]  # the mesh axes of each dimension of a PartitionSpec

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The shardings of a model's weights in the token loop.

  Attributes:
    leaves: new sharding of each leaf of the model's state; None for an unchanged leaf.
    step: mesh axes that split the products of a decode step; () if no axis does.
  """

  leaves: tuple[NamedSharding | None, ...]
  step: tuple[str, ...] = ()


def check(gather: GatherWeights) -> None:
  """Refuses a value that names no layout.

  Raises:
    ValueError: `gather` is none of the values of `for_decoding`.
  """
  if gather not in (None, True, False, "split"):
    raise ValueError(
      f"gather_weights is {gather!r}, expected true, false or 'split': correct it, or "
      "leave it out"
    )


def check_model(model: nnx.Module, gather: GatherWeights) -> None:
  """Refuses a layout with which a batch-invariant model's tokens get other bits.

  Raises:
    ValueError: `gather` is False or "split", the model is batch-invariant, and its mesh
      has several devices.
  """
  if gather in (None, True) or not calling.config_value(model, "batch_invariant"):
    return
  mesh = mesh_lib.mesh_of(nnx.state(model))
  if mesh is not None and mesh.size > 1:
    raise ValueError(
      f"gather_weights is {gather!r} and the model is batch_invariant; expected true "
      "or null on a mesh. Change gather_weights, or set batch_invariant to False"
    )


def for_decoding(
  model: nnx.Module, state: nnx.State, gather: GatherWeights
) -> Layout | None:
  """Returns the layout of a model's weights in the token loop.

  Args:
    model: the model. Its `config.sharding` names the batch axes; a model without it is
      unchanged.
    state: state of the model, arrays or shapes.
    gather: True uses whole weights. "split" uses split weights, for our own decoder
      only; other models are unchanged. False leaves all weights unchanged. None takes
      the first of True and "split" whose resharded weights take at most a quarter of a
      device's memory, and else leaves them unchanged. The memory of a CPU is unknown,
      so None leaves the weights unchanged there. For a batch-invariant model None is
      True.

  Returns:
    The layout; None if nothing changes.
  """
  rules = decoders.sharding_rules(model)
  if gather is None and calling.config_value(model, "batch_invariant"):
    gather = True  # sums of parts on several devices have other bits
  if rules is None or gather is False:
    return None
  leaves = jax.tree.leaves(state)
  can_split = decoders.decoder_of(model).can_split_products
  whole, split = _whole(rules, leaves), _split(rules, leaves) if can_split else None
  if whole is None:
    return None
  light = (made for made in (whole, split) if made and _is_light(leaves, made))
  chosen = {True: whole, "split": split, None: next(light, None)}[gather]
  _log.info("weights during decoding: %s", words(chosen))
  return chosen


def words(layout: Layout | None) -> str:
  """Describes a layout in logs and plans."""
  if layout is None:
    return "as they are trained"
  if not layout.step:
    return "gathered once, before the loop"
  return f"split by {', '.join(layout.step)} for the products of a step"


def split_products(model: nnx.Module, axes: tuple[str, ...]) -> None:
  """Sets the axes that split products in all modules of our decoder, in place.

  The modules then move activations instead of weights; see `ShardingRules.step`.
  """
  for _, node in nnx.iter_graph(model):
    rules = getattr(node, "rules", None)
    if isinstance(rules, ShardingRules):
      node.rules = dataclasses.replace(rules, step=axes)
  assert isinstance(model, Transformer)
  rules = dataclasses.replace(model.config.sharding, step=axes)
  model.config = dataclasses.replace(model.config, sharding=rules)


def reads_transposed(mesh: Mesh | None) -> bool:
  """Returns True if `transpose_kernels` makes decoding faster here."""
  is_alone = mesh is None or mesh.size == 1
  return is_alone and mesh_lib.context_platform() == "cpu"


def transpose_kernels(model: nnx.Module) -> None:
  """Transposes the matrices of a float32 model, in place.

  It is for CPUs, see dense/cpu_products.py; matrices of experts stay as they are. A
  model that qwix has changed stays as it is too, because qwix looks for its own
  products.
  """
  if not isinstance(model, Transformer) or qwix_seam.is_wrapped(model):
    return
  if jax.numpy.dtype(model.config.dtype) != "float32":
    return
  for _, node in nnx.iter_graph(model):
    if isinstance(node, Linear) and isinstance(node.kernel, nnx.Param):
      kernel = node.kernel.get_value()
      if kernel.ndim == 2 and kernel.dtype == jax.numpy.float32:
        node.kernel = nnx.data(TransposedKernel(kernel))


def _whole(rules: ShardingRules, leaves: list[Any]) -> Layout | None:
  """Returns the layout without the batch axes; None if nothing changes."""
  axes = _axes(rules)
  out = tuple(_moved(leaf, lambda _, x: _without(axes, x)) for leaf in leaves)
  return None if _stays(out) else Layout(leaves=out)


def _split(rules: ShardingRules, leaves: list[Any]) -> Layout | None:
  """Returns the layout with the batch axes on the other dimension of each matrix."""
  axes = _used(_axes(rules), leaves)

  def turned(leaf: Any, entries: _Entries) -> _Entries:
    out = _turned(axes, entries)
    mesh = leaf.sharding.mesh
    # Its axes must divide each dimension, and a newly split dimension must leave each
    # device at least _MIN_WIDTH columns. Otherwise the weight is kept whole.
    fits = all(
      size % mesh_lib.axes_size(mesh, names) == 0
      and (
        not set(names) & set(axes)
        or size // mesh_lib.axes_size(mesh, names) >= _MIN_WIDTH
      )
      for size, names in zip(leaf.shape, out)
    )
    return out if fits else _without(axes, entries)

  out = tuple(_moved(leaf, turned) for leaf in leaves)
  if _stays(out):
    return None
  return Layout(leaves=out, step=axes)


def _axes(rules: ShardingRules) -> tuple[str, ...]:
  """Returns the batch axes and the weight axes: decoding removes or moves them."""
  return tuple(dict.fromkeys((*rules.batch_axes, *rules.weight_axes)))


def _used(axes: tuple[str, ...], leaves: list[Any]) -> tuple[str, ...]:
  """Returns the axes that split at least one weight."""
  names = {name for leaf in leaves for entry in _entries(leaf) or () for name in entry}
  return tuple(axis for axis in axes if axis in names)


def _without(axes: tuple[str, ...], entries: _Entries) -> _Entries:
  """Removes axes from the last two dimensions, which are those of a matrix.

  Dimensions before them keep their axes: experts stay split over the devices.
  """
  # Two empty entries are put in front, so that a vector or a scalar has two last
  # dimensions too. [2:] removes them again.
  *lead, rows, columns = [(), (), *entries]
  left = [tuple(name for name in e if name not in axes) for e in (rows, columns)]
  return [*lead, *left][2:]


def _turned(axes: tuple[str, ...], entries: _Entries) -> _Entries:
  """Moves axes from the rows of a matrix to its columns, and the other way round.

  Rows and columns are the last two dimensions. For example, with axes (fsdp,) the
  entries [(fsdp,), (tp,)] become [(), (tp, fsdp)].
  """
  left = _without(axes, entries)
  if len(left) < 2:
    return left
  *lead, rows, columns = left
  of_rows, of_columns = (
    tuple(name for name in entry if name in axes) for entry in entries[-2:]
  )
  return [*lead, rows + of_columns, columns + of_rows]


def _moved(
  leaf: Any, change: Callable[[Any, _Entries], _Entries]
) -> NamedSharding | None:
  """Returns the leaf's sharding with changed entries; None if it stays the same.

  Args:
    leaf: array or shape with a sharding.
    change: `(leaf, entries) -> entries`, see `_entries`.
  """
  entries = _entries(leaf)
  if entries is None:
    return None
  spec = [names or None for names in change(leaf, entries)]
  out = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
  return None if out.is_equivalent_to(leaf.sharding, leaf.ndim) else out


def _entries(leaf: Any) -> _Entries | None:
  """Returns the mesh axes of each dimension; None if no axis splits the leaf."""
  sharding = mesh_lib.sharding_of(leaf)
  if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
    return None
  spec = [*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec))]
  return [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]


def _stays(leaves: tuple[NamedSharding | None, ...]) -> bool:
  return all(sharding is None for sharding in leaves)


def _is_light(leaves: list[Any], layout: Layout) -> bool:
  """Returns True if the changed weights take at most a quarter of a device's memory."""
  moved = [(leaf, new) for leaf, new in zip(leaves, layout.leaves) if new is not None]
  mesh = moved[0][1].mesh
  assert isinstance(mesh, Mesh)  # Not an abstract mesh: its devices are known.
  memory = _memory_of(mesh.devices.flat[0])
  sizes = (
    math.prod(new.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, new in moved
  )
  return memory is not None and sum(sizes) <= _SHARE * memory


def _memory_of(device: Any) -> float | None:
  """Returns the bytes of a device's memory, or None.

  The table of chips comes first: it also knows devices that are only compiled for.
  """
  chip = chip_of(device)
  if chip is not None and chip.memory_bytes is not None:
    return chip.memory_bytes
  if device.platform == "cpu":
    return None
  return (device.memory_stats() or {}).get("bytes_limit")
