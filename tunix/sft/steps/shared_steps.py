"""Jitted steps that the trainers of a process share.

A sweep or a notebook builds one trainer after the other, for models of one structure.
`jax.jit` of a new function traces, lowers and compiles again, which for small models is
most of the run. `shared` therefore keeps the last MOST jitted steps.

A key must determine the program, so it has only values whose equality implies the same
trace: numbers, names, frozen dataclasses of tunix, modules of tunix and flax, and
functions of tunix and JAX. A user's function or class may read a global variable that
has changed. It is never a part of a key, and its trainer builds steps of its own. The
one exception is the optimizer, which counts as equal if it is the same object.

A kept step holds no arrays: neither a key nor a step refers to a trainer or a module.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.utils import attributes

MOST = 8
_OWN = ("tunix", "flax", "jax", "jaxlib", "numpy", "builtins", "ml_dtypes")
_SCALARS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.dtype)

# Equal ones are interchangeable: structures and layouts.
_COMPARED = (
  jax.sharding.Sharding,
  jax.sharding.PartitionSpec,
  jax.tree_util.PyTreeDef,
  nnx.graphlib.IndexesPytreeDef,
)


@dataclasses.dataclass(frozen=True)
class Call:
  """A function with keyword arguments, which can be compared, unlike a partial.

  Attributes:
    function: the function.
    options: the keyword arguments by name, sorted.
  """

  function: Callable[..., Any]
  options: tuple[tuple[str, Any], ...] = ()

  @classmethod
  def of(cls, function: Callable[..., Any], **options: object) -> Call:
    """Returns a call with these keyword arguments."""
    return cls(function, tuple(sorted(options.items())))

  def __call__(self, *args: object, **more: object) -> Any:
    return self.function(*args, **dict(self.options), **more)


def shared(
  make: Callable[..., Any], *values: object, tx: object = None, layout: object = None
) -> Any:
  """Returns `make(*values, tx, layout)`, a jitted step, without `tx` if it is None.

  An earlier result is returned if all values are equal, `tx` is the same object and
  the key determines the program.

  Args:
    make: function of this package.
    *values: a skeleton and a loss.
    tx: the optimizer.
    layout: a pytree of shardings, or None.
  """
  rest = () if tx is None else (tx, layout)
  # A user's optimizer may be any object with `init` and `update`.
  if not (_is_hashable(tx) and all(map(is_comparable, values))):
    return make(*values, *rest)
  leaves, structure = jax.tree.flatten(layout)
  return _kept(make, values, tx, tuple(leaves), structure)


@functools.lru_cache(maxsize=MOST)
def _kept(
  make: Callable[..., Any], values: Any, tx: Any, leaves: Any, structure: Any
) -> Any:
  rest = () if tx is None else (tx, jax.tree.unflatten(structure, leaves))
  return make(*values, *rest)


def clear() -> None:
  """Forgets all kept steps, and thereby frees their programs."""
  _kept.cache_clear()


def is_comparable(value: object) -> bool:
  """Returns True if a value equal to this one always leads to the same trace."""
  if isinstance(value, _SCALARS):
    return True
  if isinstance(value, type):
    return _is_own(value)
  if isinstance(value, tuple | frozenset):
    return all(map(is_comparable, value))
  if isinstance(value, Mapping):
    return _is_hashable(value) and all(map(is_comparable, value.items()))
  if isinstance(value, functools.partial):
    return False  # two equal ones differ
  if callable(value) and not dataclasses.is_dataclass(value):
    return _is_comparable_function(value)
  parts = getattr(value, "comparable_parts", None)
  if parts is not None:
    return all(map(is_comparable, parts()))
  if isinstance(value, _COMPARED):
    return True
  if dataclasses.is_dataclass(value) and _is_own(type(value)):
    fields = attributes.of_fields(value)
    return _is_hashable(value) and all(map(is_comparable, fields.values()))
  return False


def graph_parts(graph: Any) -> list[Any]:
  """Returns the values in the definition of an nnx graph that a trace can depend on."""
  nodes = [part for node in graph.nodes for part in (node.type, node.metadata)]
  static = [x.value for _, x in graph.attributes if isinstance(x, nnx.graphlib.Static)]
  return nodes + static


def _is_comparable_function(value: object) -> bool:
  """Returns True for a function of JAX or flax, and for one of tunix without state."""
  if not _is_own(value) or isinstance(value, types.MethodType):
    return False
  if not value.__module__.startswith("tunix."):
    return True
  cells = getattr(value, "__closure__", None) or ()
  return all(is_comparable(cell.cell_contents) for cell in cells)


def _is_own(value: object) -> bool:
  module = getattr(value, "__module__", None) or ""
  return module.partition(".")[0] in _OWN


def _is_hashable(value: object) -> bool:
  try:
    hash(value)
  except TypeError:
    return False
  return True
