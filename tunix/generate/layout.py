"""How a model's weights lie while tokens are drawn.

In training every weight is split by the axes of the batch too, and gathered where it is
used: little beside the products of thousands of tokens. A decode step has one token a
row, so that gathering would be most of what it does; weights that are laid out whole
along those axes once a request (`decode.opened`) are gathered no more.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.perf.chips import chip_of

# Of a device's memory, what whole weights may take unasked: beside them are the weights
# as they are trained, the optimizer's state and the cache.
_SHARE = 0.25

Layout = tuple[NamedSharding | None, ...]


def for_decoding(model: Any, state: Any, gather: bool | None) -> Layout | None:
  """How each leaf of `state` is to lie, None where it stays as it is.

  Args:
    model: whose `config.sharding` names the axes of the batch; others stay as they are.
    state: of its split, arrays or shapes.
    gather: whether weights are to be whole along those axes; None: where they then take
      at most a quarter of a device's memory, which CPUs do not tell.

  Returns: None where nothing changes.
  """
  rules = getattr(getattr(model, "config", None), "sharding", None)
  if rules is None or gather is False:
    return None
  leaves = jax.tree.leaves(state)
  layout = tuple(_without((*rules.batch_axes, rules.cp), leaf) for leaf in leaves)
  if all(where is None for where in layout):
    return None
  if gather is None and not _is_light(leaves, layout):
    return None
  return layout


def _without(axes: tuple[str | None, ...], leaf: Any) -> NamedSharding | None:
  """The leaf's layout without these axes; None where it has none of them."""
  where = getattr(leaf, "sharding", None)
  if not isinstance(where, NamedSharding) or where.is_fully_replicated:
    return None
  names = [(x,) if isinstance(x, str) else tuple(x or ()) for x in where.spec]
  spec = [tuple(name for name in entry if name not in axes) or None for entry in names]
  out = NamedSharding(where.mesh, PartitionSpec(*spec))
  return None if out.is_equivalent_to(where, leaf.ndim) else out


def _is_light(leaves: list[Any], layout: Layout) -> bool:
  """Whether what is laid out anew takes little of a device's memory."""
  moved = [(leaf, where) for leaf, where in zip(leaves, layout) if where is not None]
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
