"""The parts of a round: the model's pass, the draw, and the results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.generate.engine.cache.rows import Places
from tunix.generate.engine.device import adapters, prompt_lookup, token_sampling
from tunix.generate.engine.device.state import (
  Blocks,
  LaunchOutput,
  ModelOutput,
  PromptOut,
  Slots,
  Vectors,
)
from tunix.generate.engine.device.token_sampling import DrawnTokens, Rules
from tunix.models import calling
from tunix.models.transformer.experts import route_records

Leaf = Any
# State of the adapters, and int32 [B], the number of each slot's adapter.
Bank = tuple[adapters.BankState, Leaf]


def round_of(blocks: Blocks, number: Leaf) -> Blocks:
  """Returns the blocks of one round, without the axis R."""

  def pick(x):
    return jnp.asarray(x)[number] if x.ndim else x

  one = jax.tree.map(pick, dataclasses.replace(blocks, vectors=None))
  if (vectors := blocks.vectors) is not None:
    by_token = jax.tree.map(pick, vectors._replace(table=None))
    one = dataclasses.replace(one, vectors=by_token._replace(table=vectors.table))
  return one


def run_model(
  model: nnx.Module,
  bank: Bank | None,
  slots: Slots,
  store: Any,
  here: Blocks,
  rules: Rules,
  tops: int,
  *,
  keeps_hidden: bool = False,
) -> tuple[Any, ModelOutput, PromptOut]:
  """Returns the store, what each slot draws from, and the scores of prompts.

  Args:
    model, bank, slots, store, here, rules, tops: see `launch.mixed`.
    keeps_hidden: the output has the hidden states.
  """
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
    None if here.vectors is None else here.vectors.last,
    model.config.grouped_layers == "sliding",
  )
  tokens = jnp.concatenate([slots.last, here.tokens.reshape(-1)])
  hidden, store, routes = run_tokens(
    *(model, bank, store, tokens, places),
    records="routes" in rules.uses,
    vectors=here.vectors,
    shift=slots.shift,
  )
  first, own = here.draws >= 0, jnp.arange(batch)
  picked = jnp.where(first, batch + here.draws, own)
  # A follower draws after its leader's token, and goes on from its leader's state.
  store = store.forked(jnp.where(first, places.slots[picked], own))
  ran = ModelOutput(
    logits_of(model, hidden[picked]), None if routes is None else routes[picked]
  )
  if keeps_hidden:
    ran = ran._replace(hidden=hidden, drawn_from=hidden[picked])
  targets = here.targets.reshape(-1)
  scores = no_scores(targets.shape, tops)
  if "prompts" in rules.uses and targets.size:
    scores = jax.lax.cond(
      here.scores,
      lambda: _prompt_scores(model, hidden[batch:], targets, tops, rules),
      lambda: scores,
    )
  if routes is not None:
    scores = scores._replace(routes=routes[batch:])
  return store, ran, scores


def draw(
  slots: Slots,
  out: LaunchOutput,
  rules: Rules,
  ran: ModelOutput,
  here: Blocks,
  allowed: Leaf | None,
) -> tuple[Slots, LaunchOutput]:
  """Draws the token of each slot that decodes, or whose prompt the round has ended."""
  chosen, is_finite = token_sampling.choose(
    ran.logits, rules, slots.index, allowed, *out.chosen.sizes
  )
  first = here.draws >= 0
  slots = dataclasses.replace(
    slots,
    active=slots.active | first,
    position=jnp.where(first, here.ends - 1, slots.position),
  )
  slots, out = emit(slots, out, chosen._replace(routes=ran.routes), is_finite)
  slots = dataclasses.replace(slots, active=slots.active & ~slots.is_waiting)
  return slots, dataclasses.replace(out, rounds=out.rounds + 1)


def no_scores(
  shape: tuple[int, ...], tops: int, routes: jax.Array | None = None
) -> PromptOut:
  """Returns an empty `PromptOut`; with routes of the form of `routes`, if any."""
  return PromptOut(
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, tops), jnp.int32),
    jnp.zeros((*shape, tops), jnp.float32),
    None if routes is None else jnp.zeros((*shape, *routes.shape[2:]), routes.dtype),
  )


def hidden_of(
  model: nnx.Module,
  bank: Bank | None,
  store: Any,
  tokens: jax.Array,
  places: Places,
  embeddings: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
  """Returns the hidden states [T, D] of a round, and the store with its keys.

  `embeddings` [T, 1, D] replace those of the tokens.
  """
  out = run_tokens(
    model, bank, store, tokens, places, records=False, embeddings=embeddings
  )
  return out[:2]


def run_tokens(
  model: Any,
  bank: Bank | None,
  store: Any,
  tokens: jax.Array,
  places: Places,
  *,
  records: bool,
  vectors: Vectors | None = None,
  shift: jax.Array | None = None,
  embeddings: jax.Array | None = None,
) -> tuple[jax.Array, Any, jax.Array | None]:
  """Returns `hidden_of`, and the routes [T, M, k] of the tokens, or None.

  Args:
    model, bank, store, tokens, places: see `hidden_of`.
    records: return the routes.
    vectors: vectors that replace the embeddings of the last tokens, those of blocks.
    shift: what is added to the rotary positions of the first tokens; None: nothing.
    embeddings: see `hidden_of`.
  """
  if bank is not None:
    state, numbers = bank
    # Tokens that no slot owns have the number behind the last slot.
    model = adapters.with_bank(model, state, jnp.append(numbers, 0)[places.slots])
  options = {} if embeddings is None else {"input_embeddings": embeddings}
  if vectors is not None:
    options = _image_options(model, tokens, vectors)
  positions = places.positions
  if shift is not None:
    positions += jnp.pad(shift, (0, len(positions) - len(shift)))

  def run():
    return model(
      tokens[:, None],
      positions[:, None],
      store.at(places),
      return_hidden=True,
      **options,
    )

  if records:
    (hidden, cache), routes = route_records.recorded(model, run)
    return hidden[:, 0], store.after(cache), routes[:, 0]
  hidden, cache = run()
  return hidden[:, 0], store.after(cache), None


def _image_options(
  model: Any, tokens: jax.Array, vectors: Vectors
) -> dict[str, jax.Array]:
  """Returns the arguments of the model that come from images; see `Vectors`."""
  index = vectors.index.reshape(-1)
  others = tokens.shape[0] - index.shape[0]
  index = jnp.pad(index, (others, 0), constant_values=-1)
  is_image = index >= 0
  # The id of a soft token may exceed the vocabulary.
  x = model.embed(jnp.where(is_image, 0, tokens)[:, None])
  taken = vectors.table[jnp.maximum(index, 0)].astype(x.dtype)
  first, *deeper = jnp.split(taken[:, None], taken.shape[1] // x.shape[2], axis=2)
  is_image = is_image[:, None, None]
  options = {"input_embeddings": jnp.where(is_image, first, x)}
  if deeper:
    options["deepstack"] = jnp.where(is_image, jnp.stack(deeper), 0)
  if (rope := vectors.rope) is not None:
    rope = jnp.pad(rope.reshape(-1, rope.shape[-1]), ((others, 0), (0, 0)))
    options["rope_offsets"] = rope[:, None]
  return options


def logits_of(model: Any, hidden: jax.Array) -> jax.Array:
  """Returns float32 logits [B, V] of hidden states [B, D]."""
  return calling.adapt(model).unembed(hidden[:, None])[:, 0].astype(jnp.float32)


def emit(
  slots: Slots, out: LaunchOutput, chosen: DrawnTokens, is_finite: jax.Array
) -> tuple[Slots, LaunchOutput]:
  """Appends the chosen tokens of the active slots, and ends the slots that are done.

  Args:
    slots, out: the slots and the results.
    chosen: the tokens.
    is_finite: see `token_sampling.choose`.
  """
  bad = slots.active & ~is_finite
  draws = slots.active & is_finite
  rows = jnp.arange(draws.shape[0])
  place = jnp.where(draws, out.count, out.chosen.ids.shape[1])

  def write(buffer, new):
    return buffer.at[rows, place].set(new, mode="drop")

  position = slots.position + 1
  stops = draws & jnp.any(chosen.ids[:, None] == slots.stop_ids, axis=1)
  out = dataclasses.replace(
    out,
    count=out.count + draws,
    chosen=jax.tree.map(write, out.chosen, chosen),
    stopped=out.stopped | stops,
    is_not_finite=out.is_not_finite | bad,
  )
  history = slots.history
  if history.shape[1]:
    at = jnp.where(draws, position, history.shape[1])
    history = history.at[rows, at].set(chosen.ids, mode="drop")

  def pick(new, old):
    return jnp.where(draws, new, old)

  slots = dataclasses.replace(
    slots,
    last=pick(chosen.ids, slots.last),
    position=pick(position, slots.position),
    index=slots.index + draws,
    active=draws & ~stops & (position + 1 < slots.limit),
    history=history,
  )
  return slots, out


def watched(slots: Slots, out: LaunchOutput, tokens: jax.Array) -> LaunchOutput:
  """Compares the drawn tokens with first drafts, in every eighth round."""

  def watch():
    guess = prompt_lookup.propose(slots.history, slots.position, 1)[:, 0]
    return jnp.sum(slots.active), jnp.sum(slots.active & (guess == tokens))

  none = jnp.zeros((), jnp.int32)
  seen, right = jax.lax.cond(out.rounds % 8 == 0, watch, lambda: (none, none))
  return dataclasses.replace(
    out, watched=out.watched + seen, predicted=out.predicted + right
  )


def _prompt_scores(
  model: nnx.Module, hidden: jax.Array, targets: jax.Array, tops: int, rules: Rules
) -> PromptOut:
  logits = logits_of(model, hidden)
  return PromptOut(
    token_sampling.logps_of(rules)(logits, targets),
    *token_sampling.most_likely(logits, tops),
  )
