"""Log-probabilities and entropies of tokens, and their gradients, chunk by chunk.

`run` scans over chunks of tokens, so that memory holds only one [chunk, V] block of
logits at a time. One pass gives the values, the gradients for known cotangents, or
both.

On a mesh, a pass is distributed in one of two ways, which `splits_vocabulary` chooses:

  own tokens         each device computes all logits of its tokens. The unembedding is
                     all-gathered once, and its gradient is reduced once (`_local_pass`)
  own columns        each device computes its columns of the vocabulary for the tokens
                     of all devices. Hidden states are sent between devices, not the
                     unembedding (`_shared_pass`)

Tokens that no loss needs, such as padding and prompts, can be named. They are sorted
to the end, and their chunks are skipped: their number is known only when the program
runs, and shapes are fixed before.

With either of them, `Layout.vocab_axis` may split the unembedding by vocabulary (tensor
parallelism). Each softmax then needs a maximum and sums over this axis (`across`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tunix.ops.vocabulary.softmax import (
  Layout,
  Outputs,
  Pulls,
  Rule,
  across,
  chunk_pass,
  vocabulary_size,
)

MIN_CHUNK = 64  # tokens; smaller chunks make the matrix products inefficient
# If some tokens are not needed, all are cut into this number of chunks or more: with
# fewer ones the last chunk that is computed holds many of them. Chunks of fewer tokens
# than `_SKIPPED_CHUNK` cost more than they save.
_FINE, _SKIPPED_CHUNK = 8, 128


def for_batch(layout: Layout, shape: tuple[int, ...]) -> Layout:
  """Returns the layout that fits a batch [B, T, ...].

  An axis whose size does not divide its dimension is removed, so the dimension is
  replicated. A mesh of one device becomes None, because a single device has nothing to
  reduce.
  """
  if layout.mesh is None or layout.mesh.size == 1:
    return layout._replace(mesh=None, batch_axes=(), token_axis=None, vocab_axis=None)
  if shape[1] % layout._replace(batch_axes=()).shards:
    layout = layout._replace(token_axis=None)
  if shape[0] % layout._replace(token_axis=None).shards:
    layout = layout._replace(batch_axes=())
  return layout


def on_mesh(
  local: Callable[..., Any], layout: Layout, in_specs: object, out_specs: object
) -> Callable[..., Any]:
  """Returns a function of global arrays that runs `local` on every device.

  Args:
    local: function of the arrays of one device.
    layout: layout with the mesh; without one, `local` itself is returned.
    in_specs, out_specs: PartitionSpecs of its arguments and results.
  """
  if layout.mesh is None:
    return local
  return jax.shard_map(
    local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def run(
  hidden: jax.Array,
  unembed: jax.Array,
  targets: jax.Array,
  pulls: Pulls,
  rule: Rule,
  needed: jax.Array | None = None,
) -> Outputs:
  """Runs one pass over all tokens, on one device or under shard_map.

  Args:
    hidden: hidden states [B, T, D].
    unembed: unembedding, [D, V] or [V, D].
    targets: target of each token, [B, T], in [0, V).
    pulls: cotangents of the results, which the gradients are multiplied by.
    rule: results to compute. Its layout must fit the batch (`for_batch`).
    needed: bool [B, T], False where nothing is needed: there, values are 0 or right,
      and the cotangents must be 0. None: all are needed.
  """
  layout = rule.layout
  batch, table = layout.tokens, table_spec(layout)
  out_specs = Outputs(
    batch,
    batch if rule.entropy else None,
    batch if rule.hidden else None,
    gradient_spec(layout, unembed.shape) if rule.unembed else None,
  )
  shared = splits_vocabulary(
    layout, targets.size, hidden.shape[-1], vocabulary_size(unembed, layout)
  )
  if shared:
    table = gradient_spec(layout, unembed.shape)
  local = functools.partial(_shared_pass if shared else _local_pass, rule=rule)
  in_specs = (batch, table, batch, batch, batch)
  return on_mesh(local, layout, in_specs, out_specs)(
    hidden, unembed, targets, pulls, needed
  )


def table_spec(
  layout: Layout, columns: str | tuple[str, ...] | None = None
) -> PartitionSpec:
  """Returns the PartitionSpec of the unembedding, with D over the axes `columns`."""
  vocab = layout.vocab_axis
  entries = (vocab, columns) if layout.transposed else (columns, vocab)
  return PartitionSpec(*entries)


def gradient_spec(layout: Layout, shape: tuple[int, ...]) -> PartitionSpec:
  """Returns the PartitionSpec of the unembedding's gradient, as `reduced` returns it.

  Args:
    layout: sharding and storage of the unembedding.
    shape: shape of the unembedding.
  """
  dim = shape[1 if layout.transposed else 0]
  return table_spec(layout, scatter_axes(layout, dim) or None)


def scatter_axes(layout: Layout, dim: int) -> tuple[str, ...]:
  """Returns the mesh axes that reduce-scatter the unembedding's gradient along D.

  The tuple is empty without a mesh, or if the token shards do not divide D.
  """
  if layout.mesh is None or dim % layout.shards:
    return ()
  return layout.axes


def _local_pass(hidden, unembed, targets, pulls, needed, *, rule: Rule) -> Outputs:
  """Computes the tokens of one device, chunk by chunk."""
  layout = rule.layout

  def chunk(*xs):
    part = chunk_pass(unembed, *xs, rule=rule)
    return part._replace(d_unembed=None), part.d_unembed

  start = jnp.zeros(unembed.shape, jnp.float32) if rule.unembed else None
  by_token, d_unembed = over_tokens(
    chunk,
    (hidden, targets, pulls),
    targets.shape,
    vocabulary_size(unembed, layout),
    start,
    layout,
    needed,
  )
  logps, entropy, d_hidden, _ = by_token
  return Outputs(logps, entropy, *reduced(d_hidden, d_unembed, hidden, unembed, layout))


def splits_vocabulary(layout: Layout, tokens: int, dim: int, vocab: int) -> bool:
  """Returns True if each device computes its columns of the logits for all tokens.

  Otherwise each device computes all columns for its own tokens. Split columns send the
  hidden states [tokens, D] between devices, and no device holds the whole unembedding
  or its gradient, [D, V]. The hidden states are the smaller array if tokens <= vocab.

  Args:
    layout: sharding of the tokens and of the vocabulary.
    tokens: number of tokens B * T of all devices.
    dim: size D of the hidden states.
    vocab: size V of the vocabulary.
  """
  if layout.mesh is None or layout.invariant or not scatter_axes(layout, dim):
    return False
  shards = layout.shards
  if isinstance(layout.vocab_axis, str):
    shards *= layout.mesh.shape[layout.vocab_axis]
  return tokens <= vocab and vocab % shards == 0


def _shared_pass(hidden, unembed, targets, pulls, needed, *, rule: Rule) -> Outputs:
  """Computes one device's columns for the tokens of all devices, chunk by chunk."""
  layout = rule.layout
  # `dims` are the dimensions (D, V) of the unembedding. `alone` does not split tokens,
  # because every device computes all of them; `spread` splits the vocabulary over the
  # token axes instead, in addition to `vocab_axis`.
  axes, dims = layout.axes, ((1, 0) if layout.transposed else (0, 1))
  alone = layout._replace(batch_axes=(), token_axis=None)
  vocab_axes = (*((layout.vocab_axis,) if layout.vocab_axis else ()), *axes)
  spread = rule._replace(layout=alone._replace(vocab_axis=vocab_axes))
  # From [D / n, V] to [D, V / n] on each of the n devices: each device sends the others
  # their columns of its rows.
  table = jax.lax.all_to_all(unembed, axes, dims[1], dims[0], tiled=True)

  def chunk(*xs):
    size = xs[1].shape[0]
    gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), xs)
    part = chunk_pass(table, *gathered, rule=spread)
    # All devices have the values of all tokens; each keeps those of its own tokens. The
    # gradient in the hidden states is a sum over columns, hence the reduce-scatter.
    first = jax.lax.axis_index(axes) * size
    mine = functools.partial(
      jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size
    )
    d_hidden = part.d_hidden
    if d_hidden is not None:
      d_hidden = jax.lax.psum_scatter(d_hidden, axes, tiled=True)
    entropy = None if part.entropy is None else mine(part.entropy)
    return Outputs(mine(part.logps), entropy, d_hidden, None), part.d_unembed

  start = jnp.zeros(table.shape, jnp.float32) if rule.unembed else None
  # A block of logits has n C tokens and V / n columns, where C is the number of tokens
  # that one device adds to a chunk. These are C V numbers, so `over_tokens`, which
  # chooses C, needs the whole V.
  vocab = vocabulary_size(table, layout) * layout.shards
  (logps, entropy, d_hidden, _), d_table = over_tokens(
    chunk, (hidden, targets, pulls), targets.shape, vocab, start, layout, needed, axes
  )
  # Every device has processed all tokens, so nothing is summed over the token axes;
  # `alone` leaves only the sum over `vocab_axis`.
  d_hidden, d_table = reduced(d_hidden, d_table, hidden, table, alone)
  if d_table is not None:
    d_table = jax.lax.all_to_all(d_table, axes, dims[0], dims[1], tiled=True)
  return Outputs(logps, entropy, d_hidden, d_table)


