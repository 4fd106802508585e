"""Key-value cache for decoding: one buffer a layer, written at one index."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values of the tokens seen so far.

  Attributes:
    k, v: one [B, K, S, H] buffer a layer. Heads before slots, as the products of a
      token want them: the other way round XLA for CPUs copies the cache at every step.
      Separate buffers, because slicing a stacked one in the token loop copies it too.
    index: int32 scalar, the slot that the next token is written to. All rows share
      it: shorter prompts are padded on the left and masked.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  index: jax.Array

  @property
  def size(self) -> int:
    """S, the number of slots."""
    return self.k[0].shape[2]


def init_cache(
  *,
  num_layers: int,
  batch_size: int,
  cache_size: int,
  num_kv_heads: int,
  head_dim: int,
  dtype: DTypeLike,
) -> KVCache:
  """An empty cache."""
  shape = (batch_size, num_kv_heads, cache_size, head_dim)
  buffers = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
  return KVCache(buffers(), buffers(), jnp.zeros((), jnp.int32))
