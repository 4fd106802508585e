"""Who may look where in self-attention, kept as indices for as long as possible.

Rows are padded on the left and all rows share their slots, so that a distance in slots
is the distance in positions: windows are counted in slots, with a cache and without.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.ops import masks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
  """What a mask needs to know of some queries or some keys.

  Attributes:
    index: int32 [T], their slots.
    segments: int32 [B, T] or None.
    groups: int32 [B, T] or None.
  """

  index: jax.Array
  segments: jax.Array | None = None
  groups: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """Which keys each query may look at, in the cheapest form there is.

  Attributes:
    query_index: int32 [T], the slot of each query.
    mask: bool [B, T, S], who may look at whom, instead of the causal order; or None.
    segment_ids: int32 [B, T] of packed rows, or None; only without a cache.
    groups: int32 [B, T] or None: tokens of one nonzero group see each other in both
      directions (the patches of an image). A group must lie within the T tokens; it
      also opens what `mask` closes, so padding belongs to group 0.
    key_segments, key_groups: int32 [B, S], segment ids and groups of the keys where
      those are not the queries'; or None.
    aligned: the keys are the tokens that the queries are, and `query_index` counts
      from 0: no cache.
    slots: S of the row whose cache the keys are; a sliding layer's may have fewer.
      None: all layers' have as many.
    shared: the rows are a prompt and several completions of it; or None. What is said
      above is then meant for a completion that stands alone behind its prompt.
  """

  query_index: jax.Array
  mask: jax.Array | None = None
  segment_ids: jax.Array | None = None
  groups: jax.Array | None = None
  key_segments: jax.Array | None = None
  key_groups: jax.Array | None = None
  aligned: bool = dataclasses.field(default=False, metadata={"static": True})
  slots: int | None = dataclasses.field(default=None, metadata={"static": True})
  shared: SharedPrompt | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def queries(self) -> Tokens:
    """What the mask needs to know of the queries."""
    return Tokens(self.query_index, self.segment_ids, self.groups)

  def keys(self, count: int) -> Tokens:
    """The same of the `count` slots that they look at.

    Raises:
      ValueError: segment ids with more slots than tokens.
    """
    groups, segments = self.groups, self.segment_ids
    if self.key_segments is not None:
      segments = self.key_segments
    if self.key_groups is not None:
      groups = self.key_groups
    if segments is not None and segments.shape[1] != count:
      raise ValueError(
        f"segment_ids of {segments.shape[1]} tokens with {count} keys: segments cannot "
        "be combined with a cache; put them into the mask instead"
      )
    if groups is not None and groups.shape[1] != count:
      slots = jnp.zeros((groups.shape[0], count), groups.dtype)
      at = (0, self.query_index[0])
      groups = jax.lax.dynamic_update_slice(slots, groups, at)
    return Tokens(jnp.arange(count, dtype=jnp.int32), segments, groups)

  def dense(self, keys: int, window: int | None = None) -> Bool[Array, "B T S"]:
    """The mask as an array; built inside the layer, so that XLA can fuse it.

    Args:
      keys: S, the number of slots.
      window: a query sees its own slot and the `window - 1` before it; None: no limit.
    """
    mask = None if self.mask is None else self.mask.astype(bool)
    return may_look(self.queries(), self.keys(keys), mask, window)

  def of_prompt(self) -> Visibility:
    """Of a shared prompt's tokens, which look at each other only."""
    assert self.shared is not None
    ids = self.segment_ids
    return Visibility(
      self.query_index[: self.shared.prompt],
      segment_ids=None if ids is None else self.shared.prompts(ids),
      aligned=True,
    )

  def of_completions(self) -> Visibility:
    """Of the completions of a shared prompt, one a row, which look at it and at
    themselves."""
    shared, ids = self.shared, self.segment_ids
    assert shared is not None
    size = shared.completion(self.query_index.size)
    return Visibility(
      shared.prompt + jnp.arange(size, dtype=jnp.int32),
      segment_ids=None if ids is None else shared.completions(ids),
      key_segments=None if ids is None else shared.sequences(ids),
    )


def may_look(
  queries: Tokens,
  keys: Tokens,
  mask: Bool[Array, "B T S"] | None = None,
  window: int | None = None,
) -> Bool[Array, "B T S"]:
  """(mask, or causal order, or same group) and window and same segment.

  The window limits the past only: a group's later members stay visible, as Gemma 3
  defines it for images in its sliding layers.

  Returns: bool [B, T, S], or [1, T, S] where all rows are alike.
  """
  seen = masks.causal_mask(queries.index, keys.index) if mask is None else mask
  if queries.groups is not None and keys.groups is not None:
    same = queries.groups[:, :, None] == keys.groups[:, None, :]
    seen = seen | (same & (queries.groups != 0)[:, :, None])
  if queries.segments is not None and keys.segments is not None:
    seen = seen & (queries.segments[:, :, None] == keys.segments[:, None, :])
  if window is not None:
    age = queries.index[:, None] - keys.index[None, :]
    seen = seen & (age < window)[None]
  return seen


def reach(
  queries: Tokens, keys: Tokens, window: int | None = None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
  """The first and the last slot that each query may look at, without a mask: nothing
  outside is visible, something inside may be hidden.

  Returns: two int32 [B, T], or [1, T] where all rows are alike.
  """
  first = jnp.zeros_like(queries.index)[None]
  last = queries.index[None]
  if window is not None:
    first = jnp.maximum(first, last - (window - 1))
  if queries.segments is not None and keys.segments is not None:
    ends = _ends(queries.segments, keys.segments, keys.index)
    first = jnp.maximum(first, ends[0])
  if queries.groups is not None and keys.groups is not None:
    end = _ends(queries.groups, keys.groups, keys.index)[1]
    last = jnp.maximum(last, jnp.where(queries.groups != 0, end, 0))
  return first, jnp.minimum(last, keys.index.size - 1)


def _ends(
  queries: jax.Array, keys: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The first and the last slot that bears each query's id, by a table with one entry
  an id.

  Ids beyond the table share its last entry, which only widens what they get.
  """
  size = keys.shape[1] + 1
  entry = lambda ids: jnp.clip(jnp.abs(ids), 0, size - 1)
  rows = jnp.arange(keys.shape[0])[:, None]
  shape = (keys.shape[0], size)
  first = jnp.full(shape, keys.shape[1], slots.dtype).at[rows, entry(keys)].min(slots)
  last = jnp.zeros(shape, slots.dtype).at[rows, entry(keys)].max(slots)
  return first[rows, entry(queries)], last[rows, entry(queries)]