def over_tokens(
  chunk: Callable[..., tuple[Any, Any]],
  arrays: object,
  shape: tuple[int, ...],
  vocab: int,
  start: jax.Array | None,
  layout: Layout,
  needed: jax.Array | None = None,
  together: tuple[str, ...] = (),
) -> tuple[Any, Any]:
  """Applies `chunk` to chunks of tokens, of the size that `layout.chunk_bytes` allows.

  Args:
    chunk: arrays [C, ...] -> (values of each token [C, ...], a term to sum or None).
    arrays: tree of arrays [B, T, ...] to cut into chunks.
    shape: (B, T).
    vocab: number of columns of a block of logits.
    start: zeros with the shape of the sum, or None if there is no sum.
    layout: gives the bytes of a chunk.
    needed: bool [B, T]; the values of other tokens may be 0. None: all are needed.
    together: mesh axes whose devices must compute the same chunks, because `chunk`
      exchanges arrays over them.

  Returns:
    (values [B, T, ...], sum of the terms over all chunks).
  """
  tokens = math.prod(shape)
  count, size = _chunks(tokens, vocab, layout.chunk_bytes, needed is not None)

  # The last chunk is filled with zeros. Their cotangents are 0 too, so they add nothing
  # to a gradient, and `join` cuts off their values.
  def split(x):
    padding = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(count, size, *x.shape[1:])

  def join(x):
    return x.reshape(count * size, *x.shape[2:])[:tokens]

  flat = jax.tree.map(lambda x: x.reshape(tokens, *x.shape[2:]), arrays)

  def shaped(x):
    return x.reshape(*shape, *x.shape[1:])

  if count == 1:  # without a scan, XLA can fuse the chunk with the code around it
    by_token, total = chunk(*flat)
    return jax.tree.map(shaped, by_token), total

  def step(total, xs):
    by_token, part = chunk(*xs)
    return jax.tree.map(jnp.add, total, part), by_token

  if needed is None:
    total, by_token = jax.lax.scan(step, start, jax.tree.map(split, flat))
    return jax.tree.map(lambda x: shaped(join(x)), by_token), total

  def step_or_skip(total, xs):
    is_needed, xs = xs
    skipped = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), values)
    return jax.lax.cond(is_needed, step, lambda total, _: (total, skipped), total, xs)

  order = jnp.argsort(~needed.reshape(tokens), stable=True)
  parts = jax.tree.map(lambda x: split(x[order]), flat)
  values = jax.eval_shape(step, start, jax.tree.map(lambda x: x[0], parts))[1]
  most = jnp.sum(needed)
  if together:
    most = jax.lax.pmax(most, together)
  is_needed = jnp.arange(count) * size < most
  total, by_token = jax.lax.scan(step_or_skip, start, (is_needed, parts))
  place = jnp.zeros_like(order).at[order].set(jnp.arange(tokens, dtype=order.dtype))
  return jax.tree.map(lambda x: shaped(join(x)[place]), by_token), total


