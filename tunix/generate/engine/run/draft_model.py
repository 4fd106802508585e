"""A draft model for speculative decoding: its weights, its cache and its pages.

The draft model stores its keys and values under the page numbers of the engine's model,
so the scheduler knows nothing of it. Only launches that use the draft model compute its
keys. A completion that lacks some of them gets them before the next launch of this kind
(`draft_rounds.catch_up`). Wrong or missing keys make drafts worse, and never change a
token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.decoders import decoders, layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.engine.cache import slot_state
from tunix.generate.engine.cache.keepers import keeper_of
from tunix.generate.engine.cache.paged_store import PageKeeper
from tunix.generate.engine.cache.row_keeper import RowKeeper
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device import draft_rounds
from tunix.generate.engine.device.draft_rounds import Draft, Seen
from tunix.generate.engine.mtp import MTPLayer
from tunix.generate.engine.scheduling import layer_groups
from tunix.generate.engine.scheduling.pages import TRASH
from tunix.generate.engine.scheduling.plan import Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.padded import decode
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib


def check(draft: nnx.Module, model: Transformer, config: EngineConfig) -> None:
  """Refuses a draft model that the engine cannot use.

  Args:
    draft: the draft model.
    model: the engine's model.
    config: sizes of the engine.

  Raises:
    TypeError: it is not a `Transformer`.
    ValueError: it has another vocabulary or other devices, too few positions, recurrent
      layers or wider windows, or reads hidden states of another width; or the engine
      has no drafts.
  """
  if not isinstance(draft, Transformer):
    raise TypeError(
      f"draft_model is {type(draft).__name__}, expected a tunix Transformer: the "
      "engine writes the pages of its cache. Leave it out for drafts by prompt lookup"
    )
  if not config.draft_tokens:
    raise ValueError(
      "draft_tokens is 0 and there is a draft_model, expected at least 1 draft in a "
      "round. Set draft_tokens, to 4 for example, or leave draft_model out"
    )
  have, need = draft.config.vocab_size, model.config.vocab_size
  if have != need:
    raise ValueError(
      f"draft_model has a vocabulary of {have} ids, expected the model's, {need}: "
      "a draft is a token id. Use a draft model with the same tokenizer"
    )
  _check_positions(draft, model, config)
  if isinstance(draft, MTPLayer) and draft.config.embed_dim != model.config.embed_dim:
    raise ValueError(
      f"draft_model predicts further tokens (MTP) from hidden states of "
      f"{draft.config.embed_dim} numbers, and the model's have "
      f"{model.config.embed_dim}; expected equal numbers. Load both from one folder"
    )
  if any(slot_state.makers_of(draft)):
    raise ValueError(
      "draft_model has recurrent layers, expected attention in all layers: a wrong "
      "draft would change their state. Use another draft model"
    )
  meshes = [mesh_lib.mesh_of(mesh_lib.on_auto(nnx.state(m))) for m in (draft, model)]
  if meshes[0] != meshes[1]:
    raise ValueError(
      f"draft_model is on the mesh {meshes[0]}, expected that of the model, "
      f"{meshes[1]}: both run in one program. Load both on the same mesh"
    )
  layer_groups.groups_of(draft.config, layer_groups.windows_of(model.config, config))


def _check_positions(
  draft: nnx.Module, model: Transformer, config: EngineConfig
) -> None:
  have, most = decoders.max_positions(draft), decoders.max_positions(model)
  need = config.max_tokens if most is None else min(most, config.max_tokens)
  if have is not None and have < need:
    raise ValueError(
      f"draft_model has {have} positions, expected at least {need}, the tokens of a "
      "completion. Lower EngineConfig.max_tokens, or use another draft model"
    )


def size_ratio(draft: nnx.Module, model: nnx.Module) -> float:
  """Returns the parameters of a draft model over those of the model."""

  def count(module):
    return sum(x.size for x in jax.tree.leaves(nnx.state(module)))

  return count(draft) / count(model)


class DraftModel:
  """A draft model on the device.

  Args:
    model: the draft model.
    target: the engine's model.
    config: sizes of the engine.
    gather_weights: layout of the weights, see `layout.for_decoding`.

  Raises:
    TypeError, ValueError: see `check`.
  """

  def __init__(
    self,
    model: Transformer,
    target: Transformer,
    config: EngineConfig,
    gather_weights: GatherWeights,
  ):
    check(model, target, config)
    self._model, self._config = model, config
    self._gather: GatherWeights = gather_weights
    self._windows = layer_groups.windows_of(target.config, config)
    self._opened: decode.Opened | None = None
    self._keeper: RowKeeper | PageKeeper | None = None
    self._mesh: Mesh | None = None
    self._before: list[int] = []  # `Sequence.drafted` of the slots before the launch
    self._pages = DraftedPages(len(self._windows), config.page_tokens)
    # `Seen.hidden` and `Seen.first` of an `MTPLayer`.
    self.reads_hidden = isinstance(model, MTPLayer)
    self._seen: tuple[Any, Any] | None = None

  def release(self) -> None:
    """Frees the cache, and the copy of weights that decoding needs."""
    self._keeper = self._opened = self._seen = None
    self._pages.clear()

  def skip(self, plan: Plan) -> None:
    """Takes note of a launch that does not use the draft model."""
    for s in plan.loads:  # nothing is loaded for it
      s.drafted = 0
    self._seen = None  # the hidden states of this launch are not kept

  def prepare(
    self, plan: Plan, running: list[Sequence | None], mesh: Mesh | None
  ) -> None:
    """Makes the cache ready for a launch, and computes the keys that it lacks.

    Args:
      plan: the plan of the launch.
      running: the completion in each slot.
      mesh: mesh of the weights, which must be current; or None.
    """
    # Followers of a fork have the hidden state that their first token was drawn from.
    strangers = [s for s in plan.loads if not s.drafted]
    for s in strangers:
      s.drafted = self._pages.known(s)
    self._before = [0 if s is None else s.drafted for s in running]
    self._mesh = mesh
    self._kept().prepare(plan, running)
    if strangers and self.reads_hidden:
      self._forget(strangers)
    c = self._config
    history = np.zeros((c.slots, c.max_tokens), np.int32)
    drafted, until = np.zeros((2, c.slots), np.int32)
    for slot, s in enumerate(running):
      if s is not None and s.drafted < needed(s):
        history[slot, : s.length] = s.known
        drafted[slot], until[slot] = s.drafted, s.computed
        s.drafted = s.computed
    if until.any():
      self._catch_up(history, drafted, until)

  def argument(self) -> Draft:
    """Returns the model as an argument of a program."""
    if self._opened is None:
      graph, state = nnx.split(self._model)
      state = mesh_lib.on_auto(state)
      weights = layout.for_decoding(self._model, state, self._gather)
      self._opened = decode.opened(
        graph,
        state,
        weights,
        transposes=layout.reads_transposed(mesh_lib.mesh_of(state)),
      )
    return Draft(*self._opened)

  def take_store(self) -> Any:
    """Returns the cache, which a program donates; `put_store` takes it back."""
    keeper = self._kept()
    store, keeper.store = keeper.store, None
    if not self.reads_hidden:
      return store
    seen, self._seen = self._seen, None
    if seen is None:
      c, config = self._config, self._model.config
      shape = c.slots, 1 + c.draft_tokens, config.embed_dim
      seen = draft_rounds.nothing_seen(shape, config.dtype)
    return Seen(store, *seen)

  def put_store(self, store: Any) -> None:
    """Takes the cache after a program."""
    if isinstance(store, Seen):
      store, self._seen = store.store, (store.hidden, store.first)
    self._kept().store = store

  def _forget(self, loads: list[Sequence]) -> None:
    """Drops the hidden states of the slots that have new completions."""
    is_new = np.zeros(self._config.slots, bool)
    is_new[[s.slot for s in loads if s.slot is not None]] = True
    seen = programs.call(
      "engine forget", draft_rounds.forget, self.take_store(), is_new
    )
    self.put_store(seen)

  def after(self, plan: Plan, running: list[Sequence | None]) -> None:
    """Counts the keys after a launch with the draft model, and writes full pages.

    Args:
      plan: the plan of the launch.
      running: the completions that it ran, whose `computed` is that after it.
    """
    size = self._config.page_tokens
    leaders = {fork.leader for fork in plan.forks}
    followers = {fork.follower for fork in plan.forks}
    written: list[tuple[int, ...]] = []
    for slot, (s, before) in enumerate(zip(running, self._before)):
      if s is None or s in followers:
        continue
      s.drafted = needed(s)  # the next launch may compute one key again
      full = range(before // size, s.drafted // size)
      self._pages.record(s, full)
      # A part of a page stays in its row, unless followers copy it.
      end = -(-s.drafted // size) if s in leaders else full.stop
      pages = range(full.start, end)
      written += [(slot, page, *s.pages_at(page)) for page in pages]
    for fork in plan.forks:
      fork.follower.drafted = min(fork.leader.drafted, fork.follower.computed)
    self._kept().write(written)

  def call_all(self) -> None:
    """Calls the programs that move pages or compute missing keys, without work.

    They are then compiled, or recorded.
    """
    c = self._config
    none = np.zeros(c.slots, np.int32)
    self._kept().warm_up_moves()
    if self.reads_hidden:
      self._forget([])
    self._catch_up(np.zeros((c.slots, c.max_tokens), np.int32), none, none)

  def _catch_up(
    self, history: np.ndarray, drafted: np.ndarray, until: np.ndarray
  ) -> None:
    store = programs.call(
      "engine catch up", draft_rounds.catch_up,
      self.argument(), self.take_store(), history, drafted, until,
      self._config.page_tokens,
    )  # fmt: skip
    self.put_store(store)

  def _kept(self) -> RowKeeper | PageKeeper:
    if self._keeper is None:
      # The shardings of the opened model: those in which it decodes.
      model, count = self.argument().module().config, lambda s: s.drafted
      self._keeper = keeper_of(model, self._config, self._mesh, self._windows, count)
    return self._keeper


def needed(s: Sequence) -> int:
  """Returns the number of tokens whose keys a launch with the draft model needs.

  A round computes at least the keys of the last two tokens of a completion that
  decodes.
  """
  return s.computed - 1 if s.is_decoding else s.computed


class DraftedPages:
  """Names the pages that have keys of the draft model, by the digests of their tokens.

  Args:
    groups: number of groups of layers.
    page_tokens: tokens of a page.
  """

  def __init__(self, groups: int, page_tokens: int):
    self._groups: list[dict[int, bytes]] = [{} for _ in range(groups)]
    self._size = page_tokens

  def clear(self) -> None:
    """Forgets all pages."""
    for group in self._groups:
      group.clear()

  def record(self, s: Sequence, places: Iterable[int]) -> None:
    """Takes note that the pages of some places of a completion have all keys."""
    for place in places:
      if place + 1 < len(s.digests):  # else prefixes are not shared
        for group, page in zip(self._groups, s.pages_at(place)):
          group[page] = s.digests[place + 1]

  def known(self, s: Sequence) -> int:
    """Returns the number of a completion's first tokens that have keys."""
    for place in range(s.computed // self._size):
      digest = s.digests[place + 1] if place + 1 < len(s.digests) else None
      for group, page in zip(self._groups, s.pages_at(place)):
        # No query sees a page that a window has passed.
        if page != TRASH and (digest is None or group.get(page) != digest):
          return place * self._size
    return s.computed // self._size * self._size
