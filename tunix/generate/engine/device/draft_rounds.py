"""The passes of a draft model in a launch, for speculative decoding.

A draft model is a small model of the same vocabulary. Before a round it draws D tokens
for each slot, one after the other, with the rules and the random key of the token that
each one guesses. The model of the engine then draws its own tokens with the same keys,
see launch.py. As both use the same noise, a draft is right more often than a second,
independent draw would be.

The draft model has its own keys and values, under the page numbers of the engine.
`Slots.drafted` counts the tokens of each slot that have them: all tokens before the
last one, or all but one of these. With an `MTPLayer` it counts fewer in a launch.

An `MTPLayer` also reads the hidden state of the engine's model at the token before. Its
cache is a `Seen`, which has those of the last tokens. The keys of accepted drafts came
from the layer's own hidden states. The next round of the launch computes them again
from the model's; the first round of a launch only those of the last two tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.generate.engine.cache.rows import Places
from tunix.generate.engine.device import rounds as rounds_lib, token_sampling
from tunix.generate.engine.device.state import Blocks, ModelOutput, Slots
from tunix.generate.engine.device.token_sampling import Rules
from tunix.utils import mesh as mesh_lib

Leaf = Any
# The last token, and the one before it if its keys are missing.
_WINDOW = 2
_UNKNOWN = -(2**30)  # `Seen.first` of a slot without hidden states


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
  """The cache of an `MTPLayer`, and the hidden states that it reads next.

  Attributes:
    store: keys and values.
    hidden: float [B, W, D], hidden states of the engine's model at W consecutive tokens
      of each slot; W is 1 plus the number of drafts of a round.
    first: int32 [B], the position of the first of them. The later ones may be of tokens
      that did not count.
  """

  store: Any
  hidden: jax.Array
  first: jax.Array

  def before(self, positions: Int[Array, "B Q"]) -> Float[Array, "B Q D"]:
    """Returns the hidden state before each token; zeros if it is not known."""
    index = positions - 1 - self.first[:, None]
    is_known = (index >= 0) & (index < self.hidden.shape[1])
    index = jnp.where(is_known, index, 0)
    hidden = jnp.take_along_axis(self.hidden, index[..., None], axis=1)
    return jnp.where(is_known[..., None], hidden, 0)

  def missing(self, slots: Slots) -> Int[Array, "B"]:
    """Returns the first position of each slot whose keys are to be computed."""
    return jnp.minimum(jnp.maximum(slots.drafted, self.first + 1), slots.position)

  def next(
    self, is_new: Bool[Array, "B"], hidden: Float[Array, "B Q D"], first: Leaf
  ) -> Seen:
    """Returns the cache with other hidden states, Q <= W, of some slots."""
    width = hidden.shape[1]
    new = self.hidden.at[:, :width].set(hidden.astype(self.hidden.dtype))
    return dataclasses.replace(
      self,
      hidden=jnp.where(is_new[:, None, None], new, self.hidden),
      first=jnp.where(is_new, first, self.first),
    )


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
  draft: Draft, store: Any, slots: Slots, rules: Rules, count: int
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
  first, width = _first_missing(store, slots)
  tokens, places = _window(slots, first, width)
  with jax.named_scope("draft"):
    hidden, store = _run(model, store, tokens, places)
    last = jnp.minimum(slots.position - first, width - 1)
    hidden = hidden.reshape(batch, width, -1)[jnp.arange(batch), last]

    def chosen(hidden, index):
      logits = rounds_lib.logits_of(model, hidden)
      return token_sampling.choose(logits, rules, index)[0].ids

    def step(carry, number):
      store, tokens, hidden = carry
      positions = slots.position + number
      is_run = slots.active & (positions < slots.limit)
      places = _own_places(is_run[:, None], positions[:, None])
      hidden, store = _run(model, store, tokens, places, hidden)
      tokens = chosen(hidden, slots.index + number)
      return (store, tokens, hidden), tokens

    tokens = chosen(hidden, slots.index)
    carry = store, tokens, hidden
    (store, _, _), rest = jax.lax.scan(step, carry, jnp.arange(1, count))
  return store, jnp.concatenate([tokens[:, None], rest.T], axis=1)


def run_along(
  draft: Draft, store: Any, slots: Slots, here: Blocks, ran: ModelOutput
) -> Any:
  """Returns the cache of the draft model after the tokens of a `mixed` round.

  Args:
    draft: the draft model.
    store: its cache.
    slots: the slots before the round.
    here: the blocks of the round.
    ran: what the engine's model computed; its hidden states are read by an `MTPLayer`.
  """
  batch, (count, size) = slots.last.shape[0], here.tokens.shape
  first, width = _first_missing(store, slots)
  tokens, own = _window(slots, first, width)
  offsets = jnp.arange(size)
  is_run = offsets < here.counts[:, None]
  block_slots = jnp.where(is_run, here.slots[:, None], batch)
  places = Places(
    jnp.concatenate([own.slots, block_slots.reshape(-1)]),
    jnp.concatenate([own.positions, (here.starts[:, None] + offsets).reshape(-1)]),
    here.slots,
    width,
    size,
  )
  tokens = jnp.concatenate([tokens, here.tokens.reshape(count * size)])
  model, before = draft.module(), None
  if isinstance(store, Seen):
    assert ran.hidden is not None
    blocks = ran.hidden[batch:].reshape(count, size, -1)
    own_before = store.before(own.positions.reshape(batch, width))
    before = jnp.concatenate(
      [
        own_before.reshape(batch * width, -1),
        _before_blocks(store, here, blocks).reshape(count * size, -1),
      ]
    )
  with jax.named_scope("draft"):
    return _run(model, store, tokens, places, before)[1]


def seen_blocks(store: Any, here: Blocks, ran: ModelOutput) -> Any:
  """Returns the cache with the hidden states of the last tokens of a round's blocks.

  Args:
    store: the cache of the draft model.
    here, ran: see `run_along`.
  """
  if not isinstance(store, Seen):
    return store
  assert ran.hidden is not None
  batch, (count, size) = store.first.shape[0], here.tokens.shape
  blocks = ran.hidden[batch:].reshape(count, size, -1)
  is_last = (here.counts > 0) & ~jnp.any(_follows(here), axis=0)
  at = jnp.where(is_last, here.slots, batch)
  ends = here.starts + here.counts - 1
  return dataclasses.replace(
    store,
    hidden=store.hidden.at[at, 0].set(_last_of(here, blocks), mode="drop"),
    first=store.first.at[at].set(ends, mode="drop"),
  )


def _follows(here: Blocks) -> Bool[Array, "N N"]:
  """True where block n begins after the last token of block m, in the same slot."""
  is_same = here.slots[:, None] == here.slots
  ends = here.starts + here.counts
  return is_same & (here.starts[:, None] == ends) & (here.counts > 0)


def _last_of(here: Blocks, blocks: Float[Array, "N Q D"]) -> Float[Array, "N D"]:
  return blocks[jnp.arange(blocks.shape[0]), jnp.maximum(here.counts - 1, 0)]


def _before_blocks(
  seen: Seen, here: Blocks, blocks: Float[Array, "N Q D"]
) -> Float[Array, "N Q D"]:
  """Returns the hidden state before each token of blocks, from those at the tokens."""
  follows = _follows(here)
  of_block = _last_of(here, blocks)[jnp.argmax(follows, axis=1)]

  def of_block_slot(x):
    return jnp.take(x, here.slots, axis=0, mode="clip")

  own = Seen(None, of_block_slot(seen.hidden), of_block_slot(seen.first))
  of_slot = own.before(here.starts[:, None])[:, 0]
  first = jnp.where(jnp.any(follows, axis=1)[:, None], of_block, of_slot)
  first = jnp.where(here.starts[:, None] == 0, 0, first)
  return jnp.concatenate([first[:, None], blocks[:, :-1]], axis=1)


@functools.partial(jax.jit, static_argnums=5, donate_argnums=1)
def catch_up(
  draft: Draft, store: Any, history: Leaf, drafted: Leaf, until: Leaf, size: int
) -> Any:
  """Returns the cache of the draft model with the keys that it lacks.

  Launches without the draft model leave these out. An `MTPLayer` reads zeros in place
  of the hidden states, which are gone.

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
    _, store = _run(model, store, tokens, places)
    return store, jnp.minimum(drafted + size, until)

  with jax.named_scope("catch_up"):
    carry = store, jnp.asarray(drafted)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < until), body, carry)[0]


