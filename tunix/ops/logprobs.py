"""Next-token loss whose memory follows the tokens, not the vocabulary.

`weighted_nll` scans over chunks of tokens, so that only [chunk, V] logits are alive,
and computes the gradients in the forward pass, chunk by chunk: a backward pass that
recomputes the logits would cost one more product with the unembedding (about 9 % of
the step of a small model).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

# Bytes of one float32 [chunk, V] block of logits. One or two such blocks live at a
# time; smaller ones make the products with the unembedding less efficient.
CHUNK_BYTES = 256 * 2**20
MIN_CHUNK = 64


class Layout(NamedTuple):
  """How the loss is spread over devices, and how the unembedding is stored.

  Attributes:
    transposed: the unembedding is [V, D] (a tied embedding table) instead of [D, V].
    mesh: the device mesh, or None for one device.
    batch_axes: mesh axes that split the batch.
    vocab_axis: mesh axis that splits the vocabulary, or None.
    softcap: logits x become c tanh(x / c) (Gemma 2); None: they stay as they are.
    chunk_bytes: bytes of one block of logits on one device.
  """

  transposed: bool = False
  mesh: Mesh | AbstractMesh | None = None
  batch_axes: tuple[str, ...] = ()
  vocab_axis: str | None = None
  softcap: float | None = None
  chunk_bytes: int = CHUNK_BYTES


ONE_DEVICE = Layout()


class _Part(NamedTuple):
  """What a pass over the tokens gives; gradients are None when nobody asked."""

  nll: Any  # [B, T] float32
  d_hidden: Any
  d_unembed: Any


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """cap * tanh(x / cap): close to x when small, never beyond the cap."""
  return cap * jnp.tanh(x / cap)


def weighted_nll(
  hidden: Float[Array, "B T D"],
  unembed: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  layout: Layout = ONE_DEVICE,
) -> Float[Array, ""]:
  """Sum over tokens of `weights * -log p(target | hidden)`, in nats.

  Equals the plain form `weights * (logsumexp(hidden @ unembed) - logit of target)`;
  logits and the sum are float32 whatever the inputs are. Differentiable in `hidden`,
  `unembed` and `weights`; the gradient in `unembed` is only computed when asked for
  (not in LoRA training).

  Args:
    hidden: final hidden states.
    unembed: [D, V], or [V, D] with `layout.transposed`.
    targets: the token to predict at each position, in [0, V).
    weights: 0 where nothing is predicted.
    layout: sharding and chunk size.
  """
  if hidden.shape[0] % _batch_shards(layout):
    layout = layout._replace(batch_axes=())  # such a batch is replicated
  return _weighted_nll(hidden, unembed, targets, weights, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_nll(hidden, unembed, targets, weights, layout):
  part = _run(hidden, unembed, targets, weights, layout, False, False)
  return jnp.sum(part.nll * weights)


def _forward(hidden, unembed, targets, weights, layout):
  part = _run(
    hidden.value,
    unembed.value,
    targets.value,
    weights.value,
    layout,
    hidden.perturbed,
    unembed.perturbed,
  )
  return jnp.sum(part.nll * weights.value), part


def _backward(layout, part, cotangent):
  del layout
  if not isinstance(cotangent, jax.Array):  # a symbolic zero: nobody uses the loss
    cotangent = jnp.zeros((), jnp.float32)

  def scaled(gradient):
    return None if gradient is None else (gradient * cotangent).astype(gradient.dtype)

  return (
    scaled(part.d_hidden),
    scaled(part.d_unembed),
    None,
    part.nll * cotangent,
  )


_weighted_nll.defvjp(_forward, _backward, symbolic_zeros=True)


def _run(hidden, unembed, targets, weights, layout, want_hidden, want_unembed) -> _Part:
  """One pass over all tokens, on one device or under shard_map."""
  local = functools.partial(
    _local_pass, layout=layout, want_hidden=want_hidden, want_unembed=want_unembed
  )
  mesh = layout.mesh
  if mesh is None or mesh.size == 1:
    return local(hidden, unembed, targets, weights)
  # Each device gathers the unembedding once, works on its own tokens, and the
  # gradient of the unembedding is reduced once, not once a chunk.
  batch = PartitionSpec(layout.batch_axes or None)
  vocab = layout.vocab_axis
  table = (
    PartitionSpec(vocab, None) if layout.transposed else PartitionSpec(None, vocab)
  )
  scattered = _scatter_axes(layout, unembed.shape[1 if layout.transposed else 0])
  d_table = (
    PartitionSpec(vocab, scattered or None)
    if layout.transposed
    else PartitionSpec(scattered or None, vocab)
  )
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(batch, table, batch, batch),
    out_specs=_Part(
      batch, batch if want_hidden else None, d_table if want_unembed else None
    ),
    check_vma=False,
  )(hidden, unembed, targets, weights)


def _batch_shards(layout: Layout) -> int:
  """Number of parts that the batch is split into."""
  if layout.mesh is None:
    return 1
  return math.prod(layout.mesh.shape[axis] for axis in layout.batch_axes)


def _scatter_axes(layout: Layout, dim: int) -> tuple[str, ...]:
  """Axes over which the gradient of the unembedding is reduce-scattered along D."""
  if layout.mesh is None or dim % _batch_shards(layout):
    return ()
  return layout.batch_axes


def _local_pass(
  hidden, unembed, targets, weights, *, layout, want_hidden, want_unembed
) -> _Part:
  """The tokens of one device, chunk by chunk."""
  shape, dim = targets.shape, hidden.shape[-1]
  vocab = unembed.shape[0 if layout.transposed else 1]
  count, size = _chunks(targets.size, vocab, layout.chunk_bytes)

  def split(x):
    flat = x.reshape(targets.size, *x.shape[2:])
    padding = [(0, count * size - targets.size)] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, padding).reshape(count, size, *flat.shape[1:])

  def join(x):
    return x.reshape(count * size, *x.shape[2:])[: targets.size].reshape(
      *shape, *x.shape[2:]
    )

  chunk = functools.partial(
    _chunk_pass,
    unembed,
    layout=layout,
    want_hidden=want_hidden,
    want_unembed=want_unembed,
  )
  parts = (split(hidden), split(targets), split(weights))
  if count == 1:
    one = chunk(*(x[0] for x in parts))
    nll, d_hidden, total = one.nll[None], one.d_hidden, one.d_unembed
    d_hidden = None if d_hidden is None else d_hidden[None]
  else:
    start = jnp.zeros(unembed.shape, jnp.float32) if want_unembed else None

    def step(total, xs):
      part = chunk(*xs)
      total = None if total is None else total + part.d_unembed
      return total, (part.nll, part.d_hidden)

    total, (nll, d_hidden) = jax.lax.scan(step, start, parts)

  if d_hidden is not None:
    d_hidden = join(d_hidden)
    if layout.vocab_axis is not None:
      d_hidden = jax.lax.psum(d_hidden, layout.vocab_axis)
    d_hidden = d_hidden.astype(hidden.dtype)
  if total is not None:
    total = _reduce_table(total, layout, dim).astype(unembed.dtype)
  return _Part(join(nll), d_hidden, total)


def _reduce_table(total: jax.Array, layout: Layout, dim: int) -> jax.Array:
  """Adds the devices' parts of the unembedding's gradient."""
  if layout.mesh is None or not layout.batch_axes:
    return total
  axes = _scatter_axes(layout, dim)
  if not axes:
    return jax.lax.psum(total, layout.batch_axes)
  axis = 1 if layout.transposed else 0
  return jax.lax.psum_scatter(total, axes, scatter_dimension=axis, tiled=True)


def _chunks(tokens: int, vocab: int, chunk_bytes: int) -> tuple[int, int]:
  """(number of chunks, tokens a chunk): as few as the byte limit allows."""
  limit = max(MIN_CHUNK, chunk_bytes // (4 * vocab))
  count = max(1, math.ceil(tokens / limit))
  return count, math.ceil(tokens / count)


def _chunk_pass(
  unembed, hidden, targets, weights, *, layout, want_hidden, want_unembed
) -> _Part:
  """Loss and gradients of one chunk: hidden [C, D], targets and weights [C]."""
  to_logits = "cd,vd->cv" if layout.transposed else "cd,dv->cv"
  logits = _dot(to_logits, hidden, unembed)
  if layout.softcap is not None:
    logits = soft_cap(logits, layout.softcap)
  rows, vocab, offset = jnp.arange(targets.size), logits.shape[-1], 0
  if layout.vocab_axis is not None:
    offset = jax.lax.axis_index(layout.vocab_axis) * vocab

  def across(reduce: Any, x):
    return x if layout.vocab_axis is None else reduce(x, layout.vocab_axis)

  column = targets - offset
  held = (column >= 0) & (column < vocab)  # whether this shard has the target
  top = across(jax.lax.pmax, jnp.max(logits, axis=-1))
  at_target = logits[rows, jnp.clip(column, 0, vocab - 1)]
  at_target = across(jax.lax.psum, jnp.where(held, at_target, 0.0)) - top
  hit = jnp.arange(vocab)[None, :] == column[:, None]
  others = jnp.where(hit, 0.0, jnp.exp(logits - top[:, None]))
  rest = across(jax.lax.psum, jnp.sum(others, axis=-1))
  normaliser = rest + jnp.exp(at_target)
  nll = jnp.log(normaliser) - at_target
  if not (want_hidden or want_unembed):
    return _Part(nll, None, None)

  # The gradient in the logits is weight / normaliser times `others`, with -rest at the
  # target: that is p - 1 without its cancellation where p is nearly 1. The factor of a
  # row goes onto the narrow side of the products.
  factor = (weights.astype(jnp.float32) / normaliser)[:, None]
  column = jnp.where(held, column, vocab)  # out of range: dropped
  d_logits = others.at[rows, column].set(-rest, mode="drop", unique_indices=True)
  if hidden.dtype == jnp.float16:  # `rest` may pass 65504, where float16 ends
    d_logits, factor = d_logits / normaliser[:, None], factor * normaliser[:, None]
  if layout.softcap is not None:
    d_logits *= 1 - jnp.square(logits / layout.softcap)
  d_logits = d_logits.astype(hidden.dtype)
  d_hidden = d_unembed = None
  if want_hidden:
    from_logits = "cv,vd->cd" if layout.transposed else "cv,dv->cd"
    d_hidden = factor * _dot(from_logits, d_logits, unembed)
  if want_unembed:
    to_table = "cv,cd->vd" if layout.transposed else "cv,cd->dv"
    d_unembed = _dot(to_table, d_logits, (factor * hidden).astype(hidden.dtype))
  return _Part(nll, d_hidden, d_unembed)


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """einsum that adds up in float32."""
  return jnp.einsum(spec, x, y.astype(x.dtype), preferred_element_type=jnp.float32)
