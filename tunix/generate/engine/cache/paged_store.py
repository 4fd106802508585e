"""The cache for devices whose attention reads pages directly, and its arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tunix.generate.engine.cache.rows import Places
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling import layer_groups
from tunix.generate.engine.scheduling.layer_groups import Windows
from tunix.generate.engine.scheduling.plan import Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.paged import attention as paged
from tunix.models.transformer.paged.attention import PagedLayer
from tunix.models.transformer.paged.rows import Group, Ragged
from tunix.perf import programs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageLayer:
  """The pages of one layer, and the tokens of a call."""

  pages: PagedLayer
  ragged: Ragged

  def attend(
    self,
    query: Float[Array, "T 1 N H"],
    key: Float[Array, "T 1 K H"] | None,
    value: Float[Array, "T 1 K H"] | None,
    *,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: Float[Array, " N"] | None = None,
    **others: object,
  ) -> tuple[Float[Array, "T 1 N H"], PageLayer]:
    """Writes the tokens' keys and values, and attends; see `cache.LayerCache`."""
    del others  # `PagedLayer` has its own path of attention and sharding
    pages = self.pages
    if key is not None and value is not None:
      pages = paged.write(pages, key, value, self.ragged)
    out = paged.attend(
      query,
      pages,
      self.ragged,
      scale=scale,
      softcap=softcap,
      window=window,
      sinks=sinks,
    )
    return out.astype(query.dtype), dataclasses.replace(self, pages=pages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageCache:
  """The cache argument of a call."""

  layers: tuple[PageLayer, ...]

  index = 0  # positions are given
  size = 0  # masks are made by attention itself

  def layer(self, number: int) -> PageLayer:
    """Returns the cache of one layer."""
    return self.layers[number]

  def replaced(self, layers: Seq[PageLayer], tokens: int) -> PageCache:
    """Returns the cache after a call that wrote `tokens` tokens to each layer."""
    del tokens
    return PageCache(tuple(layers))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageStore:
  """The pages of all layers.

  Attributes:
    layers: the pages of each layer.
    tables: int32 [B, N] for each group of layers: the page numbers of each slot, in
      order; 0 for pages that no query sees.
    groups: group of each layer, see scheduling/layer_groups.py.
  """

  layers: tuple[PagedLayer, ...]
  tables: tuple[Any, ...]
  groups: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  def at(self, places: Places) -> PageCache:
    """Returns the cache of a call of the model."""
    ragged = [self._ragged(table, places) for table in self.tables]
    layers = zip(self.layers, self.groups)
    return PageCache(tuple(PageLayer(pages, ragged[group]) for pages, group in layers))

  def after(self, cache: PageCache) -> PageStore:
    """Returns the store with the pages that a call of the model returned."""
    layers = tuple(layer.pages for layer in cache.layers)
    return dataclasses.replace(self, layers=layers)

  def forked(self, sources: jax.Array) -> PageStore:
    """Returns the store unchanged: pages of a fork are copied before a launch."""
    del sources
    return self

  def settled(self, model: Any, counts: jax.Array) -> PageStore:
    """Returns the store unchanged: keys of wrong drafts are overwritten later."""
    del model, counts
    return self

  def _ragged(self, table: jax.Array, places: Places) -> Ragged:
    """Returns the rows of a call, with the pages of one group of layers."""
    slots, own = table.shape[0], table.shape[0] * places.width
    groups = []
    if places.width:
      group = functools.partial(self._group, width=places.width)
      groups.append(group(table, places.positions[:own], places.slots[:own] < slots))
    if places.block_slots.shape[0]:
      group = functools.partial(self._group, width=places.block_width)
      table = jnp.take(table, places.block_slots, axis=0, mode="clip")
      groups.append(group(table, places.positions[own:], places.slots[own:] < slots))
    return Ragged(tuple(groups))

  @staticmethod
  def _group(
    table: jax.Array, positions: jax.Array, is_valid: jax.Array, *, width: int
  ) -> Group:
    """Returns rows of `width` tokens, in which valid tokens come before padding."""

    def rows(x):
      return x.reshape(-1, width)

    return Group(
      table=table,
      start=rows(positions)[:, 0],
      count=jnp.sum(rows(is_valid), axis=1, dtype=jnp.int32),
      tokens=width,
    )


def copied(
  store: PageStore, copies: Int[Array, "n G 2"], count: jax.Array
) -> PageStore:
  """Copies pages.

  Args:
    store: the store; its buffers are donated.
    copies: (from, to) page numbers of each group; the first `count` are used.
    count: int32 scalar.
  """
  axes = [0 if paged.PATHS[x.path].is_joint else 1 for x in store.layers]

  def copy(i, layers):
    def one(layer, axis, group):
      source, target = copies[i, group, 0], copies[i, group, 1]

      def move(x):
        return jax.lax.dynamic_update_slice_in_dim(
          x, jax.lax.dynamic_slice_in_dim(x, source, 1, axis), target, axis
        )

      return jax.tree.map(move, layer)

    return tuple(map(one, layers, axes, store.groups))

  layers = jax.lax.fori_loop(0, count, copy, store.layers)
  return dataclasses.replace(store, layers=layers)


class PageKeeper:
  """Makes the pages, and prepares them for a launch.

  Args:
    model: sizes of the model.
    config: sizes of the engine.
    path: name in `paged.PATHS`.
    mesh: mesh of the weights, or None.
    windows: the windows of the groups of layers, in the order of `Sequence.pages`;
      None: those of this model.
  """

  def __init__(
    self,
    model: TransformerConfig,
    config: EngineConfig,
    path: str,
    mesh: Mesh | None,
    windows: Windows | None = None,
  ):
    self._config = config
    if windows is None:
      windows = layer_groups.windows_of(model, config)
    groups = layer_groups.groups_of(model, windows)
    sizes = [1 + layer_groups.pages_of(config, window) for window in windows]
    self._copy = jax.jit(copied, donate_argnums=0)
    rules = model.sharding

    def make(group, kind):
      return paged.empty(
        pages=sizes[group],
        page_tokens=config.page_tokens,
        kv_heads=model.kinds[kind].num_kv_heads,
        head_dim=model.kinds[kind].head_dim,
        dtype=model.dtype,
        path=path,
        head_axes=tuple(axis for axis in (rules.tp, *rules.step) if axis),
        mesh=mesh,
      )

    tables = tuple(np.zeros(0, np.int32) for _ in windows)
    self.store: Any = PageStore(
      tuple(map(make, groups, model.layer_kinds)), tables, groups
    )

  width = 0  # there are no rows

  def prepare(self, plan: Plan, running: list[Sequence | None]) -> None:
    """Makes the page tables of all slots, and copies the pages that the plan lists."""
    c, size = self._config, max(64, self._config.slots)
    groups = len(self.store.tables)
    tables = np.zeros((groups, c.slots, c.pages_of(c.max_tokens)), np.int32)
    for slot, s in enumerate(running):
      for table, pages in zip(tables, [] if s is None else s.pages):
        table[slot, : len(pages)] = pages
    store = dataclasses.replace(self.store, tables=tuple(tables))
    for at in range(0, len(plan.copies), size):
      part = plan.copies[at : at + size]
      copies = np.zeros((size, groups, 2), np.int32)
      copies[: len(part)] = part
      store = programs.call(
        "engine copy", self._copy, store, copies, np.int32(len(part))
      )
    self.store = store

  def warm_up_moves(self) -> None:
    """Calls the program that copies pages, with nothing to copy."""
    copies = np.zeros(
      (max(64, self._config.slots), len(self.store.tables), 2), np.int32
    )
    self.store = programs.call(
      "engine copy", self._copy, self.store, copies, np.int32(0)
    )

  def write(self, written: Iterable[tuple[int, ...]]) -> None:
    """Does nothing: launches write their pages themselves."""
    del written
