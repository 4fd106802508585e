"""The keys that each query of self-attention attends to, stored as indices.

A slot is the index of a token in its padded row; with a KV cache, the index counts from
the first cached token. A mask [B, T, S] is built only where it is needed, from these
indices. Rows are padded on the left and all rows share their slots, so the distance of
two tokens in slots equals their distance in positions. Windows are therefore counted in
slots, with and without a cache.
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
  """The indices of queries or of keys, from which a mask is computed.

  Attributes:
    index: slots of the tokens, int32 [T].
    segments: segment ids, int32 [B, T], or None.
    groups: group numbers, int32 [B, T], or None.
  """

  index: jax.Array
  segments: jax.Array | None = None
  groups: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """The keys that each query attends to.

  Attributes:
    query_index: slot of each query, int32 [T].
    mask: bool [B, T, S], True where a query attends to a key; it replaces the causal
      order. None for the causal order.
    segment_ids: int32 [B, T] of packed rows, or None; only without a cache.
    groups: int32 [B, T], or None. Tokens of one nonzero group attend to each other in
      both directions (the patches of an image). All tokens of a group must be in the
      same call. A group also opens pairs that `mask` closes, so padding must have
      group 0.
    key_segments, key_groups: segment ids and groups of the keys, int32 [B, S], if they
      differ from the queries'; else None.
    aligned: True if the keys are the same tokens as the queries and `query_index`
      counts from 0: there is no cache.
    windowed_groups: True if the groups are for layers with a window only.
    slots: number of slots S of the row's cache; the cache of a sliding layer may have
      fewer. None if the caches of all layers have the same number.
    shared: layout of rows that hold a prompt and several completions of it, or None.
      With it, the attributes above describe each completion as if it followed the
      prompt directly.
  """

  query_index: jax.Array
  mask: jax.Array | None = None
  segment_ids: jax.Array | None = None
  groups: jax.Array | None = None
  key_segments: jax.Array | None = None
  key_groups: jax.Array | None = None
  aligned: bool = dataclasses.field(default=False, metadata={"static": True})
  windowed_groups: bool = dataclasses.field(default=False, metadata={"static": True})
  slots: int | None = dataclasses.field(default=None, metadata={"static": True})
  shared: SharedPrompt | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def valid(self, rows: int, tokens: int) -> Bool[Array, "B T"]:
    """Returns False at the padding of a call, as far as it is known.

    Padding has the segment 0, or does not attend to itself.

    Args:
      rows, tokens: sizes B and T of the call.
    """
    if self.segment_ids is not None:
      return self.segment_ids != 0
    if self.mask is None:
      return jnp.ones((rows, tokens), bool)
    own = self.query_index[None, :, None]
    own = jnp.broadcast_to(own, (self.mask.shape[0], tokens, 1))
    seen = jnp.take_along_axis(self.mask, own, axis=2)[..., 0]
    return jnp.broadcast_to(seen.astype(bool), (rows, tokens))

  def queries(self) -> Tokens:
    """Returns the indices of the queries."""
    return Tokens(self.query_index, self.segment_ids, self.groups)

  def keys(self, count: int) -> Tokens:
    """Returns the indices of the keys in `count` slots.

    Raises:
      ValueError: there are segment ids and more slots than tokens.
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
      # The T tokens of this call are at consecutive slots, from query_index[0] on. All
      # other slots of the cache have group 0.
      slots = jnp.zeros((groups.shape[0], count), groups.dtype)
      at = (0, self.query_index[0])
      groups = jax.lax.dynamic_update_slice(slots, groups, at)
    return Tokens(jnp.arange(count, dtype=jnp.int32), segments, groups)

  def dense(self, keys: int, window: int | None = None) -> Bool[Array, "B T S"]:
    """Returns the mask as an array.

    Layers call it themselves, so that XLA can fuse the mask into the scores.

    Args:
      keys: number of slots S.
      window: number of keys that a query attends to, its own slot included; None for no
        limit.
    """
    mask = None if self.mask is None else self.mask.astype(bool)
    return is_visible(self.queries(), self.keys(keys), mask, window)

  def of_prompt(self) -> Visibility:
    """Returns the visibility of a shared prompt's tokens among themselves."""
    assert self.shared is not None
    ids, groups = self.segment_ids, self.groups
    return Visibility(
      self.query_index[: self.shared.prompt],
      segment_ids=None if ids is None else self.shared.prompts(ids),
      groups=None if groups is None else self.shared.prompts(groups),
      aligned=True,
    )

  def of_completions(self) -> Visibility:
    """Returns the visibility of the completions of shared prompts, one per row.

    A completion attends to its prompt and to itself, and its tokens are in no group.
    """
    shared, ids = self.shared, self.segment_ids
    assert shared is not None
    size = shared.completion(self.query_index.size)
    # In a sequence [prompt | completion] the completion's slots start at P. The keys
    # are P + R slots, so queries and keys are not aligned.
    return Visibility(
      shared.prompt + jnp.arange(size, dtype=jnp.int32),
      segment_ids=None if ids is None else shared.completions(ids),
      key_segments=None if ids is None else shared.sequences(ids),
    )


