"""Content stamps: short strings that are equal for equal trees of arrays.

Each array is reduced on its devices to two 32-bit integers, by integer sums that do not
depend on the sharding. Names, shapes, dtypes and these integers are hashed on the host.
A stamp detects mistakes (a lost update, a swapped array, a flipped bit), not forgeries.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.perf import programs
from tunix.utils import mesh as mesh_lib, tree

# Odd numbers, so that a multiplication modulo 2^32 is a bijection.
_STRIDE, _FAR = 0x9E3779B1, 0xC2B2AE35
_MIX = 0x7FEB352D, 0x846CA68B
_AGAIN = 0x2C1B3C6D


def content_stamp(arrays: object) -> str:
  """Returns a 128-bit stamp, in hex, of the names, shapes, dtypes and bits of a pytree.

  A change of one element always changes the stamp; another change is missed with a
  probability of about 2^-64. The stamp is the same for every sharding and number of
  devices, and for NumPy and JAX arrays. -0.0 and 0.0 differ, and so do NaNs with
  different bits. The arrays are read once, without a copy; only arrays in host memory
  are copied to their devices, one at a time.

  Args:
    arrays: a pytree of JAX or NumPy arrays. If arrays span processes, all of these
      processes must call this function.

  Raises:
    TypeError: A leaf is no array of real numbers.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
  named = [(tree.path_name(path), leaf) for path, leaf in leaves]
  for name, leaf in named:
    _check(name, leaf)
  words = _words([leaf for _, leaf in named])
  parts = [
    (name, list(leaf.shape), str(leaf.dtype), *pair)
    for (name, leaf), pair in zip(named, words)
  ]
  data = json.dumps(parts, separators=(",", ":")).encode()
  return hashlib.blake2b(data, digest_size=16).hexdigest()


def leaf_stamps(arrays: object) -> dict[str, str]:
  """Returns the stamp of each leaf, without its name, by dotted path.

  Raises:
    TypeError: See `content_stamp`.
  """
  flat = tree.flatten(arrays)
  for name, leaf in flat.items():
    _check(name, leaf)
  return {
    name: f"{leaf.dtype}{list(leaf.shape)}:{first:08x}{second:08x}"
    for (name, leaf), (first, second) in zip(flat.items(), _words([*flat.values()]))
  }


def _check(name: str, leaf: object) -> None:
  if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
    raise TypeError(
      f"leaf {name!r} is {type(leaf).__name__}, only arrays have a content stamp. "
      "Leave it out of the tree, or make it an array."
    )
  if _is_key(leaf):
    return
  numbers = jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool
  if not numbers or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
    raise TypeError(
      f"leaf {name!r} holds {leaf.dtype}; expected booleans, integers or real floating-"
      "point numbers. Stamp its real and imaginary parts, or leave it out."
    )


def _is_key(leaf: Any) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(leaves: Sequence[Any]) -> list[tuple[int, int]]:
  """Returns two integers for each leaf; leaves with equal devices share a program."""
  groups: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    groups.setdefault(_group(i, leaf), []).append(i)
  pending = [
    (places, _program([leaves[i] for i in places])) for places in groups.values()
  ]
  out: list[tuple[int, int]] = [(0, 0)] * len(leaves)
  for places, sums in pending:
    for i, (first, second) in zip(places, np.asarray(mesh_lib.to_host(sums))):
      out[i] = int(first), int(second)
  return out


def _group(i: int, leaf: object) -> Any:
  if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
    return None
  if _in_host_memory(leaf):
    return "host", i
  mesh = mesh_lib.of_sharding(leaf)
  if isinstance(mesh, Mesh):  # all inputs of a program need the same order of devices
    return tuple(mesh.devices.flat)
  return frozenset(leaf.sharding.device_set)


def _in_host_memory(leaf: Any) -> bool:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return False
  kind = leaf.sharding.memory_kind
  return kind is not None and kind != _device_kind(leaf)


def _device_kind(leaf: jax.Array) -> str:
  return next(iter(leaf.sharding.device_set)).default_memory().kind


def _program(leaves: list[Any]) -> jax.Array:
  inputs = [_as_input(leaf) for leaf in leaves]
  mesh = mesh_lib.mesh_of(inputs)
  where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
  # The current mesh may have other devices: the program runs on the mesh of the leaves,
  # with their kinds of axes.
  meshes = map(mesh_lib.of_sharding, inputs)
  leaves_mesh = next((m for m in meshes if isinstance(m, Mesh)), None)
  with mesh_lib.use_mesh(leaves_mesh if mesh_lib.current_mesh() is not None else None):
    return programs.call("weight stamp", _compiled(where), inputs)


@functools.lru_cache(maxsize=64)
def _compiled(where: NamedSharding | None) -> Any:
  return jax.jit(
    lambda leaves: jnp.stack([_reduce(x) for x in leaves]), out_shardings=where
  )


def _as_input(leaf: Any) -> Any:
  """Returns the leaf in a form that `jax.jit` takes without changing a bit."""
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  if not isinstance(leaf, jax.Array):
    leaf = np.asarray(leaf)
    if leaf.dtype.itemsize == 8:  # without jax_enable_x64 these would be rounded
      leaf = np.ascontiguousarray(leaf).view(np.uint32).reshape(*leaf.shape, 2)
    return leaf
  if _in_host_memory(leaf):
    leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind(_device_kind(leaf)))
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _reduce(x: jax.Array) -> jax.Array:
  """Returns uint32 [2], two sums over hashes of each element's bits and position.

  At one position both hashes are bijections of the bits, so no change of one element is
  missed. Multiplications and shifts mix the bits before the sum. Without them, bfloat16
  values in float32, whose low 16 bits are 0, would give sums with only 16 useful bits.
  """
  bits = _bits(x)
  h = bits ^ _positions(bits.shape)
  for constant in _MIX:
    h = (h ^ (h >> 16)) * jnp.uint32(constant)
  h = h ^ (h >> 15)
  again = (h ^ (h >> 12)) * jnp.uint32(_AGAIN)
  # One reduction with two operands. For two sums XLA would store `h` for the second
  # one: on a CPU a temporary as large as the array, and 7 times the time.
  zero = jnp.uint32(0)
  sums = jax.lax.reduce(
    (h, again ^ (again >> 15)), (zero, zero), _add_pairs, tuple(range(h.ndim))
  )
  return jnp.stack(sums)


def _add_pairs(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
  return a[0] + b[0], a[1] + b[1]


def _bits(x: jax.Array) -> jax.Array:
  """Each element as a uint32; 64-bit ones as two along a new last axis."""
  if x.dtype == bool:
    return x.astype(jnp.uint32)
  width = jax.dtypes.itemsize_bits(x.dtype)
  if width >= 32:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
  """A number for each element: different for all of up to 2^32 elements, and along
  every axis of larger arrays."""
  out = jnp.zeros(shape, jnp.uint32)
  for axis in range(len(shape)):
    stride = math.prod(shape[axis + 1 :])
    factor = (stride * _STRIDE + (stride >> 32) * _FAR) % 2**32
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    out = out + index * jnp.uint32(factor)
  return out