@functools.partial(jax.jit, donate_argnums=0)
def forget(seen: Seen, is_new: Leaf) -> Seen:
  """Returns the cache without the hidden states of slots that have new completions."""
  first = jnp.where(is_new, _UNKNOWN, seen.first)
  return dataclasses.replace(seen, first=mesh_lib.constrain(first))


@functools.partial(jax.jit, static_argnums=(0, 1))
def nothing_seen(shape: tuple[int, int, int], dtype: Any) -> tuple[Leaf, Leaf]:
  """Returns `Seen.hidden` [B, W, D] and `Seen.first` before the first launch."""
  made = jnp.zeros(shape, dtype), jnp.full(shape[0], _UNKNOWN, jnp.int32)
  return jax.tree.map(mesh_lib.constrain, made)


def _run(
  model: Any, store: Any, tokens: jax.Array, places: Places, before: Leaf | None = None
) -> tuple[jax.Array, Any]:
  """Returns the hidden states [T, D] of the draft model, and its cache.

  Args:
    model: the draft model.
    store: its cache.
    tokens, places: the tokens of the slots, and of blocks if there are any.
    before: [T, D], hidden state before each token, for an `MTPLayer`; None: those that
      the cache has.
  """
  if not isinstance(store, Seen):
    return rounds_lib.hidden_of(model, None, store, tokens, places)
  if before is None:
    positions = places.positions.reshape(-1, places.width)
    before = store.before(positions).reshape(tokens.shape[0], -1)
  x = model.embed_after(tokens[:, None], before[:, None])
  hidden, kept = rounds_lib.hidden_of(model, None, store.store, tokens, places, x)
  return hidden, dataclasses.replace(store, store=kept)


def _first_missing(store: Any, slots: Slots) -> tuple[Int[Array, "B"], int]:
  """Returns the first token of each slot that a round runs, and their number."""
  if isinstance(store, Seen):
    return store.missing(slots), store.hidden.shape[1]
  return slots.drafted, _WINDOW


def _window(slots: Slots, first: jax.Array, width: int) -> tuple[jax.Array, Places]:
  """Returns the tokens [B * width] of the slots from `first` on, and their places."""
  positions = first[:, None] + jnp.arange(width)
  tokens = jnp.take_along_axis(slots.history, positions, axis=1, mode="clip")
  is_run = slots.active[:, None] & (positions <= slots.position[:, None])
  return jnp.maximum(tokens, 0).reshape(-1), _own_places(is_run, positions)


def _own_places(is_run: jax.Array, positions: jax.Array) -> Places:
  """Returns the places of tokens [B, Q] of the slots; others are not written."""
  batch, width = positions.shape
  numbers = jnp.where(is_run, jnp.arange(batch)[:, None], batch)
  none = jnp.zeros(0, jnp.int32)
  return Places(numbers.reshape(-1), positions.reshape(-1), none, width, 1)
