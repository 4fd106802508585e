"""Weights, cache and launches of an engine, on the device."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.decoders import layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.engine.cache import slot_state
from tunix.generate.engine.cache.keepers import keeper_of
from tunix.generate.engine.cache.paged_store import PageKeeper
from tunix.generate.engine.cache.row_keeper import RowKeeper
from tunix.generate.engine.cache.slot_state import SlotKeeper
from tunix.generate.engine.cache.width_programs import WidthPrograms
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device import launch, state as state_lib
from tunix.generate.engine.device.adapters import AdapterBank
from tunix.generate.engine.device.draft_rounds import Draft
from tunix.generate.engine.device.state import (
  Blocks,
  LaunchOutput,
  PromptOut,
  Round,
  Slots,
)
from tunix.generate.engine.device.token_sampling import Rules
from tunix.generate.engine.run import arrays
from tunix.generate.engine.run.draft_model import DraftModel
from tunix.generate.engine.scheduling.draft_policy import Source
from tunix.generate.engine.scheduling.plan import Block, Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.padded import decode
from tunix.models.images.prompt_images import PromptImages
from tunix.models.transformer.experts import route_records
from tunix.models.transformer.experts.route_records import RouteForm
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

# Log-probs of prompts' tokens, for each group of rounds.
Scored = list[tuple[list[list[Block]], PromptOut]]
Keeper = RowKeeper | PageKeeper | SlotKeeper


class Device:
  """The weights and the cache of an engine.

  Args:
    model: the model.
    config: sizes of the engine.
    gather_weights: layout of the weights, see `layout.for_decoding`.
    draft_model: the draft model, or None.

  Attributes:
    draft: the draft model on the device, or None.
    routes: form of the recorded routes; None if they are not recorded.
    widths: the programs of each width of rows.

  Raises:
    TypeError, ValueError: see `draft_model.check`.
    ValueError: routes are to be recorded, and the model has no experts.
  """

  def __init__(
    self,
    model: Transformer,
    config: EngineConfig,
    gather_weights: GatherWeights,
    draft_model: Transformer | None = None,
  ):
    self._config = config
    self.draft: DraftModel | None = None
    if draft_model is not None:
      self.draft = DraftModel(draft_model, model, config, gather_weights)
    self._gather: GatherWeights = gather_weights
    self.widths = WidthPrograms()
    # Graph definition, state and mesh of the weights in use.
    self._opened: tuple[Any, Any, Any] | None = None
    self._mesh: Any = None  # of the last launch
    self._keeper: Keeper | None = None
    self._bank: AdapterBank | None = None
    # The vectors of open requests' images.
    self._vectors: weakref.WeakKeyDictionary[PromptImages, np.ndarray]
    self._vectors = weakref.WeakKeyDictionary()
    self.routes = route_records.form_of(model) if config.record_routes else None
    self._uses = frozenset({"routes"} if config.record_routes else ())
    self._shifts = False  # images have changed rotary positions
    self.set_model(model)

  def set_model(self, model: Transformer) -> None:
    """Takes the weights of a model at the next launch."""
    self._model, self._opened = model, None
    self._vectors.clear()

  def release(self) -> None:
    """Frees the cache, and the copy of weights that decoding needs."""
    self._keeper = self._opened = None
    if self.draft is not None:
      self.draft.release()

  def close(self) -> None:
    """Frees the memory of the device, and cancels the thread that compiles."""
    self.widths.close()
    self.release()

  def launch(
    self,
    plan: Plan,
    running: list[Sequence | None],
    masks: Callable[[], np.ndarray] | None,
    source: Source = "none",
  ) -> tuple[LaunchOutput, Scored]:
    """Runs a plan.

    Args:
      plan: the plan.
      running: the completion in each slot.
      masks: computes the bits of allowed tokens of each slot, see
        `token_sampling.choose`. It is called while the model runs, and the plan has one
        round. None: all tokens.
      source: what makes the drafts; "none" if there are masks.

    Returns:
      What was drawn, on the host; and the log-probs of prompts' tokens for each group
      of rounds whose prompts are to be scored.
    """
    c = self._config
    # Once used, always compiled for: there are few kinds of programs in a life.
    self._uses = self._uses.union(*(s.uses for s in running if s))
    self._shifts |= any(s and s.images and s.images.shift for s in running)
    tops = c.max_top_logprobs if "tops" in self._uses else 0
    graph, state, mesh = self._weights()
    self._mesh = mesh
    self.widths.kind = masks is not None, self._uses
    with mesh_lib.use_mesh(mesh), self.widths.noted():
      keeper = self._kept(graph, state, mesh)
      keeper.prepare(plan, running)
      # Before the slots are made, which count the keys of the draft model.
      draft = self._prepared_draft(plan, running, mesh, source)
      width = c.rounds * (1 + c.draft_tokens)
      slots, out = programs.call(
        "engine start", _start,
        arrays.slots_of(running, plan, c, self._shifts),
        width, tops, self.routes, c.record_head,
      )  # fmt: skip
      draft_store = None if draft is None else draft.take_store()
      carry = Round(slots, keeper.store, out, draft_store)
      keeper.store = None  # donated
      bank = self._bank_of(running)
      rules = arrays.rules_of(running, c.slots, self._uses)
      model = graph, state
      if masks is not None:
        carry, scored = self._masked(model, carry, rules, bank, plan, masks)
      else:
        draft_tokens = 0 if source == "none" else c.draft_tokens
        argument = None if draft is None else draft.argument()
        drafts = draft_tokens, argument
        carry, scored = self._rounds(model, carry, rules, bank, plan, drafts)
      keeper.store = carry.store
      if draft is not None:
        draft.put_store(carry.draft_store)
      return mesh_lib.to_host(carry.out), scored

  def _is_read(self, blocks: Blocks) -> bool:
    """Returns True if the host reads what is recorded of prompts."""
    return bool(blocks.scores) or self.routes is not None

  def _prepared_draft(
    self, plan: Plan, running: list[Sequence | None], mesh: Mesh | None, source: Source
  ) -> DraftModel | None:
    """Returns the draft model if it runs in the launch."""
    if self.draft is None or source == "model":
      if self.draft is not None:
        self.draft.prepare(plan, running, mesh)
      return self.draft
    self.draft.skip(plan)
    return None

  def _rounds(
    self,
    model: tuple[Any, Any],
    carry: Round,
    rules: Rules,
    bank: launch.Bank | None,
    plan: Plan,
    drafts: tuple[int, Draft | None],
  ) -> tuple[Round, Scored]:
    """Runs the rounds of a plan, with a number of drafts and the model of them."""
    draft_tokens, draft = drafts
    scored: Scored = []
    for width, rounds in self._segments(plan.rounds):
      blocks = self._blocks_of(rounds, plan, width)
      count = np.int32(0 if plan.is_empty else len(rounds))
      carry, scores = programs.call(
        "engine mixed", launch.mixed,
        *model, carry, rules, bank, blocks, count, draft,
      )  # fmt: skip
      if self._is_read(blocks):
        scored.append((rounds, mesh_lib.to_host(scores)))
    if plan.decode_rounds:
      until = np.array([len(plan.rounds) + plan.decode_rounds, self._wanted], np.int32)
      carry = programs.call(
        "engine decode", launch.decode,
        *model, carry, rules, bank, until, draft_tokens, draft,
      )  # fmt: skip
    return carry, scored

  def _masked(
    self,
    model: tuple[Any, Any],
    carry: Round,
    rules: Rules,
    bank: launch.Bank | None,
    plan: Plan,
    masks: Callable[[], np.ndarray],
  ) -> tuple[Round, Scored]:
    """Runs the one round of a plan, and computes masks while its model runs."""
    slots, store, out, _ = carry
    segments = self._segments(plan.rounds) or [(0, [])]
    assert len(segments) == 1 and len(plan.rounds) + plan.decode_rounds == 1
    [(width, rounds)] = segments
    blocks = self._blocks_of(rounds, plan, width)
    tops = out.chosen.top_ids.shape[2]
    # The call returns before the program has run, so the masks cost no time of the
    # device unless they take longer than the model.
    store, ran, scores = programs.call(
      "engine forward", launch.forward,
      *model, slots, store, rules, bank, blocks, tops,
    )  # fmt: skip
    slots, out = programs.call(
      "engine draw", launch.draw, slots, out, rules, ran, blocks, masks()
    )
    is_read = self._is_read(blocks)
    scored: Scored = [(rounds, mesh_lib.to_host(scores))] if is_read else []
    return Round(slots, store, out), scored

  def _blocks_of(self, rounds: list[list[Block]], plan: Plan, width: int) -> Blocks:
    return arrays.blocks_of(rounds, plan.forks, width, self._config, self._vectors_of)

  def _vectors_of(self, images: PromptImages) -> np.ndarray:
    """Returns the vectors of a prompt's images, computed once for its completions."""
    if images not in self._vectors:
      graph, state, _ = self._weights()
      made = programs.call("engine images", _encode, graph, state, images.pixels)
      self._vectors[images] = mesh_lib.to_host(made)[: images.num_tokens]
    return self._vectors[images]

  # Number of slots that are free or done at which decoding ends before its last round.
  _wanted = 2**30

  def look_at(self, idle: int) -> None:
    """Ends the next launch when `idle` slots are free or done."""
    self._wanted = idle

  def warm_up_moves(self) -> None:
    """Calls the programs that move pages, see `RowKeeper.warm_up_moves`."""
    assert self._keeper is not None
    with mesh_lib.use_mesh(self._mesh), self.widths.noted():
      self._keeper.warm_up_moves()
      if self.draft is not None:
        self.draft.call_all()

  def compile_widths(self, first: int) -> None:
    """Compiles programs for other widths of rows in a thread, see `WidthPrograms`."""
    if self.draft is not None:  # its rows have a width of their own
      self.widths.close()
      return
    with mesh_lib.use_mesh(self._mesh):
      self.widths.start(first)

  @property
  def width(self) -> int:
    """Tokens of a row; 0 if attention reads pages."""
    return 0 if self._keeper is None else self._keeper.width

  def write(self, written: Iterable[tuple[int, ...]]) -> None:
    """Writes parts of rows to pages, see `RowKeeper.write`."""
    assert self._keeper is not None
    # The caller's mesh may have other devices: those that train.
    with mesh_lib.use_mesh(self._mesh), self.widths.noted():
      self._keeper.write(written)

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

  def _kept(
    self, graph: nnx.GraphDef[Any], state: nnx.State, mesh: Mesh | None
  ) -> Keeper:
    """Returns the keeper of the cache; made when it is first needed."""
    if self._keeper is None:
      # The shardings of the opened model: those in which it decodes.
      module = nnx.merge(graph, state)
      choose = self.widths.choose
      keeper = keeper_of(module.config, self._config, mesh, choose_width=choose)
      makers = slot_state.makers_of(module)
      has_states = any(makers)
      self._keeper = (
        SlotKeeper(keeper, makers, self._config.slots) if has_states else keeper
      )
    return self._keeper

  def _weights(self) -> tuple[Any, Any, Any]:
    if self._opened is None:
      graph, state = nnx.split(self._model)
      state = mesh_lib.on_auto(state)
      mesh = mesh_lib.mesh_of(state)
      mesh = mesh_lib.current_mesh() if mesh is None else mesh
      with mesh_lib.use_mesh(mesh):
        weights = layout.for_decoding(self._model, state, self._gather)
        transposes = layout.reads_transposed(mesh)
        opened = decode.opened(graph, state, weights, transposes=transposes)
      self._opened = opened.graph, opened.state, mesh
    return self._opened

  def _segments(self, rounds: list[list[Block]]) -> list[tuple[int, list[list[Block]]]]:
    """Groups consecutive rounds that run in one program, with its number of blocks."""

    def width_of(blocks):
      return next(n for n in self._config.block_counts if n >= len(blocks))

    return [
      (width, list(group)) for width, group in itertools.groupby(rounds, width_of)
    ]


@functools.partial(jax.jit, static_argnums=0)
def _encode(graph: nnx.GraphDef[Any], state: nnx.State, pixels: Any) -> jax.Array:
  """Returns the vectors of the images of one row, see `Vectors.table`."""
  model: Any = nnx.merge(graph, state)
  layers = model.features_of_layers(jax.tree.map(lambda x: x[None], pixels))
  rows = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in layers], axis=1)
  # Replicated, because every process reads the whole result.
  return mesh_lib.constrain(rows)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _start(
  slots: Slots, columns: int, tops: int, form: RouteForm | None, head: int
) -> tuple[Slots, LaunchOutput]:
  """Returns the slots and empty results, placed as launches return them.

  A program that follows another one in a launch would else be compiled a second time.
  """
  out = state_lib.empty(slots.last.shape[0], columns, tops, form, head)
  return jax.tree.map(mesh_lib.constrain, (slots, out))
