"""Prefill, one decode step, and the token loop: pure functions over a split module.

A request runs as two programs, and `opened` before them. `start` runs the prompts and
takes each row's first token, `advance` goes on until every row is done or a number of
steps is reached; a caller may look at the rows in between. A scheduler that owns the
decode slots needs `prefill`, `step` and `memory.admit` only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.generate import (
  layout as layout_lib,
  memory as memory_lib,
  recompute,
  sampling,
)
from tunix.generate.layout import Layout
from tunix.generate.memory import Memory
from tunix.generate.sampling import Draw, Leaf
from tunix.models import calling
from tunix.ops import masks
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What programs are compiled for, besides the shapes of their rows.

  Attributes:
    slots: S, prompt and generated tokens together.
    columns: N, room for generated tokens.
    copies: rows of each prompt, one after the other, where `Prompts.source` does not
      say.
    return_logits: keep [B, N, V] logits.
    return_logps: compute the chosen tokens' log-probabilities.
  """

  slots: int
  columns: int
  copies: int = 1
  return_logits: bool = False
  return_logps: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """What `start` reads.

  Attributes:
    tokens: int32 [P, W], padded on the left.
    mask: bool [P, W], True on the prompt's tokens.
    source: int32 [B], the prompt of each row; None: `Plan.copies` rows a prompt.
    shift: int32 scalar, slots that every prompt leaves free in front and that are
      needed at the end; None: there are enough.
  """

  tokens: Leaf
  mask: Leaf
  source: Leaf | None = None
  shift: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How tokens are chosen, and when a row ends.

  Attributes:
    limits: int32 [B], most tokens to generate, 0 for rows that only fill the batch.
    eos: int32 [E], ids that end a row; filled up (`batching.id_list`).
    draw: the choice.
  """

  limits: Leaf
  eos: Leaf
  draw: Draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """What the loop has written so far; on the host once fetched.

  Attributes:
    tokens: int32 [B, N]; columns from `lengths` on mean nothing.
    lengths: int32 [B], tokens generated, the end-of-sequence token included.
    stopped: bool [B], whether an end-of-sequence token came.
    done: bool [B], stopped or at the row's limit.
    steps: int32 scalar, columns written.
    logps: float32 [B, N] or None; under the model's own distribution.
    sampling_logps: float32 [B, N] or None; under the distribution drawn from.
    logits: float32 [B, N, V] or None.
  """

  tokens: jax.Array
  lengths: jax.Array
  stopped: jax.Array
  done: jax.Array
  steps: jax.Array
  logps: jax.Array | None
  sampling_logps: jax.Array | None
  logits: jax.Array | None


class Opened(NamedTuple):
  """A module split for decoding."""

  graph: Any
  state: Any


def opened(graph: Any, state: Any, layout: Layout | None = None) -> Opened:
  """The split of a module with one module a layer, made once a request: slices of a
  stack would be taken in every step. Leaves that stay as they are are not copied.

  Args:
    graph, state: of the module.
    layout: where weights are to lie, see `layout.for_decoding`.
  """
  structure, places, changed = programs.call("unstack", _open, graph, layout, state)
  stored = jax.tree.leaves(state)
  fresh = iter(changed)
  leaves = [next(fresh) if i is None else stored[i] for i in places.value]
  return Opened(*structure.value.unflatten(leaves))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """A value that a program returns from its tracing."""

  value: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def _open(graph, layout, state):
  arrays = state if layout is None else _laid_out(state, layout)
  model = nnx.merge(graph, arrays)
  if layout is not None and layout.step:
    layout_lib.split_products(model, layout.step)
  model.eval()  # whatever its owner is at: no dropout in what is sampled
  if hasattr(model, "unstack"):
    model = model.unstack()
  numbers = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(state))}
  leaves, structure = jax.tree.flatten(tuple(nnx.split(model)))
  places = tuple(numbers.get(id(leaf)) for leaf in leaves)
  changed = [leaf for leaf, place in zip(leaves, places) if place is None]
  return _Static(structure), _Static(places), changed


def _laid_out(state, layout):
  leaves, structure = jax.tree.flatten(state)
  pin = jax.lax.with_sharding_constraint
  return structure.unflatten(
    [x if where is None else pin(x, where) for x, where in zip(leaves, layout.leaves)]
  )


@functools.partial(jax.jit, static_argnums=(0, 4))
def start(
  graph: Any, state: Any, prompts: Prompts, rules: Rules, plan: Plan
) -> tuple[Generated, Any]:
  """Runs the prompts, each once, and takes the first token of every row.

  Args:
    graph, state: see `opened`. A model with `init_cache` is decoded through its cache,
      any other by running the whole sequence for every token.
    prompts, rules, plan: compiled once for each of their shapes and each plan.
  """
  # Merged anew in every traced body, so that a model may write to itself in a call.
  logits, memory = prefilled(nnx.merge(graph, state), prompts, plan)
  out = _emit(_nothing(rules, plan, logits.shape[-1]), logits, rules)
  # Every process reads the whole result.
  return jax.tree.map(mesh_lib.constrain, out), memory


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def advance(
  graph: Any, state: Any, rules: Rules, out: Generated, memory: Any, until: Leaf
) -> tuple[Generated, Any]:
  """Goes on until every row is done, or `until` columns are written.

  Args:
    graph, state: see `opened`.
    rules: limits may be lower than they were: a row at its limit is done.
    out, memory: of `start` or of this; they are used up.
    until: int32 scalar.
  """
  way = way_of(nnx.merge(graph, state))

  def body(carry):
    out, memory = carry
    last = jax.lax.dynamic_index_in_dim(out.tokens, out.steps - 1, 1, keepdims=False)
    logits, memory = way.step(nnx.merge(graph, state), last, memory)
    return _emit(out, logits, rules), memory

  def goes_on(carry):
    return ~jnp.all(carry[0].done) & (carry[0].steps < until)

  out = dataclasses.replace(out, done=out.done | (out.lengths >= rules.limits))
  with jax.named_scope("decode"):
    out, memory = jax.lax.while_loop(goes_on, body, (out, memory))
  return jax.tree.map(mesh_lib.constrain, out), memory


class Way(NamedTuple):
  """How a model goes from token to token; see the functions of these names."""

  prefill: Callable[..., Any]
  repeat: Callable[..., Any]
  step: Callable[..., Any]


def way_of(model: Any) -> Way:
  """Through the model's cache where it has one, else by running the whole sequence for
  every token."""
  if hasattr(model, "init_cache"):
    return Way(prefill, memory_lib.repeat, step)
  return Way(recompute.prefill, recompute.repeat, recompute.step)


def prefilled(
  model: Any, prompts: Prompts, plan: Plan
) -> tuple[Float[Array, "B V"], Any]:
  """Runs every prompt once: the logits of all its rows, and what they go on from."""
  way = way_of(model)
  with jax.named_scope("prefill"):
    logits, memory = way.prefill(model, prompts.tokens, prompts.mask, plan.slots)
    if prompts.shift is not None:
      memory = memory_lib.shift(memory, prompts.shift)
    source = plan.copies if prompts.source is None else prompts.source
    if not isinstance(source, int) or source > 1:
      memory = way.repeat(model, memory, source)
      logits = memory_lib.rows_of(logits, source)
  return logits, memory


def prefill(
  model: Any, tokens: Int[Array, "B P"], mask: Bool[Array, "B P"], slots: int
) -> tuple[Float[Array, "B V"], Memory]:
  """Runs the prompts, padded on the left, into a fresh cache of `slots` tokens.

  Returns: logits after each prompt's last token, and what `step` goes on from.
  """
  batch, width = tokens.shape
  cache = memory_lib.pinned(model, model.init_cache(batch, slots))
  positions = masks.positions_from_mask(mask)
  visible = jnp.pad(mask, ((0, 0), (0, slots - width)), constant_values=True)
  causal = masks.causal_mask(jnp.arange(width), jnp.arange(slots))
  logits, cache = _last_logits(
    model, tokens, positions, cache, causal & visible[:, None]
  )
  return logits, Memory(
    cache=cache,
    visible=visible,
    positions=positions[:, -1] + 1,
    slot=jnp.asarray(width, jnp.int32),
  )


def step(
  model: Any, tokens: Int[Array, " B"], memory: Memory
) -> tuple[Float[Array, "B V"], Memory]:
  """Runs one token a row through the cache.

  Returns: the logits after it, and what the next step goes on from.
  """
  seen = jnp.arange(memory.visible.shape[1]) <= memory.slot
  logits, cache = _last_logits(
    model,
    tokens[:, None],
    memory.positions[:, None],
    memory.cache,
    (memory.visible & seen)[:, None],
  )
  return logits, dataclasses.replace(
    memory, cache=cache, positions=memory.positions + 1, slot=memory.slot + 1
  )


def _last_logits(model, tokens, positions, cache, mask):
  """float32 [B, V] of the last position, unembedding no other where the model can."""
  adapted = calling.adapt(model)
  hidden = {} if adapted.builds_logits else {"return_hidden": True}
  states, cache = model(tokens, positions, cache, mask, **hidden)
  return adapted.unembed(states[:, -1:])[:, 0].astype(jnp.float32), cache


def _nothing(rules: Rules, plan: Plan, vocab: int) -> Generated:
  """An empty result."""
  batch = rules.limits.shape[0]
  shape = (batch, plan.columns)
  scores = lambda wanted: jnp.zeros(shape, jnp.float32) if wanted else None
  return Generated(
    tokens=jnp.zeros(shape, jnp.int32),
    lengths=jnp.zeros(batch, jnp.int32),
    stopped=jnp.zeros(batch, bool),
    done=rules.limits <= 0,
    steps=jnp.zeros((), jnp.int32),
    logps=scores(plan.return_logps),
    sampling_logps=scores(plan.return_logps),
    logits=jnp.zeros((*shape, vocab), jnp.float32) if plan.return_logits else None,
  )


def _emit(out: Generated, logits: jax.Array, rules: Rules) -> Generated:
  """Chooses every row's next token and writes one column."""
  tokens, drawn_from = sampling.choose(logits, rules.draw, out.lengths)

  def write(buffer, column):
    at = (0, out.steps) + (0,) * (buffer.ndim - 2)
    return jax.lax.dynamic_update_slice(buffer, column[:, None], at)

  logps, sampled, kept = out.logps, out.sampling_logps, out.logits
  if logps is not None:
    logps = write(logps, sampling.token_logps(logits, tokens))
  if sampled is not None and drawn_from is not None:
    sampled = write(sampled, sampling.token_logps(drawn_from, tokens))
  if kept is not None:
    kept = write(kept, logits)
  lengths = out.lengths + ~out.done
  stopped = out.stopped | (~out.done & sampling.is_in(tokens, rules.eos))
  return Generated(
    tokens=write(out.tokens, tokens),
    lengths=lengths,
    stopped=stopped,
    done=out.done | stopped | (lengths >= rules.limits),
    steps=out.steps + 1,
    logps=logps,
    sampling_logps=sampled,
    logits=kept,
  )
