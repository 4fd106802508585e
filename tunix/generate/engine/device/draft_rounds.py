"""The passes of a draft model in a launch, for speculative decoding.

A draft model is a small model of the same vocabulary. Before a round it draws D tokens
for each slot, one after the other, with the rules and the random key of the token that
each one guesses. The model of the engine then draws its own tokens with the same keys,
see launch.py. As both use the same noise, a draft is right more often than a second,
independent draw would be.

The draft model has its own keys and values, under the page numbers of the engine.
`Slots.drafted` counts the tokens of each slot that have them: all tokens before the
last one, or all but one of these.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from tunix.generate.engine.cache.rows import Places
from tunix.generate.engine.device import rounds as rounds_lib, token_sampling
from tunix.generate.engine.device.state import Blocks, Slots
from tunix.generate.engine.device.token_sampling import Rules

Leaf = Any
# The last token, and the one before it if its keys are missing.
_WINDOW = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
  """A draft model as an argument of a program: a module, from `decode.opened`."""

  graph: Any = dataclasses.field(metadata={"static": True})
  state: nnx.State

  def module(self) -> Any:
    """Returns the module."""
    return nnx.merge(self.graph, self.state)


def propose(
  draft: Draft, store: object, slots: Slots, rules: Rules, count: int
) -> tuple[Any, Int[Array, "B D"]]:
  """Returns the cache of the draft model, and its next `count` tokens of each slot.

  Args:
    draft: the draft model.
    store: its cache.
    slots: the slots.
    rules: choice of the tokens.
    count: number D of tokens, at least 1.
  """
  model, batch = draft.module(), slots.last.shape[0]
  # No text has these log-probs.
  unused = {"scores", "tops", "prompts"}
  rules = dataclasses.replace(rules, uses=rules.uses - unused)
  tokens, places = _window(slots)
  hidden, store = rounds_lib.hidden_of(model, None, store, tokens, places)
  last = jnp.minimum(slots.position - slots.drafted, _WINDOW - 1)
  hidden = hidden.reshape(batch, _WINDOW, -1)[jnp.arange(batch), last]

  def chosen(hidden, index):
    logits = rounds_lib.logits_of(model, hidden)
    return token_sampling.choose(logits, rules, index)[0].ids

  def step(carry, number):
    store, tokens = carry
    positions = slots.position + number
    is_run = slots.active & (positions < slots.limit)
    places = _own_places(is_run[:, None], positions[:, None])
    hidden, store = rounds_lib.hidden_of(model, None, store, tokens, places)
    tokens = chosen(hidden, slots.index + number)
    return (store, tokens), tokens

  with jax.named_scope("draft"):
    first = chosen(hidden, slots.index)
    (store, _), rest = jax.lax.scan(step, (store, first), jnp.arange(1, count))
  return store, jnp.concatenate([first[:, None], rest.T], axis=1)


def run_along(draft: Draft, store: object, slots: Slots, here: Blocks) -> Any:
  """Returns the cache of the draft model after the tokens of a `mixed` round.

  Args:
    draft: the draft model.
    store: its cache.
    slots: the slots before the round.
    here: the blocks of the round.
  """
  batch, (count, size) = slots.last.shape[0], here.tokens.shape
  tokens, own = _window(slots)
  offsets = jnp.arange(size)
  is_run = offsets < here.counts[:, None]
  block_slots = jnp.where(is_run, here.slots[:, None], batch)
  places = Places(
    jnp.concatenate([own.slots, block_slots.reshape(-1)]),
    jnp.concatenate([own.positions, (here.starts[:, None] + offsets).reshape(-1)]),
    here.slots,
    _WINDOW,
    size,
  )
  tokens = jnp.concatenate([tokens, here.tokens.reshape(count * size)])
  with jax.named_scope("draft"):
    return rounds_lib.hidden_of(draft.module(), None, store, tokens, places)[1]


@functools.partial(jax.jit, static_argnums=5, donate_argnums=1)
def catch_up(
  draft: Draft, store: object, history: Leaf, drafted: Leaf, until: Leaf, size: int
) -> Any:
  """Returns the cache of the draft model with the keys that it lacks.

  Launches without the draft model leave these out.

  Args:
    draft: the draft model.
    store: its cache; donated.
    history: int32 [B, M], tokens of each slot.
    drafted: int32 [B], number of tokens that have keys.
    until: int32 [B], number of tokens that are to have keys.
    size: number of tokens of a slot that run at once.
  """
  model = draft.module()

  def body(carry):
    store, drafted = carry
    positions = drafted[:, None] + jnp.arange(size)
    tokens = jnp.take_along_axis(history, positions, axis=1, mode="clip")
    places = _own_places(positions < until[:, None], positions)
    tokens = jnp.maximum(tokens, 0).reshape(-1)
    _, store = rounds_lib.hidden_of(model, None, store, tokens, places)
    return store, jnp.minimum(drafted + size, until)

  with jax.named_scope("catch_up"):
    carry = store, jnp.asarray(drafted)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < until), body, carry)[0]


def _window(slots: Slots) -> tuple[jax.Array, Places]:
  """Returns the tokens [B * 2] that have no keys, and their places."""
  positions = slots.drafted[:, None] + jnp.arange(_WINDOW)
  tokens = jnp.take_along_axis(slots.history, positions, axis=1, mode="clip")
  is_run = slots.active[:, None] & (positions <= slots.position[:, None])
  return jnp.maximum(tokens, 0).reshape(-1), _own_places(is_run, positions)


def _own_places(is_run: jax.Array, positions: jax.Array) -> Places:
  """Returns the places of tokens [B, Q] of the slots; others are not written."""
  batch, width = positions.shape
  numbers = jnp.where(is_run, jnp.arange(batch)[:, None], batch)
  none = jnp.zeros(0, jnp.int32)
  return Places(numbers.reshape(-1), positions.reshape(-1), none, width, 1)
