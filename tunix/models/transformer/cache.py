"""Key-value cache for decoding: one buffer a layer, written at one index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values of the tokens seen so far.

  Attributes:
    k, v: one [B, K, S, H] buffer a layer, of a sliding layer with no more slots than
      its window (see ring.py). Heads before slots, as the products of a
      token want them: the other way round XLA for CPUs copies the cache at every step.
      Separate buffers, because slicing a stacked one in the token loop copies it too.
    index: int32 scalar, the slot that the next token is written to. All rows share
      it: shorter prompts are padded on the left and masked.
    slots: S; None: that of the first layer's buffers.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  index: jax.Array
  slots: int | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def size(self) -> int:
    """S, the number of slots: most tokens of a row."""
    return self.k[0].shape[2] if self.slots is None else self.slots


def init_cache(
  *,
  windows: Sequence[int | None],
  batch_size: int,
  cache_size: int,
  num_kv_heads: int,
  head_dim: int,
  dtype: DTypeLike,
) -> KVCache:
  """An empty cache of layers with these windows."""
  sizes = [min(cache_size, window or cache_size) for window in windows]

  def buffers() -> tuple[jax.Array, ...]:
    shapes = [(batch_size, num_kv_heads, size, head_dim) for size in sizes]
    return tuple(jnp.zeros(shape, dtype) for shape in shapes)

  return KVCache(buffers(), buffers(), jnp.zeros((), jnp.int32), cache_size)
