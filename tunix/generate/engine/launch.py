"""The device loop: rounds of a launch.

In a round every slot that decodes runs its last token and draws the next one. `mixed`
runs rounds that also prefill blocks of prompts; `decode` runs rounds that only decode,
until every slot is done. Both append what they draw to `Out`, which the host reads once
per launch. No shape depends on the load.

While a constrained completion runs, a launch is one round in two programs: `forward`
computes the logits, and `draw` draws with the masks that the host computes meanwhile.

With drafts, a slot runs its last token and D proposed ones at once. Each position draws
its token with the key of that position, as it would without drafts, and the drawn
tokens count up to the first that differs from its draft. Tokens are therefore the same
with and without drafts, for any distribution (compare Leviathan et al. 2023,
arXiv:2211.17192, where they only have the same distribution).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.generate import sampling
from tunix.generate.engine import adapters, choice, drafts
from tunix.generate.engine.choice import Chosen, Rules
from tunix.generate.engine.rows import Places
from tunix.generate.engine.state import Blocks, Out, PromptOut, Round, Slots
from tunix.models import calling
from tunix.utils import mesh as mesh_lib

Leaf = Any
# State of the adapters, and int32 [B], the number of each slot's adapter.
Bank = tuple[adapters.BankState, Leaf]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def mixed(
  graph: Any,
  state: Any,
  carry: Round,
  rules: Rules,
  bank: Bank | None,
  blocks: Blocks,
  rounds: Leaf,
) -> tuple[Round, PromptOut]:
  """Runs `rounds` rounds, each with the blocks of its number.

  Args:
    graph, state: the module, from `decode.opened`.
    carry: slots, cache and results; donated.
    rules: choice of the tokens.
    bank: the loaded adapters, and the number of each slot's; None: there are none.
    blocks: the blocks.
    rounds: int32 scalar, at most R.
  """
  tops = carry.out.top_ids.shape[2]
  shape = blocks.tokens.shape[0], blocks.tokens.shape[1] * blocks.tokens.shape[2]
  scores = _no_scores(shape, tops)

  def body(loop):
    number, carry, scores = loop
    slots, store, out = carry
    here = _round_of(blocks, number)
    model = nnx.merge(graph, state)
    store, logits, one = _forward(model, bank, slots, store, here, rules, tops)
    slots, out = _draw(slots, out, rules, logits, here, None)
    scores = jax.tree.map(lambda x, y: x.at[number].set(y), scores, one)
    return number + 1, Round(slots, store, out), scores

  with jax.named_scope("mixed"):
    _, carry, scores = jax.lax.while_loop(
      lambda loop: loop[0] < rounds, body, (jnp.zeros((), jnp.int32), carry, scores)
    )
  return _replicated(carry), jax.tree.map(mesh_lib.constrain, scores)


@functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=3)
def forward(
  graph: Any,
  state: Any,
  slots: Slots,
  store: Any,
  rules: Rules,
  bank: Bank | None,
  blocks: Blocks,
  tops: int,
) -> tuple[Any, jax.Array, PromptOut]:
  """Runs the first half of one round: everything that no constraint can change.

  The host computes the masks of constraints while this program runs, and then calls
  `draw`.

  Args:
    graph, state, rules, bank: see `mixed`.
    slots: the slots.
    store: the cache; donated.
    blocks: the blocks; those of the first round are run. There may be none (N = 0).
    tops: number of most likely tokens of scored prompts.

  Returns:
    The cache, the logits [B, V] of each slot, and the scores [1, N * Q] of prompts.
  """
  model = nnx.merge(graph, state)
  with jax.named_scope("forward"):
    here = _round_of(blocks, 0)
    store, logits, one = _forward(model, bank, slots, store, here, rules, tops)
  scores = jax.tree.map(lambda x: mesh_lib.constrain(x[None]), one)
  return store, logits, scores


@functools.partial(jax.jit, donate_argnums=1)
def draw(
  slots: Slots,
  out: Out,
  rules: Rules,
  logits: jax.Array,
  blocks: Blocks,
  allowed: Leaf,
) -> tuple[Slots, Out]:
  """Runs the second half of one round: draws the tokens.

  Args:
    slots, blocks: those of `forward`.
    out: the results; donated.
    rules: choice of the tokens.
    logits: float32 [B, V], from `forward`.
    allowed: see `choice.choose`.
  """
  with jax.named_scope("draw"):
    carry = _draw(slots, out, rules, logits, _round_of(blocks, 0), allowed)
  return jax.tree.map(mesh_lib.constrain, carry)


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def decode(
  graph: Any,
  state: Any,
  carry: Round,
  rules: Rules,
  bank: Bank | None,
  until: Leaf,
  draft_tokens: int = 0,
) -> Round:
  """Runs rounds until every slot is done.

  Args:
    graph, state, rules, bank: see `mixed`.
    carry: slots, cache and results; donated.
    until: int32 [2]: number of rounds of the launch, and number of slots that are free
      or done at which the host wants to look.
    draft_tokens: number D of drafts of each slot in a round.
  """
  batch, width = carry.slots.last.shape[0], 1 + draft_tokens

  def body(carry):
    slots, store, out = carry
    before = out
    proposed = drafts.propose(slots.history, slots.position, draft_tokens)
    tokens = jnp.concatenate([slots.last[:, None], proposed], axis=1)
    positions = slots.position[:, None] + jnp.arange(width)
    # A draft behind the last token of a completion has no place in its pages.
    is_inside = positions < slots.limit[:, None]
    is_run = slots.active[:, None] & (tokens >= 0) & is_inside
    numbers = jnp.where(is_run, jnp.arange(batch)[:, None], batch)
    places = Places(
      numbers.reshape(-1), positions.reshape(-1), jnp.zeros(0, jnp.int32), width, 1
    )
    model = nnx.merge(graph, state)
    hidden, store = _run(model, bank, store, jnp.maximum(tokens, 0).reshape(-1), places)
    # Every position draws its token at once; which of them count is seen afterwards.
    index = slots.index[:, None] + jnp.arange(width)
    chosen = choice.choose(
      _logits(model, hidden),
      choice.repeated(rules, width),
      index.reshape(-1),
      tops=out.top_ids.shape[2],
    )
    counts = started = slots.active
    for i in range(width):
      if i:
        offered = slots.active & counts & is_run[:, i]
        out = dataclasses.replace(out, proposed=out.proposed + jnp.sum(offered))
        # The draft that was run here must be what the position before it drew.
        counts = counts & slots.active & (tokens[:, i] == slots.last)
        out = dataclasses.replace(out, accepted=out.accepted + jnp.sum(counts))
      here = Chosen(*(x.reshape(batch, width, *x.shape[1:])[:, i] for x in chosen))
      drawing = dataclasses.replace(slots, active=counts)
      drawing, out = _emit(drawing, out, here)
      over = counts & ~drawing.active
      slots = dataclasses.replace(drawing, active=slots.active & ~over)
    if not draft_tokens and slots.history.shape[1]:
      out = _watched(carry.slots, out, chosen.tokens)
    out = dataclasses.replace(
      out,
      rounds=out.rounds + 1,
      turns=out.turns + jnp.sum(started),
      decoded=out.decoded + jnp.sum(out.count - before.count),
    )
    return Round(slots, store, out)

  def continues(carry):
    idle = jnp.sum(~carry.slots.active)
    return (
      (carry.out.rounds < until[0]) & (idle < until[1]) & jnp.any(carry.slots.active)
    )

  with jax.named_scope("decode"):
    return _replicated(jax.lax.while_loop(continues, body, carry))


def _round_of(blocks: Blocks, number: Leaf) -> Blocks:
  """Returns the blocks of one round, without the axis R."""
  return jax.tree.map(lambda x: jnp.asarray(x)[number] if x.ndim else x, blocks)


def _forward(
  model: Any,
  bank: Bank | None,
  slots: Slots,
  store: Any,
  here: Blocks,
  rules: Rules,
  tops: int,
) -> tuple[Any, jax.Array, PromptOut]:
  """Returns the store, the logits [B, V] of each slot, and the scores of prompts."""
  batch, offsets = slots.last.shape[0], jnp.arange(here.tokens.shape[1])
  is_run = offsets < here.counts[:, None]
  block_slots = jnp.where(is_run, here.slots[:, None], batch)
  own_slots = jnp.where(slots.active, jnp.arange(batch), batch)
  block_positions = here.starts[:, None] + offsets
  places = Places(
    jnp.concatenate([own_slots, block_slots.reshape(-1)]),
    jnp.concatenate([slots.position, block_positions.reshape(-1)]),
    here.slots,
    1,
    here.tokens.shape[1],
  )
  tokens = jnp.concatenate([slots.last, here.tokens.reshape(-1)])
  hidden, store = _run(model, bank, store, tokens, places)
  own = jnp.arange(batch)
  logits = _logits(model, hidden[jnp.where(here.draws >= 0, batch + here.draws, own)])
  targets = here.targets.reshape(-1)
  scores = _no_scores(targets.shape, tops)
  if "prompts" in rules.uses and targets.size:
    scores = jax.lax.cond(
      here.scores,
      lambda: _prompt_scores(model, hidden[batch:], targets, tops),
      lambda: scores,
    )
  return store, logits, scores


def _draw(
  slots: Slots,
  out: Out,
  rules: Rules,
  logits: jax.Array,
  here: Blocks,
  allowed: Leaf | None,
) -> tuple[Slots, Out]:
  """Draws the token of each slot that decodes, or whose prompt the round has ended."""
  chosen = choice.choose(logits, rules, slots.index, allowed, out.top_ids.shape[2])
  first = here.draws >= 0
  slots = dataclasses.replace(
    slots,
    active=slots.active | first,
    position=jnp.where(first, here.ends - 1, slots.position),
  )
  slots, out = _emit(slots, out, chosen)
  slots = dataclasses.replace(slots, active=slots.active & ~slots.holds)
  return slots, dataclasses.replace(out, rounds=out.rounds + 1)


def _no_scores(shape: tuple[int, ...], tops: int) -> PromptOut:
  return PromptOut(
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, tops), jnp.int32),
    jnp.zeros((*shape, tops), jnp.float32),
  )


def _run(
  model: Any, bank: Bank | None, store: Any, tokens: jax.Array, places: Places
) -> tuple[jax.Array, Any]:
  """Returns the hidden states [T, D] of a round, and the store with its keys."""
  if bank is not None:
    state, numbers = bank
    # Tokens that no slot owns have the number behind the last slot.
    model = adapters.with_bank(model, state, jnp.append(numbers, 0)[places.slots])
  hidden, cache = model(
    tokens[:, None], places.positions[:, None], store.at(places), return_hidden=True
  )
  return hidden[:, 0], store.after(cache)


def _logits(model: Any, hidden: jax.Array) -> jax.Array:
  """Returns float32 logits [B, V] of hidden states [B, D]."""
  return calling.adapt(model).unembed(hidden[:, None])[:, 0].astype(jnp.float32)


def _emit(slots: Slots, out: Out, chosen: Chosen) -> tuple[Slots, Out]:
  """Appends the chosen tokens of the active slots, and ends the slots that are done."""
  bad = slots.active & ~chosen.is_finite
  draws = slots.active & chosen.is_finite
  rows = jnp.arange(draws.shape[0])
  place = jnp.where(draws, out.count, out.tokens.shape[1])
  write = lambda buffer, new: buffer.at[rows, place].set(new, mode="drop")
  position = slots.position + 1
  stops = draws & jnp.any(chosen.tokens[:, None] == slots.stop_ids, axis=1)
  out = dataclasses.replace(
    out,
    count=out.count + draws,
    tokens=write(out.tokens, chosen.tokens),
    logps=write(out.logps, chosen.logps),
    sampling_logps=write(out.sampling_logps, chosen.sampling_logps),
    top_ids=write(out.top_ids, chosen.top_ids),
    top_logps=write(out.top_logps, chosen.top_logps),
    stopped=out.stopped | stops,
    bad=out.bad | bad,
  )
  history = slots.history
  if history.shape[1]:
    at = jnp.where(draws, position, history.shape[1])
    history = history.at[rows, at].set(chosen.tokens, mode="drop")
  pick = lambda new, old: jnp.where(draws, new, old)
  slots = dataclasses.replace(
    slots,
    last=pick(chosen.tokens, slots.last),
    position=pick(position, slots.position),
    index=slots.index + draws,
    active=draws & ~stops & (position + 1 < slots.limit),
    history=history,
  )
  return slots, out


def _watched(slots: Slots, out: Out, tokens: jax.Array) -> Out:
  """Compares the drawn tokens with first drafts, in every eighth round."""

  def watch():
    guess = drafts.propose(slots.history, slots.position, 1)[:, 0]
    return jnp.sum(slots.active), jnp.sum(slots.active & (guess == tokens))

  none = jnp.zeros((), jnp.int32)
  seen, right = jax.lax.cond(out.rounds % 8 == 0, watch, lambda: (none, none))
  return dataclasses.replace(
    out, watched=out.watched + seen, predicted=out.predicted + right
  )


def _prompt_scores(
  model: Any, hidden: jax.Array, targets: jax.Array, tops: int
) -> PromptOut:
  logits = _logits(model, hidden)
  return PromptOut(
    sampling.token_logps(logits, targets), *choice.most_likely(logits, tops)
  )


def _replicated(carry: Round) -> Round:
  """Replicates what the host reads, because every process reads all of it."""
  small = jax.tree.map(mesh_lib.constrain, (carry.slots, carry.out))
  return Round(small[0], carry.store, small[1])
