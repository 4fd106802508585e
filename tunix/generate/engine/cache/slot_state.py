"""The state of recurrent layers, one state for each slot.

A recurrent layer (a gated delta net, Mamba-2) has a state of fixed size: a summary of
all tokens so far, and the last inputs of a short convolution. The state belongs to a
slot and begins as zeros. It is never stored in pages, so no completion can reuse the
prefix of another request. The samples of one request are prefilled once, and each of
them gets a copy of the state after the prompt. A completion that loses its slot is
computed again from its first token.

A mixer with a state needs three things. Its method `empty_state(rows)` returns the
state of `rows` new rows, a tree of arrays [rows, ...]. If the call has a cache, the
mixer passes its tokens to `recur` of the layer's cache. Its method `advanced` runs the
same inputs again.

A round with drafts runs several tokens of a slot before it is known which of them
count. The states then stay as they were, and `SlotStore.settled` runs the inputs of the
tokens that count from them once more. The projections are not computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tunix.generate.engine.cache.paged_store import PageKeeper
from tunix.generate.engine.cache.row_keeper import RowKeeper
from tunix.generate.engine.cache.rows import Places
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling.plan import Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.models.transformer.model import Transformer

State = Any
# Runs rows of consecutive tokens: (state [R, ...], inputs [R, Q, ...], is_valid [R, Q])
# to (outputs [R, Q, ...], state after the valid tokens). Padding follows the valid
# tokens of a row and must not change its state.
Step = Callable[[State, Any, jax.Array], tuple[Any, State]]
Maker = Callable[[int], State]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotLayer:
  """The states of one layer, and the tokens of a call.

  Attributes:
    state: a tree of arrays [B, ...], the state of each slot.
    places: where the tokens of the call are.
    unsettled: inputs [B, width, ...] of the slots' tokens that the state does not
      contain yet; None: it contains all.
  """

  state: State
  places: Places
  unsettled: Any = None

  def recur(self, step: Step, inputs: object) -> tuple[Any, SlotLayer]:
    """Runs the tokens of a call, each row from the state of its slot.

    Args:
      step: runs rows of tokens.
      inputs: a tree of arrays [T, 1, ...] of the tokens.

    Returns:
      The outputs [T, 1, ...], and the layer with the new states.
    """
    p = self.places
    slots = jax.tree.leaves(self.state)[0].shape[0]
    own, is_valid, state, parts = slots * p.width, p.slots < slots, self.state, []
    unsettled = None
    if p.width:

      def by_slot(x):
        return x[:own].reshape(slots, p.width, *x.shape[2:])

      tokens = jax.tree.map(by_slot, inputs)
      out, new = step(state, tokens, is_valid[:own].reshape(slots, p.width))
      parts.append(jax.tree.map(lambda x: x.reshape(own, 1, *x.shape[2:]), out))
      if p.width == 1:
        state = _select_rows(is_valid[:own], new, state)
      else:
        unsettled = tokens
    blocks = p.block_slots.shape[0]
    if blocks:

      def cut(x):
        return x[own:].reshape(blocks, 1, p.block_width, *x.shape[2:])

      starts = p.positions[own :: p.block_width]
      valid = is_valid[own:].reshape(blocks, 1, -1)
      each = jax.tree.map(cut, inputs), p.block_slots, starts, valid

      # One block after the other: a prompt can have several in a round.
      def run(state, block):
        return _run_block(step, state, *block)

      state, out = jax.lax.scan(run, state, each)
      parts.append(jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[3:]), out))
    out = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return out, dataclasses.replace(self, state=state, unsettled=unsettled)


def _run_block(step: Step, state: State, inputs, slot, start, is_valid):
  """Runs a block from the state of its slot; returns (states, outputs)."""
  old = jax.tree.map(lambda x: x[slot][None], state)
  first = jax.tree.map(lambda x: jnp.where(start == 0, jnp.zeros_like(x), x), old)
  out, new = step(first, inputs, is_valid)
  new = _select_rows(jnp.any(is_valid, axis=1), new, old)
  return jax.tree.map(lambda x, y: x.at[slot].set(y[0]), state, new), out


def _select_rows(is_new: jax.Array, new: State, old: State) -> State:
  """Returns `new` in rows where `is_new` is True and `old` elsewhere.

  The result has the dtypes of `old`.
  """

  def wide(x):
    return is_new.reshape(-1, *(1,) * (x.ndim - 1))

  def pick(x, y):
    return jnp.where(wide(y), x.astype(y.dtype), y)

  return jax.tree.map(pick, new, old)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache:
  """The cache argument of a call: states of some layers, pages or rows of the others.

  Attributes:
    inner: the cache of the other layers.
    states: the state of each layer; None for layers without one.
    places: where the tokens of the call are.
    unsettled: see `SlotLayer`, for each layer; () before the call.
  """

  inner: Any
  states: tuple[State, ...]
  places: Places
  unsettled: tuple[Any, ...] = ()

  index = 0  # positions are given, see `Places`

  @property
  def size(self) -> int:
    """Number of tokens of a row; 0 if attention reads pages."""
    return self.inner.size

  def layer(self, number: int) -> Any:
    """Returns the cache of one layer."""
    state = self.states[number]
    return self.inner.layer(number) if state is None else SlotLayer(state, self.places)

  def replaced(self, layers: Seq[Any], tokens: int) -> SlotCache:
    """Returns the cache after a call that wrote `tokens` tokens to each layer."""
    has_state = [isinstance(layer, SlotLayer) for layer in layers]
    states = tuple(x.state if own else None for x, own in zip(layers, has_state))
    rest = [
      self.inner.layer(number) if own else layers[number]
      for number, own in enumerate(has_state)
    ]
    inner = self.inner.replaced(rest, tokens)
    left = tuple(x.unsettled if own else None for x, own in zip(layers, has_state))
    return dataclasses.replace(self, inner=inner, states=states, unsettled=left)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotStore:
  """States of some layers, and the store of the others.

  Attributes:
    inner: pages, or rows and pages.
    states, unsettled: see `SlotCache`. Between launches nothing is unsettled.
  """

  inner: Any
  states: tuple[State, ...]
  unsettled: tuple[Any, ...] = ()

  def at(self, places: Places) -> SlotCache:
    """Returns the cache of a call of the model."""
    return SlotCache(self.inner.at(places), self.states, places)

  def after(self, cache: SlotCache) -> SlotStore:
    """Returns the store with the cache that a call of the model returned."""
    inner = self.inner.after(cache.inner)
    left = cache.unsettled
    has_left = any(x is not None for x in left)
    return SlotStore(inner, cache.states, left if has_left else ())

  def forked(self, sources: Int[Array, "B"]) -> SlotStore:
    """Returns the store in which each slot has the state of its source."""
    is_forked = jnp.any(sources != jnp.arange(sources.shape[0]))

    def copy(states):
      return jax.tree.map(lambda x: x[sources], states)

    states = jax.lax.cond(is_forked, copy, lambda states: states, self.states)
    return SlotStore(self.inner.forked(sources), states)

  def settled(self, model: Any, counts: Int[Array, "B"]) -> SlotStore:
    """Returns the store whose states contain the first tokens of a round with drafts.

    Args:
      model: the model, with one module for each layer.
      counts: number of tokens of each slot that count.
    """
    if not self.unsettled:
      return self
    states = []
    for layer, state, inputs in zip(model.layer_modules(), self.states, self.unsettled):
      if inputs is not None:
        width = jax.tree.leaves(inputs)[0].shape[1]
        is_valid = jnp.arange(width) < counts[:, None]
        new = layer.attn.advanced(state, inputs, is_valid)
        state = _select_rows(counts > 0, new, state)
      states.append(state)
    return SlotStore(self.inner.settled(model, counts), tuple(states))


def makers_of(model: Transformer) -> tuple[Maker | None, ...]:
  """Returns `empty_state` of each layer's mixer; None for layers with attention.

  Args:
    model: a `Transformer`.
  """
  layers = model.layer_modules()
  return tuple(getattr(layer.attn, "empty_state", None) for layer in layers)


def scheduler_config(config: EngineConfig, model: Transformer) -> EngineConfig:
  """Returns the configuration for the scheduler.

  `prefix_cache` is False if the model has recurrent layers.

  Raises:
    ValueError: the engine has drafts, and a mixer with a state cannot run its inputs
      again.
  """
  if not any(makers_of(model)):
    return config
  mixers = [layer.attn for layer in model.layer_modules()]
  if config.draft_tokens and (
    lacking := [
      type(x).__name__
      for x in mixers
      if hasattr(x, "empty_state") and not hasattr(x, "advanced")
    ]
  ):
    raise ValueError(
      f"draft_tokens is {config.draft_tokens} and the mixer {lacking[0]} has no method "
      "`advanced`, which runs the inputs of accepted drafts again; expected 0. Write "
      "the method, or set draft_tokens to 0"
    )
  return dataclasses.replace(config, prefix_cache=False)


class SlotKeeper:
  """Keeps the states beside the pages of the other layers.

  Args:
    inner: keeper of the other layers.
    makers: see `makers_of`.
    slots: number of slots.
  """

  def __init__(
    self,
    inner: RowKeeper | PageKeeper,
    makers: tuple[Maker | None, ...],
    slots: int,
  ):
    self._inner = inner
    self._states = tuple(None if make is None else make(slots) for make in makers)

  @property
  def width(self) -> int:
    """Tokens of a row; 0 if attention reads pages."""
    return self._inner.width

  @property
  def store(self) -> SlotStore | None:
    """States and pages; None while a launch has them."""
    inner = self._inner.store
    return None if inner is None else SlotStore(inner, self._states)

  @store.setter
  def store(self, store: SlotStore | None) -> None:
    self._inner.store = None if store is None else store.inner
    self._states = () if store is None else store.states

  def prepare(self, plan: Plan, running: list[Sequence | None]) -> None:
    """Prepares the pages.

    States need no preparation: a block at position 0 starts from zeros.
    """
    self._inner.prepare(plan, running)

  def warm_up_moves(self) -> None:
    """Calls the programs that move pages, see `RowKeeper.warm_up_moves`."""
    self._inner.warm_up_moves()

  def write(self, written: Iterable[tuple[int, ...]]) -> None:
    """Writes parts of rows to pages, see `RowKeeper.write`."""
    self._inner.write(written)
