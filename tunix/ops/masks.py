"""Positions, attention masks and target weights from token masks and segment ids.

Segment ids are int32 [B, T]: 0 is padding, 1, 2, ... number the examples packed
into a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def next_token_targets(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """The token to predict at every position; the last column (never scored) repeats
  the first token."""
  return jnp.roll(tokens, -1, axis=1)


def target_weights(
  mask: Int[Array, "B T"] | Bool[Array, "B T"] | Float[Array, "B T"],
  segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
  """Weight of the prediction made AT each position, that is of the next token.

  Position t is scored when token t+1 is trained and belongs to the same segment: a
  segment's first token is no target, because what stands before it in the row is
  another example.

  Args:
    mask: 1 (or a weight) on trained tokens, 0 elsewhere.
    segment_ids: packed rows; None when each row is one example.
  """
  weights = jnp.roll(mask.astype(jnp.float32), -1, axis=1).at[:, -1].set(0.0)
  if segment_ids is not None:
    weights *= jnp.roll(segment_ids, -1, axis=1) == segment_ids
  return weights


def positions_from_mask(mask: Int[Array, "B T"] | Bool[Array, "B T"]) -> Array:
  """Positions that count valid tokens, 0 at the first one (left padding allowed).

  Returns: int32 [B, T]; padding before the first valid token gets 0.
  """
  return jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0)


def positions_from_segments(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Positions that restart at 0 where the segment id changes."""
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
  """True where a query may look: at or before its own index, in its own segment.

  Returns: bool [B, T, S], or [1, T, S] without segments.
  """
  mask = (query_index[:, None] >= key_index[None, :])[None]
  if query_segments is not None and key_segments is not None:
    mask = mask & (query_segments[:, :, None] == key_segments[:, None, :])
  return mask
