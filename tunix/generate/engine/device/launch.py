"""The device loop: rounds of a launch.

In a round every slot that decodes runs its last token and draws the next one. `mixed`
runs rounds that also prefill blocks of prompts; `decode` runs rounds that only decode,
until every slot is done. Both append the drawn tokens to `LaunchOutput`, which the host
reads once per launch. No shape depends on the load.

While a constrained completion runs, a launch is one round in two programs: `forward`
computes the logits, and `draw` draws with the masks that the host computes meanwhile.

With drafts (speculative decoding), a slot runs its last token and D proposed ones at
once. Each position draws its token with the key of that position, as it would without
drafts, and the drawn tokens count up to the first that differs from its draft. Tokens
are therefore the same with and without drafts, for any distribution (compare Leviathan
et al. 2023, arXiv:2211.17192, where they only have the same distribution). Drafts come
from the history of the slot (prompt_lookup.py) or from a draft model (draft_rounds.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.generate.engine.cache.rows import Places
from tunix.generate.engine.device import (
  draft_rounds,
  prompt_lookup,
  rounds as rounds_lib,
  token_sampling,
)
from tunix.generate.engine.device.draft_rounds import Draft, Seen
from tunix.generate.engine.device.rounds import Bank
from tunix.generate.engine.device.state import (
  Blocks,
  LaunchOutput,
  ModelOutput,
  PromptOut,
  Round,
  Slots,
)
from tunix.generate.engine.device.token_sampling import DrawnTokens, Rules
from tunix.utils import mesh as mesh_lib

Leaf = Any


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def mixed(
  graph: nnx.GraphDef[Any],
  state: nnx.State,
  carry: Round,
  rules: Rules,
  bank: Bank | None,
  blocks: Blocks,
  rounds: Leaf,
  draft: Draft | None = None,
) -> tuple[Round, PromptOut]:
  """Runs `rounds` rounds, each with the blocks of its number.

  Args:
    graph, state: the module, from `decode.opened`.
    carry: slots, cache and results; donated.
    rules: choice of the tokens.
    bank: the loaded adapters, and the number of each slot's; None: there are none.
    blocks: the blocks.
    rounds: int32 scalar, at most R.
    draft: the draft model, which computes its keys of the same tokens; None: none runs.
  """
  tops = carry.out.chosen.top_ids.shape[2]
  shape = blocks.tokens.shape[0], blocks.tokens.shape[1] * blocks.tokens.shape[2]
  scores = rounds_lib.no_scores(shape, tops, carry.out.chosen.routes)

  def body(loop):
    number, carry, scores = loop
    slots, store, out, draft_store = carry
    here = rounds_lib.round_of(blocks, number)
    model = nnx.merge(graph, state)
    reads_hidden = isinstance(draft_store, Seen)
    store, ran, one = rounds_lib.run_model(
      model, bank, slots, store, here, rules, tops, keeps_hidden=reads_hidden
    )
    if draft is not None:
      draft_store = draft_rounds.run_along(draft, draft_store, slots, here, ran)
    has_drawn = slots.active | (here.draws >= 0)
    slots, out = rounds_lib.draw(slots, out, rules, ran, here, None)
    if draft is not None:
      drafted = jnp.where(has_drawn, slots.position, slots.drafted)
      slots = dataclasses.replace(slots, drafted=drafted)
    if isinstance(draft_store, Seen):
      assert ran.drawn_from is not None
      draft_store = draft_rounds.seen_blocks(draft_store, here, ran)
      draft_store = draft_store.next(
        has_drawn, ran.drawn_from[:, None], slots.position - 1
      )
    scores = jax.tree.map(lambda x, y: x.at[number].set(y), scores, one)
    return number + 1, Round(slots, store, out, draft_store), scores

  with jax.named_scope("mixed"):
    _, carry, scores = jax.lax.while_loop(
      lambda loop: loop[0] < rounds, body, (jnp.zeros((), jnp.int32), carry, scores)
    )
  return _replicated(carry), jax.tree.map(mesh_lib.constrain, scores)


@functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=3)
def forward(
  graph: nnx.GraphDef[Any],
  state: nnx.State,
  slots: Slots,
  store: object,
  rules: Rules,
  bank: Bank | None,
  blocks: Blocks,
  tops: int,
) -> tuple[Any, ModelOutput, PromptOut]:
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
    The cache, what each slot draws from, and the scores [1, N * Q] of prompts.
  """
  model = nnx.merge(graph, state)
  with jax.named_scope("forward"):
    here = rounds_lib.round_of(blocks, 0)
    store, ran, one = rounds_lib.run_model(model, bank, slots, store, here, rules, tops)
  scores = jax.tree.map(lambda x: mesh_lib.constrain(x[None]), one)
  return store, ran, scores


