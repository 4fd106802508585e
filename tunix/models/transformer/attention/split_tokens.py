"""Attention on rows whose tokens are split over devices by the mesh axis `cp`.

Each device holds the queries of its own tokens and all-gathers the keys and values of
all tokens. These are the only arrays of a layer that are whole on a device. With
grouped heads they have only K of the N heads. In the backward pass, the transpose of
the all-gather is a reduce-scatter of their gradients.

Under a causal mask a later token attends to more keys. With contiguous shards the last
of many devices would do twice the mean work. In that case each device exchanges its
queries for a piece from the front and a piece from the back of the row, and the outputs
return the same way (`Split.folded`). For this exchange a device sends at most T / n
queries and T / n outputs; it receives the keys and values of all T tokens anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.visibility import Visibility
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """The assignment of a row's queries to devices.

  Attributes:
    axis: the mesh axis that splits the tokens.
    shards: its size n.
    tokens: number of tokens T in the whole row.
    folded: if True, the row is cut into 2 n pieces, and device i computes pieces i and
      2 n - 1 - i, so that all devices have the same work under a causal mask. If False,
      device i computes the i-th of n contiguous pieces.
  """

  axis: str
  shards: int
  tokens: int
  folded: bool

  def slots(self) -> np.ndarray:
    """Returns the slots (indices in the row) of each device's queries.

    Returns:
      int32 [n, T/n], in the order in which a device computes its queries.
    """
    slots = np.arange(self.tokens, dtype=np.int32)
    if not self.folded:
      return slots.reshape(self.shards, -1)
    pieces = slots.reshape(2 * self.shards, -1)
    # sources[device, half] is the piece that a device receives in each exchange.
    sources = np.empty((self.shards, 2), np.int32)
    for half in (0, 1):
      for source, target in self.moves(half):
        sources[target, half] = 2 * source + half
    return pieces[sources].reshape(self.shards, -1)

  def moves(self, half: int) -> list[tuple[int, int]]:
    """Returns the (source, target) devices of one half of every device's tokens.

    Device i holds pieces 2 i (half 0) and 2 i + 1 (half 1) of the contiguous row. Piece
    p belongs to device min(p, 2 n - 1 - p), so device i receives pieces i and
    2 n - 1 - i. One of these two numbers is even and the other odd. Each half therefore
    sends exactly one piece to each device, as `ppermute` requires. For n = 2, half 0
    moves pieces 0 and 2 to devices 0 and 1, and half 1 moves pieces 1 and 3 to devices
    1 and 0.
    """
    last = 2 * self.shards - 1
    numbers = ((i, 2 * i + half) for i in range(self.shards))
    return [(i, min(number, last - number)) for i, number in numbers]


def split_of(
  query: jax.Array, visible: Visibility, window: int | None, rules: ShardingRules
) -> Split | None:
  """Returns the split of queries [B, T, N, H] on the context's mesh.

  The result is None if the mesh does not split tokens, or if the size of its axis does
  not divide T. In the second case a warning is logged once, except for calls with a KV
  cache: their queries are few, so unsplit rows cost little.

  Args:
    query: the queries.
    visible: the keys that each query attends to.
    window: the layer's window, or None.
    rules: names the mesh axis.
  """
  mesh, tokens = mesh_lib.context_mesh(), query.shape[1]
  shards = 1 if mesh is None or rules.cp is None else mesh.shape.get(rules.cp, 1)
  if tokens % shards and tokens > shards and visible.aligned:
    _warn_once(
      f"rows of {tokens} tokens do not divide over the {shards} devices of the mesh "
      f"axis {rules.cp!r}: each of them computes the whole rows; pad them to a multiple"
    )
  if shards == 1 or tokens % shards:
    return None
  # With a window every token has the same work, and with a mask the work is unknown. In
  # both cases folding would move queries without balancing anything.
  is_causal = visible.aligned and visible.mask is None and window is None
  folded = is_causal and tokens % (2 * shards) == 0
  return Split(axis=str(rules.cp), shards=shards, tokens=tokens, folded=folded)


def attend(
  run: Callable[..., jax.Array],
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  visible: Visibility,
  split: Split,
  rules: ShardingRules,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Runs attention on each device, for the device's queries and all keys.

  Mesh axes that do not divide the rows, the key heads or the keys are dropped.

  Args:
    run: computes attention from the device's queries, all keys, all values and their
      visibility, and `sinks=` of the device's heads.
    query, key, value, visible, rules, sinks: see `attention_paths.attend`.
    split: assigns the queries to devices.

  Returns:
    The output in the order of `query`.
  """
  mesh = mesh_lib.context_mesh()
  assert mesh is not None
  rows, axis = sharding.batch_axes(rules), split.axis
  # The spec is fitted to the key heads. Their number divides the number of query heads,
  # so an axis that divides the key heads divides the query heads too.
  keys = mesh_lib.fit_spec((rows, axis, rules.tp, None), key.shape, mesh)
  # cp divides the queries (see `split_of`), but not always the keys of a cache.
  queries = PartitionSpec(keys[0], axis, keys[2], None)
  visible = _separate_keys(visible, key.shape[1], split)

  def spec(x, *entries):
    return None if x is None else mesh_lib.fit_spec(entries, x.shape, mesh)

  # Arrays about queries are split like the queries, arrays about keys are whole.
  specs = dataclasses.replace(
    visible,
    query_index=PartitionSpec(axis),
    mask=spec(visible.mask, rows, axis, None),
    segment_ids=spec(visible.segment_ids, rows, axis),
    groups=spec(visible.groups, rows, axis),
    key_segments=spec(visible.key_segments, rows),
    key_groups=spec(visible.key_groups, rows),
  )

  def local(query, key, value, visible, sinks):
    if split.folded:
      query = _exchange(query, split)
    if keys[1] is not None:  # the keys are split too: cp divides their number
      with jax.named_scope("gather_keys"):
        key = jax.lax.all_gather(key, axis, axis=1, tiled=True)
      with jax.named_scope("gather_values"):
        value = jax.lax.all_gather(value, axis, axis=1, tiled=True)
    out = run(query, key, value, visible, sinks=sinks)
    return _exchange(out, split, back=True) if split.folded else out

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(queries, keys, keys, specs, PartitionSpec(keys[2])),
    out_specs=queries,
    check_vma=False,
  )(query, key, value, visible, sinks)


