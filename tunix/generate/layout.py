"""How a model's weights lie while tokens are drawn.

In training every weight is split by the axes of the batch too, and gathered where it is
used: little beside the products of thousands of tokens. A decode step has one token a
row, so that gathering would be most of what it does. Weights are therefore laid out
once a request (`decode.opened`), so that no step gathers them: whole along those axes;
or, where that takes too much, split along their other dimension, so that a device
computes its share of every product for all rows, and activations are what moves. The
cache's rows, and attention over them, stay where they are.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.model import Transformer
from tunix.perf.chips import chip_of
from tunix.utils import mesh as mesh_lib

# Of a device's memory, what weights laid out anew may take unasked: beside them are the
# weights as they are trained, the optimizer's state and the cache.
_SHARE = 0.25

# Columns (or rows) of a split weight that a device has at the least; of a narrower
# weight, such as an adapter's, it has all.
_NARROWEST = 8

# Of `Sampler` and RolloutConfig, see `for_decoding`.
GatherWeights = bool | Literal["split"] | None

_Entries = list[tuple[str, ...]]  # of a PartitionSpec

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Where weights go before the token loop.

  Attributes:
    leaves: of each leaf of the model's state; None where it stays as it is.
    step: axes that split the products of a step; empty: none do.
  """

  leaves: tuple[NamedSharding | None, ...]
  step: tuple[str, ...] = ()


def check(gather: GatherWeights) -> None:
  """Refuses what names no layout.

  Raises:
    ValueError: see `for_decoding`.
  """
  if gather not in (None, True, False, "split"):
    raise ValueError(
      f"gather_weights is {gather!r}: use true, false or 'split', or leave it out"
    )


def for_decoding(model: Any, state: Any, gather: GatherWeights) -> Layout | None:
  """How the leaves of `state` are to lie.

  Args:
    model: whose `config.sharding` names the axes of the batch; others stay as they are.
    state: of its split, arrays or shapes.
    gather: True: weights are whole along those axes; "split": they split products by
      them (our own decoder; others stay as they are); False: they stay as they are;
      None: the first of these whose weights take at most a quarter of a device's
      memory, which CPUs do not tell.

  Returns: None where nothing changes.
  """
  rules = getattr(getattr(model, "config", None), "sharding", None)
  if rules is None or gather is False:
    return None
  leaves = jax.tree.leaves(state)
  whole, split = _whole(rules, leaves), _split(model, rules, leaves)
  if whole is None:
    return None
  light = (made for made in (whole, split) if made and _is_light(leaves, made))
  chosen = {True: whole, "split": split, None: next(light, None)}[gather]
  _log.info("weights while tokens are drawn: %s", words(chosen))
  return chosen


def words(layout: Layout | None) -> str:
  """Which layout it is, for logs and plans."""
  if layout is None:
    return "as they are trained"
  if not layout.step:
    return "gathered once, before the loop"
  return f"split by {', '.join(layout.step)} for the products of a step"


def split_products(model: nnx.Module, axes: tuple[str, ...]) -> None:
  """Has the modules of a decoder, in place, move activations instead of weights in a
  step; see `ShardingRules.step`."""
  for _, node in nnx.iter_graph(model):
    rules = getattr(node, "rules", None)
    if isinstance(rules, ShardingRules):
      node.rules = dataclasses.replace(rules, step=axes)
  assert isinstance(model, Transformer)
  rules = dataclasses.replace(model.config.sharding, step=axes)
  model.config = dataclasses.replace(model.config, sharding=rules)


def _whole(rules: ShardingRules, leaves: list[Any]) -> Layout | None:
  """Weights without the batch's axes."""
  without = functools.partial(_without, _axes(rules))
  out = tuple(_moved(leaf, without) for leaf in leaves)
  return None if _stays(out) else Layout(leaves=out)


def _split(model: Any, rules: ShardingRules, leaves: list[Any]) -> Layout | None:
  """Weights whose batch axes split their other dimension."""
  if not isinstance(model, Transformer):
    return None
  axes = _used(_axes(rules), leaves)

  def turned(leaf: Any, entries: _Entries) -> _Entries:
    out = _turned(axes, entries)
    mesh = leaf.sharding.mesh
    fits = all(
      size % mesh_lib.axes_size(mesh, names) == 0
      and (
        not set(names) & set(axes)
        or size // mesh_lib.axes_size(mesh, names) >= _NARROWEST
      )
      for size, names in zip(leaf.shape, out)
    )
    return out if fits else _without(axes, leaf, entries)

  out = tuple(_moved(leaf, turned) for leaf in leaves)
  if _stays(out):
    return None
  return Layout(leaves=out, step=axes)


def _axes(rules: ShardingRules) -> tuple[str, ...]:
  """Those that split weights for training alone."""
  return tuple(dict.fromkeys((*rules.batch_axes, *rules.weight_axes)))


def _used(axes: tuple[str, ...], leaves: list[Any]) -> tuple[str, ...]:
  """Those of the axes that split a weight."""
  names = {name for leaf in leaves for entry in _entries(leaf) or () for name in entry}
  return tuple(axis for axis in axes if axis in names)


def _without(axes: tuple[str, ...], leaf: Any, entries: _Entries) -> _Entries:
  """Without those axes, but for what lies before a matrix's dimensions: experts."""
  del leaf
  *lead, rows, columns = [(), (), *entries]
  left = [tuple(name for name in e if name not in axes) for e in (rows, columns)]
  return [*lead, *left][2:]


def _turned(axes: tuple[str, ...], entries: _Entries) -> _Entries:
  """The axes moved to the other one of a matrix's dimensions, the last two."""
  left = _without(axes, None, entries)
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
  """The leaf's layout with its entries changed; None where that is the present one."""
  entries = _entries(leaf)
  if entries is None:
    return None
  spec = [names or None for names in change(leaf, entries)]
  out = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
  return None if out.is_equivalent_to(leaf.sharding, leaf.ndim) else out


def _entries(leaf: Any) -> _Entries | None:
  """Of its PartitionSpec, one a dimension; None where nothing splits it."""
  where = getattr(leaf, "sharding", None)
  if not isinstance(where, NamedSharding) or where.is_fully_replicated:
    return None
  spec = [*where.spec, *(None,) * (leaf.ndim - len(where.spec))]
  return [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]


def _stays(leaves: tuple[NamedSharding | None, ...]) -> bool:
  return all(where is None for where in leaves)


def _is_light(leaves: list[Any], layout: Layout) -> bool:
  """Whether what is laid out anew takes little of a device's memory."""
  moved = [
    (leaf, where) for leaf, where in zip(leaves, layout.leaves) if where is not None
  ]
  mesh = moved[0][1].mesh
  assert isinstance(mesh, Mesh)  # of devices, not an abstract one
  memory = _memory_of(mesh.devices.flat[0])
  sizes = (
    math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf, where in moved
  )
  return memory is not None and sum(sizes) <= _SHARE * memory


def _memory_of(device: Any) -> float | None:
  """Bytes; by the table first, which knows chips that are only compiled for."""
  chip = chip_of(device)
  if chip is not None and chip.memory_bytes is not None:
    return chip.memory_bytes
  if device.platform == "cpu":
    return None
  return (device.memory_stats() or {}).get("bytes_limit")