@functools.partial(jax.jit, donate_argnums=1)
def draw(
  slots: Slots,
  out: LaunchOutput,
  rules: Rules,
  ran: ModelOutput,
  blocks: Blocks,
  allowed: Leaf,
) -> tuple[Slots, LaunchOutput]:
  """Runs the second half of one round: draws the tokens.

  Args:
    slots, blocks: those of `forward`.
    out: the results; donated.
    rules: choice of the tokens.
    ran: from `forward`.
    allowed: see `token_sampling.choose`.
  """
  with jax.named_scope("draw"):
    carry = rounds_lib.draw(
      slots, out, rules, ran, rounds_lib.round_of(blocks, 0), allowed
    )
  return jax.tree.map(mesh_lib.constrain, carry)


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def decode(
  graph: nnx.GraphDef[Any],
  state: nnx.State,
  carry: Round,
  rules: Rules,
  bank: Bank | None,
  until: Leaf,
  draft_tokens: int = 0,
  draft: Draft | None = None,
) -> Round:
  """Runs rounds until every slot is done.

  Args:
    graph, state, rules, bank: see `mixed`.
    carry: slots, cache and results; donated.
    until: int32 [2]: number of rounds of the launch, and number of slots that are free
      or done at which the host wants to look.
    draft_tokens: number D of drafts of each slot in a round.
    draft: the draft model, if it makes the drafts; None: prompt lookup.
  """

  def body(carry):
    slots, store, out, draft_store = carry
    if draft is not None:
      draft_store, proposed = draft_rounds.propose(
        draft, draft_store, slots, rules, draft_tokens
      )
    else:
      proposed = prompt_lookup.propose(slots.history, slots.position, draft_tokens)
    tokens = jnp.concatenate([slots.last[:, None], proposed], axis=1)
    model = nnx.merge(graph, state)
    store, hidden, chosen, flags = _run_drafts(model, bank, carry, rules, tokens)
    started, before = slots, out
    slots, out = _emit_right_ones(slots, out, tokens, chosen, *flags)
    counts = jnp.where(started.active, slots.position - started.position, 0)
    store = store.settled(model, counts)
    if isinstance(draft_store, Seen):
      # The keys of accepted drafts came from the draft model's own hidden states.
      slots = dataclasses.replace(slots, drafted=started.position + 1)
      draft_store = draft_store.next(started.active, hidden, started.position)
    elif draft is not None:  # keys of tokens that were drawn, not of wrong drafts
      drafted = jnp.minimum(started.position + draft_tokens, slots.position)
      slots = dataclasses.replace(slots, drafted=drafted)
    elif not draft_tokens and slots.history.shape[1]:
      out = rounds_lib.watched(started, out, chosen.ids[:, 0])
    out = dataclasses.replace(
      out,
      rounds=out.rounds + 1,
      turns=out.turns + jnp.sum(started.active),
      decoded=out.decoded + jnp.sum(out.count - before.count),
    )
    return Round(slots, store, out, draft_store)

  def continues(carry):
    idle = jnp.sum(~carry.slots.active)
    return (
      (carry.out.rounds < until[0]) & (idle < until[1]) & jnp.any(carry.slots.active)
    )

  with jax.named_scope("decode"):
    return _replicated(jax.lax.while_loop(continues, body, carry))