def reduced(
  d_hidden: Any, d_unembed: Any, hidden: jax.Array, unembed: jax.Array, layout: Layout
) -> tuple[Any, Any]:
  """Adds up the devices' parts of both gradients; None stays None.

  Returns:
    Gradients in the dtypes of `hidden` and `unembed`. The gradient of the unembedding
    has the sharding of `gradient_spec`.
  """
  if d_hidden is not None:
    d_hidden = across(jax.lax.psum, d_hidden, layout).astype(hidden.dtype)
  if d_unembed is not None:
    d_unembed = _reduced_table(d_unembed, layout, hidden.shape[-1])
    d_unembed = d_unembed.astype(unembed.dtype)
  return d_hidden, d_unembed


def _reduced_table(total: jax.Array, layout: Layout, dim: int) -> jax.Array:
  if not layout.axes:
    return total
  axes = scatter_axes(layout, dim)
  if not axes:
    return jax.lax.psum(total, layout.axes)
  axis = 1 if layout.transposed else 0
  return jax.lax.psum_scatter(total, axes, scatter_dimension=axis, tiled=True)


def _chunks(tokens: int, vocab: int, chunk_bytes: int, skips: bool) -> tuple[int, int]:
  """Returns the smallest number of chunks that the byte limit allows, and their size.

  Chunks have equal sizes, so that the last one needs little padding. There are more of
  them if `skips`, that is, if some chunks may be skipped.
  """
  # A logit in float32 has 4 bytes.
  limit = max(MIN_CHUNK, chunk_bytes // (4 * vocab))
  count = max(1, math.ceil(tokens / limit))
  if skips:
    count = max(count, min(_FINE, tokens // _SKIPPED_CHUNK))
  return count, math.ceil(tokens / count)
