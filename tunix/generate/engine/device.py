"""What the engine keeps on the device: weights, pages and rows; and its launches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.generate import batching, decode, layout
from tunix.generate.engine import arrays, launch, rows
from tunix.generate.engine.adapters import AdapterBank
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.launch import Out, PromptOut, Round
from tunix.generate.engine.rows import Store
from tunix.generate.engine.scheduler import Block, Plan
from tunix.generate.engine.sequence import Sequence
from tunix.generate.layout import GatherWeights
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

# Tokens of the narrowest row.
_NARROWEST = 128

# Rows become narrower if they can lose this share. To fill new rows costs about one
# round, and a launch has several.
_SHRINK = 0.5


class Device:
  """The weights and the cache of an engine.

  Args:
    model: the model.
    config: sizes of the engine.
    gather_weights: layout of the weights, see `layout.for_decoding`.
  """

  def __init__(
    self, model: Transformer, config: EngineConfig, gather_weights: GatherWeights
  ):
    self._config = config
    self._gather: GatherWeights = gather_weights
    self._opened: decode.Opened | None = None
    self._store: Store | None = None
    self._bank: AdapterBank | None = None
    self._uses: frozenset[str] = frozenset()
    self._load = jax.jit(rows.load, donate_argnums=0)
    self._write = jax.jit(rows.write_back, donate_argnums=0)
    self.set_model(model)

  def set_model(self, model: Transformer) -> None:
    """Takes the weights of a model at the next launch."""
    self._model, self._opened = model, None
    self._vocab_size = model.config.vocab_size

  def release(self) -> None:
    """Frees the cache, and the copy of weights that decoding needs."""
    self._store = self._opened = None

  def launch(
    self, plan: Plan, running: list[Sequence | None], allowed: np.ndarray | None
  ) -> tuple[Out, list[tuple[list[list[Block]], PromptOut]]]:
    """Runs a plan.

    Args:
      plan: the plan.
      running: the completion in each slot.
      allowed: bits of allowed tokens of each slot, see `choice.choose`; None: all.

    Returns:
      What was drawn, on the host; and the log-probs of prompts' tokens for each group
      of rounds whose prompts are to be scored.
    """
    c = self._config
    # Once used, always compiled for: there are few kinds of programs in a life.
    self._uses = self._uses.union(*(s.uses for s in running if s))
    tops = c.max_top_logprobs if "tops" in self._uses else 0
    graph, state, mesh = self._weights()
    with mesh_lib.use_mesh(mesh):
      self._fill(plan, running)
      width = c.rounds * (1 + c.draft_tokens)
      carry = Round(
        arrays.slots_of(running, plan, c),
        self._store,
        programs.call("engine empty", _empty, c.slots, width, tops),
      )
      self._store = None  # donated
      bank = self._bank_of(running)
      rules = arrays.rules_of(running, c.slots, self._vocab_size, self._uses)
      scored = []
      for blocks_width, rounds in self._segments(plan.rounds):
        blocks = arrays.blocks_of(rounds, plan.forks, blocks_width, c)
        count = np.int32(len(rounds))
        carry, scores = programs.call(
          "engine mixed", launch.mixed,
          graph, state, carry, rules, bank, blocks, count, allowed,
        )  # fmt: skip
        if blocks.scores:
          scored.append((rounds, mesh_lib.to_host(scores)))
      if plan.decode_rounds:
        until = np.array(
          [len(plan.rounds) + plan.decode_rounds, self._wanted], np.int32
        )
        carry = programs.call(
          "engine decode", launch.decode,
          graph, state, carry, rules, bank, until, allowed, c.draft_tokens,
        )  # fmt: skip
      self._store = carry.store
      return mesh_lib.to_host(carry.out), scored

  # Number of slots that are free or done at which decoding ends before its last round.
  _wanted = 2**30

  def look_at(self, idle: int) -> None:
    """Ends the next launch when `idle` slots are free or done."""
    self._wanted = idle

  def write(self, written: Iterable[tuple[int, int, int]]) -> None:
    """Writes parts of rows to pages: (slot, page of the row, page number) each."""
    assert self._store is not None
    for part in self._batches(list(written), 3):
      self._store = programs.call("engine write", self._write, self._store, *part)

  @property
  def adapters(self) -> AdapterBank:
    """The adapters; made, on the mesh of the weights, when they are first needed."""
    if self._bank is None:
      graph, state, mesh = self._weights()
      with mesh_lib.use_mesh(mesh):
        self._bank = AdapterBank(nnx.merge(graph, state), self._config.adapter_ranks)
    return self._bank

  def _bank_of(self, running: list[Sequence | None]) -> launch.Bank | None:
    state = self.adapters.state
    if state is None:
      return None
    return state, np.array([s.adapter if s else 0 for s in running], np.int32)

  def _weights(self) -> tuple[Any, Any, Any]:
    graph, state = nnx.split(self._model)
    state = mesh_lib.on_auto(state)
    mesh = mesh_lib.mesh_of(state)
    mesh = mesh_lib.current_mesh() if mesh is None else mesh
    if self._opened is None:
      with mesh_lib.use_mesh(mesh):
        weights = layout.for_decoding(self._model, state, self._gather)
        self._opened = decode.opened(graph, state, weights)
    return (*self._opened, mesh)

  def _segments(self, rounds: list[list[Block]]) -> list[tuple[int, list[list[Block]]]]:
    """Groups consecutive rounds that run in one program, with its number of blocks."""
    width_of = lambda blocks: next(
      n for n in self._config.block_counts if n >= len(blocks)
    )
    return [
      (width, list(group)) for width, group in itertools.groupby(rounds, width_of)
    ]

  def _fill(self, plan: Plan, running: list[Sequence | None]) -> None:
    """Makes the rows as wide as the launch needs, and loads completions into them."""
    c = self._config
    rounds = len(plan.rounds) + plan.decode_rounds
    most = max(
      min(s.limit, s.length + rounds * (1 + c.draft_tokens)) for s in running if s
    )
    width = _width(most, c)
    if self._store is None:
      self._store = self._empty_store(width)
    have = self._store.rows_v[0].shape[2]
    loads = plan.loads
    if width > have or width <= _SHRINK * have:
      self._write_parts(s for s in running if s and s not in plan.loads)
      empty = self._empty_rows(width)
      self._store = Store(*empty, self._store.pages_k, self._store.pages_v)
      loads = [s for s in running if s is not None and s.computed and s.pages]
    listed = [
      (s.slot, place, s.pages[place])
      for s in loads
      if s.slot is not None
      for place in range(c.pages_of(s.computed))
    ]
    if not (plan.copies or listed):
      return
    parts = list(self._batches(listed, 3)) or [(self._list([], 3), np.int32(0))]
    none = (self._list([], 2), np.int32(0))
    copies = list(self._batches(plan.copies, 2)) or [none]
    for copied in copies[:-1]:
      self._store = self._load(self._store, *copied, *(self._list([], 3), np.int32(0)))
    for i, part in enumerate(parts):
      first = copies[-1] if i == 0 else none
      self._store = programs.call("engine load", self._load, self._store, *first, *part)

  def _write_parts(self, sequences: Iterable[Sequence]) -> None:
    """Writes the pages that are in rows only, because they are not full yet."""
    size = self._config.page_tokens
    self.write(
      (s.slot, s.computed // size, s.pages[s.computed // size])
      for s in sequences
      if s.slot is not None and s.computed % size
    )

  def _batches(self, items: list[tuple[int, ...]], columns: int):
    """Yields lists of one fixed length, and how many of their entries are used."""
    size = self._list_size
    for at in range(0, len(items), size):
      part = items[at : at + size]
      yield self._list(part, columns), np.int32(len(part))

  @property
  def _list_size(self) -> int:
    return max(64, self._config.slots * 4)

  def _list(self, items: Seq[tuple[int, ...]], columns: int) -> np.ndarray:
    out = np.zeros((self._list_size, columns), np.int32)
    if items:
      out[: len(items)] = items
    return out

  def _empty_store(self, width: int) -> Store:
    c = self._config
    return Store(*self._empty_rows(width), *self._zeros(c.pages + 1, c.page_tokens))

  def _empty_rows(self, width: int) -> tuple[Any, Any]:
    return self._zeros(self._config.slots, width)

  def _zeros(self, first: int, tokens: int) -> tuple[Any, Any]:
    """Returns zero keys and values of all layers, split over the mesh by heads."""
    m = self._model.config
    axis = m.sharding.tp

    def make():
      def zeros(*shape):
        zero = lambda: jnp.zeros((first, m.num_kv_heads, *shape), m.dtype)
        return tuple(
          mesh_lib.constrain(zero(), None, axis) for _ in range(m.num_layers)
        )

      return zeros(m.head_dim, tokens), zeros(tokens, m.head_dim)

    return jax.jit(make)()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(slots: int, columns: int, tops: int) -> Out:
  return jax.tree.map(mesh_lib.constrain, launch.empty(slots, columns, tops))


def _width(tokens: int, config: EngineConfig) -> int:
  """Returns the tokens of a row that holds `tokens`: one of a few widths.

  Attention runs over whole rows, so a narrower one is faster; each width is a program.
  """
  page = config.page_tokens
  least = config.pages_of(_NARROWEST) * page
  most = config.pages_of(config.max_tokens) * page
  return min(most, least * batching.bucket(-(-tokens // least)))
