"""The token loop: two jitted programs over a module that is split for decoding.

`opened` prepares the module once per request. `start` runs the prompts and chooses each
row's first token. `advance` decodes until every row is done or a given number of
columns is written, so the caller can read the rows between two calls of `advance`.
Functions that depend on the kind of model (prefill, step, ...) come from
`decoders.decoder_of`.

A scheduler that manages the decode slots itself calls the functions of `decoder_of` and
`memory.admit` directly.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.generate.decoders import decoders, layout as layout_lib, memory as memory_lib
from tunix.generate.decoders.layout import Layout
from tunix.generate.drawing import sampling
from tunix.generate.drawing.sampling import Draw, Leaf
from tunix.models.transformer.experts import route_records
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The static sizes and options that programs are compiled for.

  Attributes:
    slots: S, slots of a row for prompt and generated tokens together.
    columns: N, the largest number of generated tokens of a row.
    copies: number of consecutive rows for each prompt; used if `Prompts.source` is
      None.
    return_logits: return the logits, float32 [B, N, V].
    return_logps: compute the log-probabilities of the chosen tokens.
    return_routes: record the experts of all tokens.
  """

  slots: int
  columns: int
  copies: int = 1
  return_logits: bool = False
  return_logps: bool = False
  return_routes: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """The prompts of a request, as arrays.

  Attributes:
    tokens: int32 [P, W], padded on the left.
    mask: bool [P, W], True on the prompts' tokens.
    source: int32 [B], index of each row's prompt; None if each prompt has
      `Plan.copies` rows.
    shift: int32 scalar, number of slots by which prompts are moved to the left, over
      their padding, because the generated tokens need these slots. None if the cache
      has room for padding and tokens.
    images: the images of each prompt, see `VisionLanguageModel`; None: there are none.
  """

  tokens: Leaf
  mask: Leaf
  source: Leaf | None = None
  shift: Leaf | None = None
  images: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The choice of tokens, and the end of rows.

  Attributes:
    limits: int32 [B], largest number of tokens to generate; 0 for rows that only fill
      the batch.
    eos: int32 [E], ids that end a row, padded by `batching.id_list`.
    draw: the choice of the next token.
  """

  limits: Leaf
  eos: Leaf
  draw: Draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """The completions of a request: written on the device, read on the host.

  Attributes:
    tokens: int32 [B, N]; only the first `lengths` columns of a row are valid.
    lengths: int32 [B], number of generated tokens, including the end-of-sequence token.
    stopped: bool [B], True if an end-of-sequence token ended the row.
    done: bool [B], True if the row stopped or has reached its limit.
    steps: int32 scalar, columns written.
    logps: float32 [B, N] or None, in nats, under the model's own distribution.
    sampling_logps: float32 [B, N] or None, under the distribution drawn from.
    logits: float32 [B, N, V] or None.
    routes: experts of the generated tokens that were run, [B, N, M, k], see
      experts/route_records.py; or None.
    prompt_routes: experts of the prompts' tokens, [P, W, M, k]; or None.
  """

  tokens: jax.Array
  lengths: jax.Array
  stopped: jax.Array
  done: jax.Array
  steps: jax.Array
  logps: jax.Array | None
  sampling_logps: jax.Array | None
  logits: jax.Array | None
  routes: jax.Array | None = None
  prompt_routes: jax.Array | None = None


@jax.tree_util.register_static
class HashedGraph(nnx.GraphDef):
  """A graph definition that computes its hash once.

  A call of a jitted function hashes its static arguments. The hash of a graph
  definition visits all variables: 2 ms for 8 layers, for each call.
  """

  def __init__(self, graph: nnx.GraphDef):
    super().__init__(graph.nodes, graph.attributes, graph.num_leaves)
    object.__setattr__(self, "_hash", super().__hash__())  # the class is frozen

  def __hash__(self) -> int:
    return self._hash  # type: ignore[attr-defined]


class Opened(NamedTuple):
  """A module split for decoding: graph definition and state."""

  graph: HashedGraph
  state: nnx.State


def opened(
  graph: nnx.GraphDef[Any],
  state: nnx.State,
  layout: Layout | None = None,
  *,
  transposes: bool = False,
) -> Opened:
  """Prepares a split module for decoding: one module per layer, and new shardings.

  Args:
    graph: graph definition of the module.
    state: its state. Leaves that do not change are returned without a copy.
    layout: new shardings of weights, see `layout.for_decoding`; None leaves them
      unchanged.
    transposes: see `layout.transpose_kernels`.
  """
  # A model that scans its layers stores them stacked, [L, ...]. Each decode step would
  # slice the stack once per layer, which copies all weights in every step. Here they
  # are sliced once per request.
  structure, places, changed = programs.call(
    "unstack", _open, graph, layout, transposes, state
  )
  stored = jax.tree.leaves(state)
  fresh = iter(changed)
  leaves = [next(fresh) if i is None else stored[i] for i in places.value]
  graph, state = structure.value.unflatten(leaves)
  return Opened(HashedGraph(graph), state)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """A Python value that a jitted function computes while it is traced."""

  value: Any


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _open(graph, layout, transposes, state):
  """Returns the new structure, the source of each leaf, and the changed leaves only.

  A jitted function copies its results. An unchanged leaf (embedding, last norm, head)
  is therefore not returned; `places` has its index in `state` instead, and None for a
  changed leaf. While the function is traced, an unchanged leaf is the same Python
  object as in `state`, so `id` identifies it.
  """
  arrays = state if layout is None else _laid_out(state, layout)
  model = nnx.merge(graph, arrays)
  if layout is not None and layout.step:
    layout_lib.split_products(model, layout.step)
  model.eval()  # No dropout in sampled text, even while the owner trains the model.
  model = decoders.unstacked(model)
  if transposes:
    layout_lib.transpose_kernels(model)
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
  graph: nnx.GraphDef[Any], state: nnx.State, prompts: Prompts, rules: Rules, plan: Plan
) -> tuple[Generated, Any]:
  """Runs every prompt once and chooses the first token of every row.

  Compiled once for each `plan` and each set of shapes.

  Args:
    graph: graph definition, from `opened`.
    state: state of the module, from `opened`.
    prompts: the prompts.
    rules: the choice of tokens and the rows' limits.
    plan: static sizes and options.

  Returns:
    The rows with one token each, and the state for `advance`.
  """
  # Each traced body merges the module again: a model may change its own state in a
  # call, which must not leak a tracer of one body into another.
  model, routes = nnx.merge(graph, state), None

  def run():
    return prefilled(model, prompts, plan)

  if plan.return_routes:
    (logits, memory), routes = route_records.recorded(model, run)
  else:
    logits, memory = run()
  out = _emit(_empty(rules, plan, logits.shape[-1], routes), logits, rules)
  # Replicated, because every process reads the whole result.
  return jax.tree.map(mesh_lib.constrain, out), memory


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def advance(
  graph: nnx.GraphDef[Any],
  state: nnx.State,
  rules: Rules,
  out: Generated,
  memory: object,
  until: Leaf,
) -> tuple[Generated, Any]:
  """Decodes until every row is done or `until` columns are written.

  Args:
    graph: graph definition, from `opened`.
    state: state of the module, from `opened`.
    rules: as in `start`. A limit may be lowered between two calls: a row that has
      reached its new limit is done.
    out: rows from `start` or from this function; donated.
    memory: decoding state from the same call; donated.
    until: number of columns to stop at, int32 scalar.
  """
  decoder = decoders.decoder_of(nnx.merge(graph, state))

  def body(carry):
    out, memory = carry
    # The cache holds all tokens except the last one, which was chosen but has not been
    # run. It is in column `steps - 1`.
    last = jax.lax.dynamic_index_in_dim(out.tokens, out.steps - 1, 1, keepdims=False)
    model = nnx.merge(graph, state)

    def run():
      return decoder.step(model, last, memory)

    if out.routes is None:
      logits, memory = run()
    else:
      (logits, memory), routes = route_records.recorded(model, run)
      at = (0, out.steps - 1, 0, 0)
      routes = jax.lax.dynamic_update_slice(out.routes, routes, at)
      out = dataclasses.replace(out, routes=routes)
    return _emit(out, logits, rules), memory

  def continues(carry):
    return ~jnp.all(carry[0].done) & (carry[0].steps < until)

  out = dataclasses.replace(out, done=out.done | (out.lengths >= rules.limits))
  # A while_loop, so that decoding stops when the last row is done and need not run all
  # N columns. `until` is an array argument, so a new value does not recompile.
  with jax.named_scope("decode"):
    out, memory = jax.lax.while_loop(continues, body, (out, memory))
  return jax.tree.map(mesh_lib.constrain, out), memory


def prefilled(
  model: nnx.Module, prompts: Prompts, plan: Plan
) -> tuple[Float[Array, "B V"], Any]:
  """Runs every prompt once and expands the result to all rows.

  Returns:
    The logits of each row's first token, and the state for the decoder's `step`.
  """
  decoder = decoders.decoder_of(model)
  with jax.named_scope("prefill"):
    options = {} if prompts.images is None else {"images": prompts.images}
    logits, memory = decoder.prefill(
      model, prompts.tokens, prompts.mask, plan.slots, **options
    )
    if prompts.shift is not None:
      assert decoder.shift is not None
      memory = decoder.shift(memory, prompts.shift)
    # The prefill has one cache row per prompt; decoding needs one per completion.
    # Samples share the computation of their prompt, but each has its own copy in
    # memory.
    source = plan.copies if prompts.source is None else prompts.source
    if not isinstance(source, int) or source > 1:
      memory = decoder.repeat(model, memory, source)
      logits = memory_lib.rows_of(logits, source)
  return logits, memory


def _empty(rules: Rules, plan: Plan, vocab: int, routes: jax.Array | None) -> Generated:
  """Returns buffers without a token; `routes` are those of the prompts, or None."""
  batch = rules.limits.shape[0]
  shape = (batch, plan.columns)

  def logps():
    return jnp.zeros(shape, jnp.float32) if plan.return_logps else None

  return Generated(
    tokens=jnp.zeros(shape, jnp.int32),
    lengths=jnp.zeros(batch, jnp.int32),
    stopped=jnp.zeros(batch, bool),
    done=rules.limits <= 0,
    steps=jnp.zeros((), jnp.int32),
    logps=logps(),
    sampling_logps=logps(),
    logits=jnp.zeros((*shape, vocab), jnp.float32) if plan.return_logits else None,
    routes=None
    if routes is None
    else jnp.zeros((*shape, *routes.shape[2:]), routes.dtype),
    prompt_routes=routes,
  )


def _emit(out: Generated, logits: jax.Array, rules: Rules) -> Generated:
  """Chooses every row's next token and writes one column.

  Rows that are done get a token too, because a column is written as one slice for all
  rows. The host cuts every row at its length.
  """
  tokens, drawn_from = sampling.choose(logits, rules.draw, out.lengths)

  # All rows write the same column, so a write is one slice and no scatter.
  def write(buffer, column):
    at = (0, out.steps) + (0,) * (buffer.ndim - 2)
    return jax.lax.dynamic_update_slice(buffer, column[:, None], at)

  logps, sampled, all_logits = out.logps, out.sampling_logps, out.logits
  if logps is not None:
    logps = write(logps, sampling.token_logps(logits, tokens))
  # A greedy choice samples from no distribution, so its sampling log-probabilities keep
  # their initial value 0.
  if sampled is not None and drawn_from is not None:
    sampled = write(sampled, sampling.token_logps(drawn_from, tokens))
  if all_logits is not None:
    all_logits = write(all_logits, logits)
  # The length grows if the row was not done before this step, so the end-of-sequence
  # token is counted.
  lengths = out.lengths + ~out.done
  stopped = out.stopped | (~out.done & sampling.is_in(tokens, rules.eos))
  return dataclasses.replace(
    out,
    tokens=write(out.tokens, tokens),
    lengths=lengths,
    stopped=stopped,
    done=out.done | stopped | (lengths >= rules.limits),
    steps=out.steps + 1,
    logps=logps,
    sampling_logps=sampled,
    logits=all_logits,
  )
