"""The cache of decoding: keys and values, or a state, of each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix.models.transformer.config import LayerKind
from tunix.models.transformer.recurrences.recurrence import RowState


class LayerCache(Protocol):
  """The cache of one layer that writes new tokens and attends itself.

  The cache of a call with such layers has the methods `layer` and `replaced`, and the
  attributes `index` and `size`, of `KVCache`.
  """

  def attend(
    self,
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    **options: object,
  ) -> tuple[jax.Array, Any]:
    """Writes keys and values and returns the queries' outputs, and the new cache.

    Args:
      query: [B, T, N, H], rotated.
      key, value: [B, T, K, H] of the same tokens; None if they were written already,
        for another layer that reads this cache too.
      **options: scale, softcap, window, implementation, rules and sinks, as in
        `attention_paths.attend`.
    """
    ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """The keys and values of the tokens so far.

  Attributes:
    k, v: one buffer [B, K, S, H] per layer. The buffer of a sliding layer has at most
      as many slots as its window (see attention/ring.py).
    index: slot of the next token, int32 scalar. All rows share it: shorter prompts are
      padded on the left and masked.
    slots: number of slots S of a row; None for that of the first layer's buffer.
    states: the state of each recurrent layer, a tree of arrays [B, ...]; None for the
      other layers, or () if no layer is recurrent.
  """

  # Heads come before slots, the layout that the products of one token need. With slots
  # first, XLA's CPU backend copies the cache in every step. Each layer has a separate
  # buffer, because slicing a stacked one in the token loop copies it too.

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  index: jax.Array
  slots: int | None = dataclasses.field(default=None, metadata={"static": True})
  states: tuple[Any, ...] = ()

  @property
  def size(self) -> int:
    """Number of slots S, the largest number of tokens of a row."""
    return self.k[0].shape[2] if self.slots is None else self.slots

  def layer(self, number: int) -> tuple[jax.Array, jax.Array] | RowState:
    """Returns the buffers, or the state, of one layer."""
    if self.states and self.states[number] is not None:
      return RowState(self.states[number])
    return self.k[number], self.v[number]

  def replaced(self, layers: Sequence[Any], tokens: int) -> KVCache:
    """Returns the cache after a call that wrote `tokens` tokens to each layer."""
    recurs = [isinstance(layer, RowState) for layer in layers]
    old = zip(self.k, self.v)
    pairs = [before if own else new for own, before, new in zip(recurs, old, layers)]
    keys, values = zip(*pairs)
    states = tuple(x.state if own else None for own, x in zip(recurs, layers))
    return dataclasses.replace(
      self,
      k=keys,
      v=values,
      index=self.index + tokens,
      states=states if any(recurs) else (),
    )


def init_cache(
  kinds: Sequence[LayerKind],
  *,
  batch_size: int,
  cache_size: int,
  dtype: DTypeLike,
  states: Sequence[Any] = (),
) -> KVCache:
  """Returns an empty cache.

  Args:
    kinds: the kind of each layer.
    batch_size: number of rows B.
    cache_size: number of slots S.
    dtype: dtype of the buffers.
    states: see `KVCache.states`.
  """
  slots = [min(cache_size, kind.window or cache_size) for kind in kinds]

  def buffers() -> tuple[jax.Array, ...]:
    return tuple(
      jnp.zeros((batch_size, kind.num_kv_heads, size, kind.head_dim), dtype)
      for kind, size in zip(kinds, slots)
    )

  index = jnp.zeros((), jnp.int32)
  return KVCache(buffers(), buffers(), index, cache_size, tuple(states))
