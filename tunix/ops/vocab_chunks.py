"""Log-probabilities and entropies of tokens, and their gradients, chunk by chunk.

`run` scans over chunks of tokens, so that only [chunk, V] logits are alive. One pass
gives the values, the gradients for cotangents that are known, or both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

# Bytes of one float32 [chunk, V] block of logits. One or two such blocks live at a
# time; smaller ones make the products with the unembedding less efficient.
CHUNK_BYTES = 256 * 2**20
MIN_CHUNK = 64


class Layout(NamedTuple):
  """How the tokens are spread over devices, and how the unembedding is stored.

  Attributes:
    transposed: the unembedding is [V, D] (a tied embedding table) instead of [D, V].
    mesh: the device mesh, or None for one device.
    batch_axes: mesh axes that split the batch.
    vocab_axis: mesh axis that splits the vocabulary, or None; inside a pass that shares
      the words, several.
    softcap: logits x become c tanh(x / c) (Gemma 2); None: they stay as they are.
    chunk_bytes: bytes of one block of logits on one device.
    token_axis: mesh axis that splits the tokens of every row, or None.
  """

  transposed: bool = False
  mesh: Mesh | AbstractMesh | None = None
  batch_axes: tuple[str, ...] = ()
  vocab_axis: str | tuple[str, ...] | None = None
  softcap: float | None = None
  chunk_bytes: int = CHUNK_BYTES
  token_axis: str | None = None

  @property
  def axes(self) -> tuple[str, ...]:
    """All axes that tokens are spread over."""
    return (*self.batch_axes, *((self.token_axis,) if self.token_axis else ()))

  @property
  def tokens(self) -> PartitionSpec:
    """How arrays [B, T, ...] are split."""
    return PartitionSpec(self.batch_axes or None, self.token_axis)

  @property
  def shards(self) -> int:
    """Parts that the tokens are split into."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[axis] for axis in self.axes)


ONE_DEVICE = Layout()


class Rule(NamedTuple):
  """What a pass computes; fixed when it is traced.

  Attributes:
    layout: see `Layout`.
    temperature: the distribution is softmax(logits / temperature).
    entropy: whether its entropy is wanted.
    hidden, unembed: whether their gradients are wanted.
  """

  layout: Layout
  temperature: float = 1.0
  entropy: bool = False
  hidden: bool = False
  unembed: bool = False


class Pulls(NamedTuple):
  """Cotangents, float32 [B, T] each; None: there is none."""

  logps: Any = None
  entropy: Any = None


class Outputs(NamedTuple):
  """What a pass over the tokens gives; None where nobody asked.

  Attributes:
    logps, entropy: [B, T] float32, in nats.
    d_hidden, d_unembed: sums over the tokens of cotangent times gradient.
  """

  logps: Any
  entropy: Any
  d_hidden: Any
  d_unembed: Any


class _Softmax(NamedTuple):
  """The distribution of a chunk, its target kept apart: exact where p is nearly 1."""

  capped: jax.Array  # [C, V] logits before the temperature
  centred: jax.Array  # [C, V] logits / temperature, less their maximum
  column: jax.Array  # [C] of the target; V where another shard holds it
  at_target: jax.Array  # [C] of `centred`
  others: jax.Array  # [C, V] exp(centred), 0 at the target
  rest: jax.Array  # [C] their sum
  normaliser: jax.Array  # [C]


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """cap * tanh(x / cap): close to x when small, never beyond the cap."""
  return cap * jnp.tanh(x / cap)


def for_batch(layout: Layout, shape: tuple[int, ...]) -> Layout:
  """The layout for a batch [B, T, ...]: replicated along what its axes do not divide,
  and without axes on a mesh of one device, where there is nothing to add up."""
  if layout.mesh is None or layout.mesh.size == 1:
    return layout._replace(mesh=None, batch_axes=(), token_axis=None, vocab_axis=None)
  if shape[1] % layout._replace(batch_axes=()).shards:
    layout = layout._replace(token_axis=None)
  if shape[0] % layout._replace(token_axis=None).shards:
    layout = layout._replace(batch_axes=())
  return layout


def words_in(unembed: jax.Array, layout: Layout) -> int:
  """Words that an unembedding gives logits of."""
  return unembed.shape[0 if layout.transposed else 1]


