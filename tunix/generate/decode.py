"""Prefill, one decode step, and the token loop: pure functions over a split module.

`generate` is one program: the cache lives and dies inside it, and the loop ends when
every row is done. A scheduler that admits rows while others decode needs `prefill` and
`step` only.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.generate import recompute, sampling
from tunix.models.transformer import sharding
from tunix.models.transformer.cache import KVCache
from tunix.ops import masks
from tunix.utils import mesh as mesh_lib

Leaf = Any  # a traced array inside the program, a host array where it is called


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What a program is compiled for, besides the shapes of its request.

  Attributes:
    slots: S, prompt and generated tokens together.
    greedy: take the most likely token; the temperature is not looked at.
    return_logits: keep [B, S - P, V] logits.
    return_logps: compute the chosen tokens' log-probabilities.
  """

  slots: int
  greedy: bool
  return_logits: bool = False
  return_logps: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """The rows of one program.

  Attributes:
    tokens: int32 [B, P], padded on the left.
    mask: bool [B, P], True on the prompt's tokens.
    limits: int32 [B], most tokens to generate, 0 for rows that only fill the batch.
    rows: int32 [B], each row's number, for its randomness.
    key: the call's random key.
    temperature: float32 scalar, above 0.
    eos: int32 [E], ids that end a row; filled up (`batching.id_list`).
    forbidden: int32 [F], ids that never come, or None; filled up (`batching.id_list`).
  """

  tokens: Leaf
  mask: Leaf
  limits: Leaf
  rows: Leaf
  key: Leaf
  temperature: Leaf
  eos: Leaf
  forbidden: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """What the loop has written so far, N = S - P columns; on the host once fetched.

  Attributes:
    tokens: int32 [B, N]; columns from `lengths` on mean nothing.
    lengths: int32 [B], tokens generated, the end-of-sequence token included.
    stopped: bool [B], whether an end-of-sequence token came.
    done: bool [B], stopped or at the row's limit.
    steps: int32 scalar, columns written: one more than the loop's iterations.
    logps: float32 [B, N] or None.
    logits: float32 [B, N, V] or None.
  """

  tokens: jax.Array
  lengths: jax.Array
  stopped: jax.Array
  done: jax.Array
  steps: jax.Array
  logps: jax.Array | None
  logits: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """What a model with a cache carries from token to token.

  Attributes:
    cache: the model's own.
    visible: bool [B, S], slots that hold a token of the row, or will.
    positions: int32 [B], position of the next token.
    slot: int32 scalar, where the next token goes.
  """

  cache: Any
  visible: jax.Array
  positions: jax.Array
  slot: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 3))
def generate(
  graph: nnx.GraphDef[Any], state: Any, request: Request, plan: Plan
) -> Generated:
  """Completes all rows of a request.

  Args:
    graph, state: `nnx.split` of the model. One with `init_cache` is decoded through its
      cache, any other by running the whole sequence for every token.
    request: the rows. Compiled once for each of its shapes and each plan.
    plan: the rest.
  """
  model = nnx.merge(graph, state)
  model.eval()  # whatever its owner is at: no dropout in what is sampled
  cached = hasattr(model, "init_cache")
  if hasattr(model, "unstack"):
    model = model.unstack()  # once: slices inside the loop would be taken every token
  # Merged anew in every traced body, so that a model may write to itself in a call.
  graph, state = nnx.split(model)
  start, advance = (prefill, step) if cached else (recompute.prefill, recompute.step)

  with jax.named_scope("prefill"):
    merged = nnx.merge(graph, state)
    logits, memory = start(merged, request.tokens, request.mask, plan.slots)
  out = _emit(_nothing(request, plan, logits.shape[-1]), logits, request, plan)

  def body(carry):
    out, memory = carry
    last = jax.lax.dynamic_index_in_dim(out.tokens, out.steps - 1, 1, keepdims=False)
    logits, memory = advance(nnx.merge(graph, state), last, memory)
    return _emit(out, logits, request, plan), memory

  with jax.named_scope("decode"):
    out, _ = jax.lax.while_loop(lambda c: ~jnp.all(c[0].done), body, (out, memory))
  # Every process reads the whole result.
  return jax.tree.map(mesh_lib.constrain, out)


def prefill(
  model: Any, tokens: Int[Array, "B P"], mask: Bool[Array, "B P"], slots: int
) -> tuple[Float[Array, "B V"], Memory]:
  """Runs the prompts, padded on the left, into a fresh cache of `slots` tokens.

  Returns: logits after each prompt's last token, and what `step` goes on from.
  """
  batch, width = tokens.shape
  cache = _pinned(model, model.init_cache(batch, slots))
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
  parameters = inspect.signature(type(model).__call__).parameters
  if "return_hidden" in parameters and hasattr(model, "logits"):
    hidden, cache = model(tokens, positions, cache, mask, return_hidden=True)
    return model.logits(hidden[:, -1:])[:, 0], cache
  logits, cache = model(tokens, positions, cache, mask)
  return logits[:, -1].astype(jnp.float32), cache


def _pinned(model, cache):
  """Our cache split like the activations: rows by the batch axes, heads by tp."""
  if not isinstance(cache, KVCache):
    return cache
  rules = model.config.sharding
  spec = (sharding.batch_axes(rules), None, rules.tp, None)
  pin = lambda buffers: tuple(mesh_lib.constrain(x, *spec) for x in buffers)
  return dataclasses.replace(cache, k=pin(cache.k), v=pin(cache.v))


def _nothing(request: Request, plan: Plan, vocab: int) -> Generated:
  """An empty result."""
  batch, width = request.tokens.shape
  shape = (batch, plan.slots - width)
  return Generated(
    tokens=jnp.zeros(shape, jnp.int32),
    lengths=jnp.zeros(batch, jnp.int32),
    stopped=jnp.zeros(batch, bool),
    done=request.limits <= 0,
    steps=jnp.zeros((), jnp.int32),
    logps=jnp.zeros(shape, jnp.float32) if plan.return_logps else None,
    logits=jnp.zeros((*shape, vocab), jnp.float32) if plan.return_logits else None,
  )


def _emit(out: Generated, logits: jax.Array, request: Request, plan: Plan) -> Generated:
  """Chooses every row's next token and writes one column."""
  allowed = logits
  if request.forbidden is not None:
    allowed = sampling.forbid(logits, request.forbidden)
  if plan.greedy:
    tokens = sampling.greedy(allowed)
  else:
    positions = jnp.broadcast_to(out.steps, request.rows.shape)
    keys = sampling.row_keys(request.key, request.rows, positions)
    tokens = sampling.sample(keys, allowed, request.temperature)

  def write(buffer, column):
    at = (0, out.steps) + (0,) * (buffer.ndim - 2)
    return jax.lax.dynamic_update_slice(buffer, column[:, None], at)

  logps, kept = out.logps, out.logits
  if logps is not None:
    logps = write(logps, sampling.token_logps(logits, tokens))
  if kept is not None:
    kept = write(kept, logits)
  lengths = out.lengths + ~out.done
  stopped = out.stopped | (~out.done & sampling.is_in(tokens, request.eos))
  return Generated(
    tokens=write(out.tokens, tokens),
    lengths=lengths,
    stopped=stopped,
    done=out.done | stopped | (lengths >= request.limits),
    steps=out.steps + 1,
    logps=logps,
    logits=kept,
  )
