"""Conversion between pytrees and flat dicts `{path: leaf}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def path_name(path: jax.tree_util.KeyPath) -> str:
  """Returns a JAX key path as text, such as 'layers.attn.q_proj.kernel'.

  The last step into an nnx variable ('.value') is omitted.
  """
  parts = []
  for key in path:
    for field in ("key", "name", "idx"):
      if hasattr(key, field):
        parts.append(str(getattr(key, field)))
        break
  if len(parts) > 1 and parts[-1] == "value" and hasattr(path[-1], "name"):
    parts.pop()
  return ".".join(parts)


def flatten(tree: object) -> dict[str, Any]:
  """Returns {dotted path: leaf} of a pytree, in the order of its leaves."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested dicts: {'a.b': x} becomes {'a': {'b': x}}."""
  out: dict[str, Any] = {}
  for name, leaf in flat.items():
    *parents, last = name.split(".")
    node = out
    for part in parents:
      node = node.setdefault(part, {})
    node[last] = leaf
  return out


def size_bytes(tree: object) -> int:
  """Returns the bytes of all arrays of a pytree, by their global shapes."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def is_array(leaf: object) -> bool:
  """Returns True for an array, and for the shape of one."""
  return hasattr(leaf, "shape")


def has_axes(leaf: object) -> bool:
  """Returns True for an array with at least one axis."""
  return getattr(leaf, "ndim", 0) > 0