def on_mesh(
  local: Callable[..., Any], layout: Layout, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
  """`local`, which sees the tokens of one device, for those of all of them.

  Each device works on its own tokens with all words, which gathers the unembedding once
  and reduces its gradient once (`reduced`), not once a chunk; or on its own words
  (`shares_words`).
  """
  if layout.mesh is None:
    return local
  return jax.shard_map(
    local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def run(
  hidden: jax.Array, unembed: jax.Array, targets: jax.Array, pulls: Pulls, rule: Rule
) -> Outputs:
  """One pass over all tokens, on one device or under shard_map.

  Args:
    hidden: [B, T, D].
    unembed: [D, V] or [V, D].
    targets: [B, T] in [0, V).
    pulls: what the gradients are weighted with.
    rule: what is wanted; its layout fits the batch (`for_batch`).
  """
  layout = rule.layout
  batch, table = layout.tokens, table_spec(layout)
  out_specs = Outputs(
    batch,
    batch if rule.entropy else None,
    batch if rule.hidden else None,
    gradient_spec(layout, unembed.shape) if rule.unembed else None,
  )
  shared = shares_words(
    layout, targets.size, hidden.shape[-1], words_in(unembed, layout)
  )
  if shared:
    table = gradient_spec(layout, unembed.shape)
  local = functools.partial(_shared_pass if shared else _local_pass, rule=rule)
  in_specs = (batch, table, batch, batch)
  return on_mesh(local, layout, in_specs, out_specs)(hidden, unembed, targets, pulls)


def table_spec(layout: Layout, columns: Any = None) -> PartitionSpec:
  """How the unembedding is split: its vocabulary, and D over `columns`."""
  vocab = layout.vocab_axis
  entries = (vocab, columns) if layout.transposed else (columns, vocab)
  return PartitionSpec(*entries)


def gradient_spec(layout: Layout, shape: tuple[int, ...]) -> PartitionSpec:
  """How `reduced` leaves the gradient of an unembedding of this shape."""
  dim = shape[1 if layout.transposed else 0]
  return table_spec(layout, scatter_axes(layout, dim) or None)


def scatter_axes(layout: Layout, dim: int) -> tuple[str, ...]:
  """Axes over which the gradient of the unembedding is reduce-scattered along D."""
  if layout.mesh is None or dim % layout.shards:
    return ()
  return layout.axes


def _local_pass(hidden, unembed, targets, pulls, *, rule: Rule) -> Outputs:
  """The tokens of one device, chunk by chunk."""
  layout = rule.layout

  def chunk(*xs):
    part = _chunk_pass(unembed, *xs, rule=rule)
    return part._replace(d_unembed=None), part.d_unembed

  start = jnp.zeros(unembed.shape, jnp.float32) if rule.unembed else None
  by_token, d_unembed = over_tokens(
    chunk,
    (hidden, targets, pulls),
    targets.shape,
    words_in(unembed, layout),
    start,
    layout,
  )
  logps, entropy, d_hidden, _ = by_token
  return Outputs(logps, entropy, *reduced(d_hidden, d_unembed, hidden, unembed, layout))


def shares_words(layout: Layout, tokens: int, dim: int, vocab: int) -> bool:
  """Whether each device computes its share of the words for all tokens, and not all
  words for its tokens.

  Then the hidden states travel, [tokens, D], and neither the unembedding nor its
  gradient is ever whole on a device; it is done where the vocabulary is the larger.
  """
  if layout.mesh is None or not scatter_axes(layout, dim):
    return False
  shards = layout.shards
  if isinstance(layout.vocab_axis, str):
    shards *= layout.mesh.shape[layout.vocab_axis]
  return tokens <= vocab and vocab % shards == 0


def _shared_pass(hidden, unembed, targets, pulls, *, rule: Rule) -> Outputs:
  """The words of one device, for the tokens of all of them, chunk by chunk."""
  layout = rule.layout
  axes, dims = layout.axes, ((1, 0) if layout.transposed else (0, 1))
  alone = layout._replace(batch_axes=(), token_axis=None)
  words = (*((layout.vocab_axis,) if layout.vocab_axis else ()), *axes)
  spread = rule._replace(layout=alone._replace(vocab_axis=words))
  # From [D / n, V] to [D, V / n]: each device sends the others their words.
  table = jax.lax.all_to_all(unembed, axes, dims[1], dims[0], tiled=True)

  def chunk(*xs):
    size = xs[1].shape[0]
    everyones = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), xs)
    part = _chunk_pass(table, *everyones, rule=spread)
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
  # A block of logits has the tokens of all devices, and as many words fewer.
  vocab = words_in(table, layout) * layout.shards
  (logps, entropy, d_hidden, _), d_table = over_tokens(
    chunk, (hidden, targets, pulls), targets.shape, vocab, start, layout
  )
  # What is left is to add up over the words.
  d_hidden, d_table = reduced(d_hidden, d_table, hidden, table, alone)
  if d_table is not None:
    d_table = jax.lax.all_to_all(d_table, axes, dims[0], dims[1], tiled=True)
  return Outputs(logps, entropy, d_hidden, d_table)