@functools.lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
  _log.warning("%s", message)


def _separate_keys(visible: Visibility, keys: int, split: Split) -> Visibility:
  """Returns the visibility with separate arrays for queries and keys.

  On one device both share `segment_ids` and `groups`. Here a device has some of the
  queries and all keys, so the keys get `key_segments` and `key_groups`, whole and in
  the row's order. The arrays of the queries are reordered by `split.slots()`, so that
  splitting them gives each device the entries of its own queries.

  Args:
    visible: the visibility of whole rows.
    keys: number of keys S.
    split: assigns the queries to devices.
  """
  tokens = visible.keys(keys)
  order = split.slots().reshape(-1)

  def reorder(x):
    return x if x is None or not split.folded else x[..., order]

  return dataclasses.replace(
    visible,
    query_index=reorder(visible.query_index),
    segment_ids=reorder(visible.segment_ids),
    groups=reorder(visible.groups),
    key_segments=tokens.segments,
    key_groups=tokens.groups,
    aligned=False,  # query i is no longer key i
  )


def _exchange(x: jax.Array, split: Split, *, back: bool = False) -> jax.Array:
  """Moves [B, T/n, ...] from contiguous shards to folded ones, or back.

  Each half of the tokens is one permutation of the devices, see `Split.moves`.
  """
  # `back` swaps source and target of the same permutations, so that each half returns
  # to its place in the contiguous shard.
  halves = jnp.split(x, 2, axis=1)
  for half in (0, 1):
    moves = split.moves(half)
    pairs = [(b, a) for a, b in moves] if back else moves
    with jax.named_scope(f"{'unfold' if back else 'fold'}_{half}"):
      halves[half] = jax.lax.ppermute(halves[half], split.axis, pairs)
  return jnp.concatenate(halves, axis=1)
