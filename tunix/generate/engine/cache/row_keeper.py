"""Makes rows and pages, fills the rows from pages, and writes pages from rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix.generate.engine.cache import rows
from tunix.generate.engine.cache.rows import Store
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling import layer_groups
from tunix.generate.engine.scheduling.layer_groups import Windows
from tunix.generate.engine.scheduling.plan import Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.sizes import batching
from tunix.models.transformer.config import TransformerConfig
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

# Number of tokens of a completion whose keys and values are in its row.
Stored = Callable[[Sequence], int]

# Tokens of the narrowest row.
_NARROWEST = 128

# Rows become narrower if the new width is at most this share of the old one. Filling
# the new rows costs about one round, and a launch has several rounds.
_SHRINK = 0.5


def computed_of(sequence: Sequence) -> int:
  """Returns the number of tokens that have keys and values of the engine's model."""
  return sequence.computed


class RowKeeper:
  """Makes rows and pages, and prepares them for a launch.

  Args:
    model: sizes of the model.
    config: sizes of the engine.
    windows: the windows of the groups of layers, in the order of `Sequence.pages`;
      None: those of this model.
    stored: returns the number of tokens of a completion that are in its row.
    choose_width: takes the smallest width that suffices, returns the width to use.

  Attributes:
    store: rows and pages; None until the first launch.
  """

  def __init__(
    self,
    model: TransformerConfig,
    config: EngineConfig,
    windows: Windows | None = None,
    stored: Stored = computed_of,
    choose_width: Callable[[int], int] = lambda width: width,
  ):
    self._model, self._config, self._stored = model, config, stored
    self._choose_width, self._is_substitute = choose_width, False
    if windows is None:
      windows = layer_groups.windows_of(model, config)
    self._windows, self._groups = windows, layer_groups.groups_of(model, windows)
    self._load = jax.jit(rows.load, donate_argnums=0)
    self._write = jax.jit(rows.write_back, donate_argnums=0)
    self.store: Any = None

  @property
  def width(self) -> int:
    """Tokens of a row."""
    return 0 if self.store is None else self.store.width

  def write(self, written: Iterable[tuple[int, ...]]) -> None:
    """Writes parts of rows to pages.

    Args:
      written: (slot, page of the row, page number of each group) of each part.
    """
    for part in self._batches(list(written), 2 + len(self._windows)):
      self.store = programs.call("engine write", self._write, self.store, *part)

  def prepare(self, plan: Plan, running: list[Sequence | None]) -> None:
    """Makes the rows as wide as the launch needs, and loads completions into them."""
    c = self._config
    rounds = len(plan.rounds) + plan.decode_rounds
    most = max(
      min(s.limit, s.length + rounds * (1 + c.draft_tokens)) for s in running if s
    )
    have = width = self.width
    needed = _width(most, c)
    if needed > have or needed <= _SHRINK * have or self._is_substitute:
      width = self._choose_width(needed)
      self._is_substitute = width != needed
    if self.store is None:
      self.store = self._empty_store(width)
      have = width
    loads = plan.loads
    if width != have:
      self._write_parts(s for s in running if s and s not in plan.loads)
      empty = self._empty_rows(width)
      pages = self.store.pages_k, self.store.pages_v
      self.store = Store(*empty, *pages, groups=self._groups)
      loads = [s for s in running if s is not None and self._stored(s) and s.pages]
    listed = [
      (s.slot, place, *s.pages_at(place))
      for s in loads
      if s.slot is not None
      for place in range(c.pages_of(self._stored(s)))
      if any(s.pages_at(place))  # without a page, no layer sees it
    ]
    if not (plan.copies or listed):
      return
    groups = len(self._windows)
    nothing = (self._list([], 2 + groups), np.int32(0))
    parts = list(self._batches(listed, 2 + groups)) or [nothing]
    none = (self._list([], groups, 2), np.int32(0))
    copies = list(self._batches(plan.copies, groups, 2)) or [none]
    for copied in copies[:-1]:
      self.store = programs.call(
        "engine load", self._load, self.store, *copied, *nothing
      )
    for i, part in enumerate(parts):
      first = copies[-1] if i == 0 else none
      self.store = programs.call("engine load", self._load, self.store, *first, *part)

  def warm_up_moves(self) -> None:
    """Calls the programs that move pages, with nothing to move.

    This compiles or records them for the current width of rows.
    """
    groups = len(self._windows)
    none = self._list([], 2 + groups), np.int32(0)
    copies = self._list([], groups, 2), np.int32(0)
    self.store = programs.call("engine load", self._load, self.store, *copies, *none)
    self.store = programs.call("engine write", self._write, self.store, *none)

  def _write_parts(self, sequences: Iterable[Sequence]) -> None:
    """Writes the partly filled last pages, which only the rows have so far."""
    size, ends = self._config.page_tokens, ((s, self._stored(s)) for s in sequences)
    self.write(
      (s.slot, end // size, *s.pages_at(end // size))
      for s, end in ends
      if s.slot is not None and end % size
    )

  def _batches(
    self, items: list[tuple[Any, ...]], *columns: int
  ) -> Iterator[tuple[np.ndarray, np.int32]]:
    """Yields lists of one fixed length, each with the number of its used entries."""
    size = self._list_size
    for at in range(0, len(items), size):
      part = items[at : at + size]
      yield self._list(part, *columns), np.int32(len(part))

  @property
  def _list_size(self) -> int:
    return max(64, self._config.slots * 4)

  def _list(self, items: Seq[tuple[Any, ...]], *columns: int) -> np.ndarray:
    out = np.zeros((self._list_size, *columns), np.int32)
    if items:
      out[: len(items)] = items
    return out

  def _empty_store(self, width: int) -> Store:
    sizes = [1 + layer_groups.pages_of(self._config, w) for w in self._windows]
    pages = [sizes[group] for group in self._groups]
    size = self._config.page_tokens
    pages = self._zeros(pages, size, size, self._model.dtype)
    return Store(*self._empty_rows(width), *pages, groups=self._groups)

  def _empty_rows(self, width: int) -> tuple[Any, Any]:
    tile = rows.tile_tokens(self._config.page_tokens)
    firsts = [self._config.slots] * self._model.num_layers
    return self._zeros(firsts, width, tile, rows.stored_dtype(self._model.dtype))

  def _zeros(
    self, firsts: list[int], tokens: int, tile: int, dtype: DTypeLike
  ) -> tuple[Any, Any]:
    """Returns zero keys and values of all layers, split over the mesh by heads.

    Args:
      firsts: size of each layer's first axis.
      tokens: number of tokens of a row, or of a page.
      tile: number of tokens of a tile of keys.
      dtype: their dtype.
    """
    m = self._model
    kinds = [m.kinds[kind] for kind in m.layer_kinds]
    shapes = tuple((n, x.num_kv_heads, x.head_dim) for n, x in zip(firsts, kinds))
    axes = tuple(axis for axis in (m.sharding.tp, *m.sharding.step) if axis)
    name = str(jnp.dtype(dtype))
    return programs.call("engine zeros", _zeros, shapes, tokens, tile, name, axes)


# One function for all engines: a new one would be compiled again in every rollout.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _zeros(
  shapes: tuple[tuple[int, int, int], ...],
  tokens: int,
  tile: int,
  dtype: str,
  axes: tuple[str, ...],
) -> tuple[Any, Any]:
  def zero(*shape):
    return mesh_lib.constrain(jnp.zeros(shape, dtype), None, axes)

  keys = (zero(n, heads, tokens // tile, size, tile) for n, heads, size in shapes)
  parts = [(*shape, rows.tile_features(shape[2])) for shape in shapes]
  values = (zero(n, heads, size // e, tokens, e) for n, heads, size, e in parts)
  return tuple(keys), tuple(values)


def widths(config: EngineConfig) -> list[int]:
  """Returns all widths of rows, the narrowest first."""
  return sorted({_width(tokens, config) for tokens in range(1, config.max_tokens + 1)})


def _width(tokens: int, config: EngineConfig) -> int:
  """Returns the width of a row that holds `tokens` tokens, one of a few widths.

  Attention runs over whole rows, so narrow rows are faster. Each width needs a compiled
  program, so there are few.
  """
  tile = rows.tile_tokens(config.page_tokens)

  def whole(tokens):
    return -(-tokens // tile) * tile

  least, most = whole(_NARROWEST), whole(config.max_tokens)
  double = least * batching.bucket(-(-tokens // least))
  # Widths are `least` times powers of two, and three quarters of these.
  between = whole(3 * double // 4)
  return min(most, between if tokens <= between and double > least else double)
