"""A sliding layer's cache: as many slots as its window, written round and round.

The token at index i of the row lies in slot i mod R, so that the next one takes the
place of the oldest, which nobody will look at again. Which token a slot holds follows
from how many were written; nothing is stored of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tunix.models.transformer.visibility import Tokens, Visibility, may_look

Pair = tuple[jax.Array, jax.Array]


def is_ring(buffer: jax.Array, visible: Visibility) -> bool:
  """Whether a layer's buffer [B, K, R, H] is shorter than the row whose cache it is."""
  return visible.slots is not None and buffer.shape[2] < visible.slots


def extend(
  buffers: Pair, fresh: Pair, visible: Visibility, window: int
) -> tuple[Pair, Pair, Visibility]:
  """Adds T tokens at `visible.query_index[0]`.

  Args:
    buffers: keys and values [B, K, R, H], R no less than the window.
    fresh: of the new tokens, [B, K, T, H].
    visible: as without a cache of this kind: its mask has a column for each slot of the
      row.
    window: of the layer.

  Returns: the buffers after it; keys and values to look at, [B, K, _, H]; and who may
  look at which of them, the window included.
  """
  size, count = buffers[0].shape[2], fresh[0].shape[2]
  start = visible.query_index[0]
  fresh = (fresh[0].astype(buffers[0].dtype), fresh[1].astype(buffers[1].dtype))
  if count == 1:
    at = (0, 0, start % size, 0)
    write = lambda buffer, new: jax.lax.dynamic_update_slice(buffer, new, at)
    written = looked_at = write(buffers[0], fresh[0]), write(buffers[1], fresh[1])
    index = _held(start + 1, size)
  else:
    # The first of the new tokens look at old ones whose slots the last of them take.
    join = lambda buffer, new: jnp.concatenate([buffer, new], axis=2)
    looked_at = join(buffers[0], fresh[0]), join(buffers[1], fresh[1])
    index = jnp.concatenate([_held(start, size), visible.query_index])
    last = min(count, size)
    slots = visible.query_index[-last:] % size
    write = lambda buffer, new: buffer.at[:, :, slots].set(new[:, :, -last:])
    written = write(buffers[0], fresh[0]), write(buffers[1], fresh[1])
  mask = _mask(visible, index, window)
  # Index 0 for every query: no window is laid over the mask once more, by places that
  # say nothing of distance here.
  return written, looked_at, Visibility(jnp.zeros_like(visible.query_index), mask)


def _held(count: jax.Array, size: int) -> Int[Array, " R"]:
  """The index of the token in each slot when `count` are written; negative: none."""
  last = count - 1
  return last - (last - jnp.arange(size, dtype=jnp.int32)) % size


def _mask(
  visible: Visibility, index: Int[Array, " S"], window: int
) -> Bool[Array, "B T S"]:
  """Who may look at the tokens of these indices."""
  mask, groups, start = visible.mask, visible.groups, visible.query_index[0]
  if mask is not None:
    mask = jnp.take(mask.astype(bool), jnp.maximum(index, 0), axis=2)
  if groups is not None:
    place = jnp.clip(index - start, 0, groups.shape[1] - 1)
    groups = jnp.where(index >= start, jnp.take(groups, place, axis=1), 0)
  seen = may_look(visible.queries(), Tokens(index, None, groups), mask, window)
  return seen & (index >= 0)
