"""The ring cache of a sliding layer, which has as many slots as its window.

The token at index i of a row is in slot i mod R, where R is the number of slots. The
next token replaces the oldest one, which is outside the window of all later queries.
The index of the token in each slot is computed from the number of tokens written and is
not stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tunix.models.transformer.visibility import Tokens, Visibility, is_visible

Pair = tuple[jax.Array, jax.Array]


def is_ring(buffer: jax.Array, visible: Visibility) -> bool:
  """Returns True if a layer's buffer [B, K, R, H] has fewer slots than the row."""
  return visible.slots is not None and buffer.shape[2] < visible.slots


def extend(
  buffers: Pair, fresh: Pair, visible: Visibility, window: int
) -> tuple[Pair, Pair, Visibility]:
  """Adds T tokens at `visible.query_index[0]`.

  Args:
    buffers: cached keys and values [B, K, R, H]; R is at least the window.
    fresh: keys and values of the new tokens, [B, K, T, H].
    visible: the visibility in the whole row; its mask has a column per slot of the row.
    window: the layer's window in slots.

  Returns:
    The new buffers; the keys and values to attend to, [B, K, _, H]; and the visibility
    of these keys, whose mask includes the window.
  """
  size, count = buffers[0].shape[2], fresh[0].shape[2]
  start = visible.query_index[0]
  fresh = (fresh[0].astype(buffers[0].dtype), fresh[1].astype(buffers[1].dtype))
  if count == 1:
    at = (0, 0, start % size, 0)
    write = lambda buffer, new: jax.lax.dynamic_update_slice(buffer, new, at)
    written = attended = write(buffers[0], fresh[0]), write(buffers[1], fresh[1])
    index = _slot_index(start + 1, size)
  else:
    # The last new tokens overwrite the slots of old tokens that the first new tokens
    # attend to. Attention therefore reads the old buffer followed by the new tokens.
    join = lambda buffer, new: jnp.concatenate([buffer, new], axis=2)
    attended = join(buffers[0], fresh[0]), join(buffers[1], fresh[1])
    index = jnp.concatenate([_slot_index(start, size), visible.query_index])
    last = min(count, size)  # of more than R tokens only the last R are stored
    slots = visible.query_index[-last:] % size
    write = lambda buffer, new: buffer.at[:, :, slots].set(new[:, :, -last:])
    written = write(buffers[0], fresh[0]), write(buffers[1], fresh[1])
  mask = _mask(visible, index, window)
  # The mask already includes the window. All queries get index 0, so that no window is
  # applied again: in a ring, the order of the slots is not the order of the tokens.
  return written, attended, Visibility(jnp.zeros_like(visible.query_index), mask)


def _slot_index(count: jax.Array, size: int) -> Int[Array, " R"]:
  """Returns the row index of the token in each slot after `count` tokens.

  It is the largest i < count with i mod R = slot; negative for an empty slot.
  """
  last = count - 1
  return last - (last - jnp.arange(size, dtype=jnp.int32)) % size


def _mask(
  visible: Visibility, index: Int[Array, " S"], window: int
) -> Bool[Array, "B T S"]:
  """Returns the mask of the queries on the tokens with these row indices."""
  mask, groups, start = visible.mask, visible.groups, visible.query_index[0]
  if mask is not None:
    mask = jnp.take(mask.astype(bool), jnp.maximum(index, 0), axis=2)
  if groups is not None:
    # Groups are known for the new tokens only; cached tokens get group 0.
    place = jnp.clip(index - start, 0, groups.shape[1] - 1)
    groups = jnp.where(index >= start, jnp.take(groups, place, axis=1), 0)
  seen = is_visible(visible.queries(), Tokens(index, None, groups), mask, window)
  return seen & (index >= 0)