def is_visible(
  queries: Tokens,
  keys: Tokens,
  mask: Bool[Array, "B T S"] | None = None,
  window: int | None = None,
) -> Bool[Array, "B T S"]:
  """Returns the mask of queries and keys.

  A query attends to a key if all of these hold:

  - the mask allows it (without a mask: the causal order), or both tokens are in one
    nonzero group;
  - both tokens are in one segment;
  - the key is inside the window. The window limits only the past, so later members of a
    group stay visible, as in the sliding layers of Gemma 3.

  Returns:
    bool [B, T, S], or [1, T, S] if all rows have the same mask.
  """
  seen = masks.causal_mask(queries.index, keys.index) if mask is None else mask
  # Groups open pairs, so they come before segments and windows, which close pairs.
  if queries.groups is not None and keys.groups is not None:
    same = queries.groups[:, :, None] == keys.groups[:, None, :]
    seen = seen | (same & (queries.groups != 0)[:, :, None])
  if queries.segments is not None and keys.segments is not None:
    seen = seen & (queries.segments[:, :, None] == keys.segments[:, None, :])
  if window is not None:
    # Age 0 is the query's own slot, so a window of 1 leaves only this key of the past.
    # Later keys have a negative age and stay visible.
    age = queries.index[:, None] - keys.index[None, :]
    seen = seen & (age < window)[None]
  return seen


def reach(
  queries: Tokens, keys: Tokens, window: int | None = None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
  """Returns bounds of the slots that each query attends to, if there is no mask.

  All visible keys are from the first slot to the last, both included. Some keys between
  them may be hidden, so the bounds can be used to skip blocks but not as a mask.

  Returns:
    The first and the last slot, int32 [B, T] each, or [1, T] if all rows have the same
    bounds.
  """
  # The causal range [0, own slot], which segments and windows shorten. Groups extend it
  # to the last member of the query's group.
  first = jnp.zeros_like(queries.index)[None]
  last = queries.index[None]
  if window is not None:
    # The window counts the query's own slot, so it begins window - 1 slots before it.
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
  """Returns, for each query, the first and the last slot whose key has the query's id.

  It scatters the keys into a table with one entry per id, which takes B (S + 1) numbers
  where a comparison of all pairs would take B T S. Ids of S or more share the last
  entry, and a negative id shares the entry of its absolute value. Sharing only widens
  the bounds.
  """
  size = keys.shape[1] + 1

  def entry(ids):
    return jnp.clip(jnp.abs(ids), 0, size - 1)

  rows = jnp.arange(keys.shape[0])[:, None]
  shape = (keys.shape[0], size)
  # An id without a key keeps the start values first = S and last = 0, an empty range.
  first = jnp.full(shape, keys.shape[1], slots.dtype).at[rows, entry(keys)].min(slots)
  last = jnp.zeros(shape, slots.dtype).at[rows, entry(keys)].max(slots)
  return first[rows, entry(queries)], last[rows, entry(queries)]