def _run_drafts(
  model: nnx.Module, bank: Bank | None, carry: Round, rules: Rules, tokens: jax.Array
) -> tuple[Any, jax.Array, DrawnTokens, tuple[jax.Array, jax.Array]]:
  """Runs the last token and the drafts of each slot, and draws the token after each.

  Args:
    model, bank, rules: see `decode`.
    carry: slots, cache and results.
    tokens: int32 [B, 1 + D], the last token and the drafts of each slot.

  Returns:
    The cache, the hidden states [B, 1 + D, *], the drawn tokens [B, 1 + D], and two
    bool [B, 1 + D]: `is_finite` of `token_sampling.choose`, and True for tokens that
    were run.
  """
  slots, (batch, width) = carry.slots, tokens.shape
  positions = slots.position[:, None] + jnp.arange(width)
  # A draft behind the last token of a completion has no place in its pages.
  is_inside = positions < slots.limit[:, None]
  is_run = slots.active[:, None] & (tokens >= 0) & is_inside
  numbers = jnp.where(is_run, jnp.arange(batch)[:, None], batch)
  places = Places(
    numbers.reshape(-1), positions.reshape(-1), jnp.zeros(0, jnp.int32), width, 1
  )
  hidden, store, routes = rounds_lib.run_tokens(
    *(model, bank, carry.store, jnp.maximum(tokens, 0).reshape(-1), places),
    records="routes" in rules.uses,
    shift=None if slots.shift is None else jnp.repeat(slots.shift, width),
  )
  # Every position draws its token at once; which of them count is seen afterwards.
  index = slots.index[:, None] + jnp.arange(width)
  chosen, is_finite = token_sampling.choose(
    rounds_lib.logits_of(model, hidden),
    token_sampling.repeated(rules, width),
    index.reshape(-1),
    None,
    *carry.out.chosen.sizes,
  )

  def by_slot(x):
    return x.reshape(batch, width, *x.shape[1:])

  chosen = jax.tree.map(by_slot, chosen._replace(routes=routes))
  return store, by_slot(hidden), chosen, (by_slot(is_finite), is_run)


def _emit_right_ones(
  slots: Slots,
  out: LaunchOutput,
  tokens: jax.Array,
  chosen: DrawnTokens,
  is_finite: jax.Array,
  is_run: jax.Array,
) -> tuple[Slots, LaunchOutput]:
  """Appends the drawn tokens up to the first that differs from its draft.

  Args:
    slots, out: those before the round.
    tokens, chosen, is_finite, is_run: see `_run_drafts`.
  """
  counts = slots.active
  for i in range(tokens.shape[1]):
    if i:
      offered = slots.active & counts & is_run[:, i]
      out = dataclasses.replace(out, proposed=out.proposed + jnp.sum(offered))
      # The draft that was run here must be what the position before it drew.
      counts = counts & slots.active & (tokens[:, i] == slots.last)
      out = dataclasses.replace(out, accepted=out.accepted + jnp.sum(counts))
    drawing = dataclasses.replace(slots, active=counts)
    one = jax.tree.map(lambda x, i=i: x[:, i], (chosen, is_finite))
    drawing, out = rounds_lib.emit(drawing, out, *one)
    over = counts & ~drawing.active
    slots = dataclasses.replace(drawing, active=slots.active & ~over)
  return slots, out


def _replicated(carry: Round) -> Round:
  """Replicates what the host reads, because every process reads all of it."""
  small = jax.tree.map(mesh_lib.constrain, (carry.slots, carry.out))
  draft_store = carry.draft_store
  if isinstance(draft_store, Seen):  # placed as before the first launch
    draft_store = dataclasses.replace(
      draft_store,
      hidden=mesh_lib.constrain(draft_store.hidden),
      first=mesh_lib.constrain(draft_store.first),
    )
  return Round(small[0], carry.store, small[1], draft_store)