def over_tokens(
  chunk: Callable[..., tuple[Any, Any]],
  arrays: Any,
  shape: tuple[int, ...],
  vocab: int,
  start: Any,
  layout: Layout,
) -> tuple[Any, Any]:
  """`chunk` over the tokens, as many at a time as the layout's bytes allow.

  Args:
    chunk: arrays [C, ...] -> (values by token [C, ...], something to add up or None).
    arrays: what is cut, [B, T, ...] each; what fills up the last chunk is 0.
    shape: (B, T).
    vocab: columns of a chunk's logits on this device.
    start: zeros to add to, or None.
    layout: bytes of a chunk.

  Returns: (values [B, T, ...], the sum).
  """
  tokens = math.prod(shape)
  count, size = _chunks(tokens, vocab, layout.chunk_bytes)

  def split(x):
    flat = x.reshape(tokens, *x.shape[2:])
    padding = [(0, count * size - tokens)] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, padding).reshape(count, size, *flat.shape[1:])

  def join(x):
    return x.reshape(count * size, *x.shape[2:])[:tokens].reshape(*shape, *x.shape[2:])

  parts = jax.tree.map(split, arrays)
  if count == 1:
    by_token, total = chunk(*jax.tree.map(lambda x: x[0], parts))
    return jax.tree.map(lambda x: join(x[None]), by_token), total

  def step(total, xs):
    by_token, part = chunk(*xs)
    return jax.tree.map(jnp.add, total, part), by_token

  total, by_token = jax.lax.scan(step, start, parts)
  return jax.tree.map(join, by_token), total


def reduced(
  d_hidden: Any, d_unembed: Any, hidden: jax.Array, unembed: jax.Array, layout: Layout
) -> tuple[Any, Any]:
  """The devices' parts of both gradients (None: not wanted), added up, in the dtypes of
  what they are the gradients of."""
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


