"""Attention on rows whose tokens are split over devices, by the mesh axis `cp`.

Every device has the queries of its own tokens and gathers the keys and values of all of
them: of a layer's arrays those alone are ever whole, which grouped heads make narrow.
The gather's transpose adds up their gradients where the tokens are.

A later token looks at more keys, so that pieces in order would give the last device
twice the mean of the work. Where that is so, each device exchanges queries for a piece
from the front and one from the back, and their outputs return the same way: half of
the queries travel, less than the keys and values that every device is sent anyway.
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

from tunix.models.transformer import sharding
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.visibility import Visibility
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """Which tokens each device has the queries of.

  Attributes:
    axis: the mesh axis. shards: its size n.
    tokens: T, of all devices.
    folded: of 2 n pieces in order, device i has number i and number 2 n - 1 - i (which
      of them comes first depends on i), so that all have the same work under a causal
      mask; otherwise device i has the i-th of n.
  """

  axis: str
  shards: int
  tokens: int
  folded: bool

  def slots(self) -> np.ndarray:
    """int32 [n, T / n], the slots of every device's queries, in its order."""
    slots = np.arange(self.tokens, dtype=np.int32)
    if not self.folded:
      return slots.reshape(self.shards, -1)
    pieces = slots.reshape(2 * self.shards, -1)
    sources = np.empty((self.shards, 2), np.int32)
    for half in (0, 1):
      for source, target in self.moves(half):
        sources[target, half] = 2 * source + half
    return pieces[sources].reshape(self.shards, -1)

  def moves(self, half: int) -> list[tuple[int, int]]:
    """(from, to) of the first (0) or second (1) half of each device's tokens: their
    numbers are even, or odd, and no two of them go to one device."""
    last = 2 * self.shards - 1
    numbers = ((i, 2 * i + half) for i in range(self.shards))
    return [(i, min(number, last - number)) for i, number in numbers]


def of(
  query: jax.Array, visible: Visibility, window: int | None, rules: ShardingRules
) -> Split | None:
  """How the context's mesh splits the queries [B, T, N, H]; None: it does not, or does
  not divide them, which is said once where they are whole rows."""
  mesh, tokens = mesh_lib.context_mesh(), query.shape[1]
  shards = 1 if mesh is None or rules.cp is None else mesh.shape.get(rules.cp, 1)
  if tokens % shards and tokens > shards and visible.aligned:
    _warn_once(
      f"rows of {tokens} tokens do not divide over the {shards} devices of the mesh "
      f"axis {rules.cp!r}: each of them computes the whole rows; pad them to a multiple"
    )
  if shards == 1 or tokens % shards:
    return None
  # A window gives all tokens the same work, and of a mask nothing is known.
  is_causal = visible.aligned and visible.mask is None and window is None
  folded = is_causal and tokens % (2 * shards) == 0
  return Split(axis=str(rules.cp), shards=shards, tokens=tokens, folded=folded)


def attend(
  run: Callable[[jax.Array, jax.Array, jax.Array, Visibility], jax.Array],
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  visible: Visibility,
  split: Split,
  rules: ShardingRules,
) -> jax.Array:
  """`run(query, key, value, visible)` of the queries of one device on all keys; see
  `attention_paths.attend` for the arguments.

  Axes that do not divide the rows, the KEY heads or the keys are dropped.
  """
  mesh = mesh_lib.context_mesh()
  assert mesh is not None
  rows, axis = sharding.batch_axes(rules), split.axis
  wanted = (rows, axis, rules.tp, None)
  keys = mesh_lib.fit_spec(wanted, key.shape, mesh)
  queries = PartitionSpec(keys[0], axis, keys[2], None)
  visible = _of_queries(visible, key.shape[1], split)

  def spec(x, *entries):
    return None if x is None else mesh_lib.fit_spec(entries, x.shape, mesh)

  specs = dataclasses.replace(
    visible,
    query_index=PartitionSpec(axis),
    mask=spec(visible.mask, rows, axis, None),
    segment_ids=spec(visible.segment_ids, rows, axis),
    groups=spec(visible.groups, rows, axis),
    key_segments=spec(visible.key_segments, rows),
    key_groups=spec(visible.key_groups, rows),
  )

  def local(query, key, value, visible):
    if split.folded:
      query = _exchange(query, split)
    if keys[1] is not None:
      with jax.named_scope("gather_keys"):
        key = jax.lax.all_gather(key, axis, axis=1, tiled=True)
      with jax.named_scope("gather_values"):
        value = jax.lax.all_gather(value, axis, axis=1, tiled=True)
    out = run(query, key, value, visible)
    return _exchange(out, split, back=True) if split.folded else out

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(queries, keys, keys, specs),
    out_specs=queries,
    check_vma=False,
  )(query, key, value, visible)


@functools.lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
  _log.warning("%s", message)


def _of_queries(visible: Visibility, keys: int, split: Split) -> Visibility:
  """With what the keys bear said apart from what the queries do, and the queries in the
  order in which the devices hold them."""
  tokens = visible.keys(keys)
  order = split.slots().reshape(-1)
  put = lambda x: x if x is None or not split.folded else x[..., order]
  return dataclasses.replace(
    visible,
    query_index=put(visible.query_index),
    segment_ids=put(visible.segment_ids),
    groups=put(visible.groups),
    key_segments=tokens.segments,
    key_groups=tokens.groups,
    aligned=False,
  )


def _exchange(x: jax.Array, split: Split, *, back: bool = False) -> jax.Array:
  """[B, T / n, ...] in order becomes as `Split` says, or the other way round."""
  halves = jnp.split(x, 2, axis=1)
  for half in (0, 1):
    moves = split.moves(half)
    pairs = [(b, a) for a, b in moves] if back else moves
    with jax.named_scope(f"{'unfold' if back else 'fold'}_{half}"):
      halves[half] = jax.lax.ppermute(halves[half], split.axis, pairs)
  return jnp.concatenate(halves, axis=1)
