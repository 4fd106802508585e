"""Positions, attention masks and target weights from token masks and segment ids.

Segment ids are int32 [B, T]: 0 is padding, 1, 2, ... number the examples packed
into a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def next_token_targets(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the next token of every position, int32 [B, T].

  The last column has no next token. It repeats the first token and is never scored.
  """
  return jnp.roll(tokens, -1, axis=1)


def target_weights(
  mask: Int[Array, "B T"] | Bool[Array, "B T"] | Float[Array, "B T"],
  segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
  """Returns the weight of the prediction made at each position, float32 [B, T].

  Position t predicts token t + 1. It has weight if that token is trained and belongs to
  the same segment: the first token of a segment follows another example in the row.

  Args:
    mask: 1, or a weight, on trained tokens; 0 elsewhere.
    segment_ids: segments of packed rows; None if each row is one example.
  """
  weights = jnp.roll(mask.astype(jnp.float32), -1, axis=1).at[:, -1].set(0.0)
  if segment_ids is not None:
    weights *= jnp.roll(segment_ids, -1, axis=1) == segment_ids
  return weights


def positions_from_mask(mask: Int[Array, "B T"] | Bool[Array, "B T"]) -> Array:
  """Returns positions that count the valid tokens from 0, int32 [B, T].

  Rows may be padded on the left; padding before the first valid token gets 0.
  """
  return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0)


def positions_from_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns positions that restart at 0 where the segment id changes."""
  index = jnp.arange(segment_ids.shape[1])
  changed = segment_ids != jnp.roll(segment_ids, 1, axis=1)
  starts = jnp.where(changed.at[:, 0].set(True), index, 0)
  return index - jax.lax.cummax(starts, axis=1)


def causal_mask(
  query_index: Int[Array, " T"],
  key_index: Int[Array, " S"],
  query_segments: Int[Array, "B T"] | None = None,
  key_segments: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
  """Returns True where a query may attend to a key.

  A query attends to keys of its segment at or before its index.

  Args:
    query_index: index of each query in the row.
    key_index: index of each key in the row.
    query_segments, key_segments: segment ids; None if each row is one example.

  Returns:
    bool [B, T, S], or [1, T, S] without segments.
  """
  mask = (query_index[:, None] >= key_index[None, :])[None]
  if query_segments is not None and key_segments is not None:
    mask = mask & (query_segments[:, :, None] == key_segments[:, None, :])
  return mask