def _chunks(tokens: int, vocab: int, chunk_bytes: int) -> tuple[int, int]:
  """(number of chunks, tokens a chunk): as few as the byte limit allows."""
  limit = max(MIN_CHUNK, chunk_bytes // (4 * vocab))
  count = max(1, math.ceil(tokens / limit))
  return count, math.ceil(tokens / count)


def _chunk_pass(unembed, hidden, targets, pulls, *, rule: Rule) -> Outputs:
  """Values and gradients of one chunk: hidden [C, D], targets and cotangents [C]."""
  soft = _softmax(unembed, hidden, targets, rule)
  logps = soft.at_target - jnp.log(soft.normaliser)
  needs_entropy = rule.entropy or pulls.entropy is not None
  entropy = _entropy(soft, rule.layout) if needs_entropy else None
  d_hidden = d_unembed = None
  if rule.hidden or rule.unembed:
    factor, d_logits = _pull_logits(soft, pulls, entropy, rule, hidden.dtype)
    wanted = rule.hidden, rule.unembed
    d_hidden, d_unembed = gradients(
      d_logits, factor, hidden, unembed, rule.layout, wanted
    )
  return Outputs(logps, entropy if rule.entropy else None, d_hidden, d_unembed)


def gradients(
  d_logits: jax.Array,
  factor: jax.Array,
  hidden: jax.Array,
  unembed: jax.Array,
  layout: Layout,
  wanted: tuple[bool, bool],
) -> tuple[Any, Any]:
  """Gradients of a chunk: [C, D] in its hidden states, and that of the unembedding;
  None for what is not wanted.

  The cotangent of the logits is `factor` [C, 1] times `d_logits` [C, V], which has the
  dtype of the hidden states: a row's factor goes onto the narrow side of the products.
  """
  d_hidden = d_unembed = None
  if wanted[0]:
    from_logits = "cv,vd->cd" if layout.transposed else "cv,dv->cd"
    d_hidden = factor * dot(from_logits, d_logits, unembed)
  if wanted[1]:
    to_table = "cv,cd->vd" if layout.transposed else "cv,cd->dv"
    d_unembed = dot(to_table, d_logits, (factor * hidden).astype(hidden.dtype))
  return d_hidden, d_unembed


def chunk_logits(hidden: jax.Array, unembed: jax.Array, layout: Layout) -> jax.Array:
  """float32 [C, V] of hidden [C, D], soft-capped."""
  to_logits = "cd,vd->cv" if layout.transposed else "cd,dv->cv"
  logits = dot(to_logits, hidden, unembed)
  return logits if layout.softcap is None else soft_cap(logits, layout.softcap)


def _softmax(unembed, hidden, targets, rule: Rule) -> _Softmax:
  layout = rule.layout
  capped = chunk_logits(hidden, unembed, layout)
  logits = capped / rule.temperature
  rows, vocab, offset = jnp.arange(targets.size), logits.shape[-1], 0
  if layout.vocab_axis is not None:
    offset = jax.lax.axis_index(layout.vocab_axis) * vocab
  column = targets - offset
  held = (column >= 0) & (column < vocab)  # whether this shard has the target
  top = across(jax.lax.pmax, jnp.max(logits, axis=-1), layout)
  at_target = logits[rows, jnp.clip(column, 0, vocab - 1)]
  at_target = across(jax.lax.psum, jnp.where(held, at_target, 0.0), layout) - top
  hit = jnp.arange(vocab)[None, :] == column[:, None]
  centred = logits - top[:, None]
  others = jnp.where(hit, 0.0, jnp.exp(centred))
  rest = across(jax.lax.psum, jnp.sum(others, axis=-1), layout)
  column = jnp.where(held, column, vocab)
  normaliser = rest + jnp.exp(at_target)
  return _Softmax(capped, centred, column, at_target, others, rest, normaliser)


def across(reduce: Any, x: jax.Array, layout: Layout) -> jax.Array:
  """Reduces over the shards of the vocabulary."""
  return x if layout.vocab_axis is None else reduce(x, layout.vocab_axis)


def _entropy(soft: _Softmax, layout: Layout) -> jax.Array:
  """log of the normaliser, less the mean of the centred logits; [C]."""
  mean = across(jax.lax.psum, jnp.sum(soft.others * soft.centred, axis=-1), layout)
  mean = (mean + jnp.exp(soft.at_target) * soft.at_target) / soft.normaliser
  return jnp.log(soft.normaliser) - mean


def _pull_logits(
  soft: _Softmax, pulls: Pulls, entropy: jax.Array | None, rule: Rule, dtype: Any
) -> tuple[jax.Array, jax.Array]:
  """(factor [C, 1], d_logits [C, V] in `dtype`), whose product is the cotangent of
  the logits: the factor of a row goes onto the narrow side of the products.

  With a, b the cotangents of log-probability and entropy H it is
  a (onehot - p) - b p (log p + H), all over the temperature. At the target 1 - p is
  rest / normaliser: no cancellation where p is nearly 1.
  """
  norm = soft.normaliser
  if pulls.entropy is None or entropy is None:
    size, d_logits, d_target = pulls.logps.astype(jnp.float32), soft.others, -soft.rest
  else:
    # Relative to the larger of the two, so that a narrow dtype holds what follows.
    size = jnp.maximum(jnp.abs(pulls.logps), jnp.abs(pulls.entropy))
    safe = jnp.where(size > 0, size, 1.0)
    a, b = pulls.logps / safe, pulls.entropy / safe
    shift = entropy - jnp.log(norm)
    d_logits = soft.others * (a[:, None] + b[:, None] * (soft.centred + shift[:, None]))
    d_target = jnp.exp(soft.at_target) * b * (soft.at_target + shift) - a * soft.rest
  factor = (-size / (norm * rule.temperature))[:, None]
  rows = jnp.arange(norm.size)
  # A column out of range, of a target that another shard holds, is dropped.
  d_logits = d_logits.at[rows, soft.column].set(
    d_target, mode="drop", unique_indices=True
  )
  if dtype == jnp.float16:  # `rest` may pass 65504, where float16 ends
    d_logits, factor = d_logits / norm[:, None], factor * norm[:, None]
  if rule.layout.softcap is not None:
    d_logits *= 1 - jnp.square(soft.capped / rule.layout.softcap)
  return factor, d_logits.astype(dtype)


def dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """einsum that adds up in float32."""
  return jnp.einsum(spec, x, y.astype(x.dtype), preferred_element_type=jnp.float32)
