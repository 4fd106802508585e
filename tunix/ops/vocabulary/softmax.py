"""Logits, softmax and gradients of one chunk of tokens.

`vocab_chunks` cuts the tokens into chunks and distributes them over devices; this
module holds the arithmetic of one chunk on one device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from tunix.ops.vocabulary import invariant

# Bytes of one float32 [chunk, V] block of logits, 256 MiB: 448 tokens with a vocabulary
# of 150,000. One or two blocks exist at a time. Smaller blocks make the matrix products
# with the unembedding less efficient.
CHUNK_BYTES = 256 * 2**20


class Layout(NamedTuple):
  """Sharding of the tokens, and storage of the unembedding.

  Attributes:
    transposed: True if the unembedding is [V, D], the shape of a tied embedding table;
      False if it is [D, V].
    mesh: device mesh; None for one device.
    batch_axes: mesh axes that split the batch.
    vocab_axis: mesh axis that splits the vocabulary, or None. Inside
      `vocab_chunks._shared_pass` it is a tuple of several axes.
    softcap: c of the soft cap c tanh(x / c) of logits x (Gemma 2); None for no cap.
    chunk_bytes: bytes of one block of logits on one device.
    token_axis: mesh axis that splits the tokens of every row, or None.
    invariant: if True, the bits of a token's log-probability do not depend on other
      tokens, on a CPU and without a split vocabulary.
  """

  transposed: bool = False
  mesh: Mesh | AbstractMesh | None = None
  batch_axes: tuple[str, ...] = ()
  vocab_axis: str | tuple[str, ...] | None = None
  softcap: float | None = None
  chunk_bytes: int = CHUNK_BYTES
  token_axis: str | None = None
  invariant: bool = False

  @property
  def axes(self) -> tuple[str, ...]:
    """Mesh axes that split the tokens: those of the batch and of the row."""
    return (*self.batch_axes, *((self.token_axis,) if self.token_axis else ()))

  @property
  def tokens(self) -> PartitionSpec:
    """PartitionSpec of arrays [B, T, ...]."""
    return PartitionSpec(self.batch_axes or None, self.token_axis)

  @property
  def shards(self) -> int:
    """Number of parts that the tokens are split into."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[axis] for axis in self.axes)


ONE_DEVICE = Layout()


class Rule(NamedTuple):
  """Static settings of a pass, fixed when it is traced.

  Attributes:
    layout: sharding and chunk size.
    temperature: temperature of the softmax.
    entropy: True computes the entropy.
    hidden: True computes the gradient in the hidden states.
    unembed: True computes the gradient in the unembedding.
  """

  layout: Layout
  temperature: float = 1.0
  entropy: bool = False
  hidden: bool = False
  unembed: bool = False


class Pulls(NamedTuple):
  """Cotangents of log-probabilities and entropies, float32 [B, T] each, or None.

  A gradient is the sum over tokens of cotangent * d result / d input.
  """

  logps: Any = None
  entropy: Any = None


class Outputs(NamedTuple):
  """The results of a pass; None if not computed.

  Attributes:
    logps, entropy: values of each token, float32 [B, T], in nats.
    d_hidden, d_unembed: gradients, weighted with the cotangents.
  """

  logps: Any
  entropy: Any
  d_hidden: Any
  d_unembed: Any


class _Softmax(NamedTuple):
  """The softmax of a chunk of C tokens, with the target separate from all others.

  The probability of the target is p = exp(at_target) / normaliser, and 1 - p is
  computed as rest / normaliser. If p is nearly 1, this keeps its precision, while the
  subtraction 1 - p in float32 would lose all digits.
  """

  capped: jax.Array  # [C, V] logits before the temperature
  centred: jax.Array  # [C, V] logits / temperature, minus their maximum
  column: jax.Array  # [C] column of the target; V if another shard has it
  at_target: jax.Array  # [C] `centred` at the target
  others: jax.Array  # [C, V] exp(centred), and 0 at the target
  rest: jax.Array  # [C] sum of `others`
  normaliser: jax.Array  # [C] rest + exp(at_target)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """Returns cap * tanh(x / cap): close to x for small x, never beyond the cap."""
  return cap * jnp.tanh(x / cap)


def vocabulary_size(unembed: jax.Array, layout: Layout) -> int:
  """Returns the number of logits that an unembedding computes."""
  return unembed.shape[0 if layout.transposed else 1]


def chunk_pass(unembed, hidden, targets, pulls, *, rule: Rule) -> Outputs:
  """Computes one chunk: hidden [C, D], targets and cotangents [C]."""
  soft = _softmax(unembed, hidden, targets, rule)
  logps = soft.at_target - jnp.log(soft.normaliser)
  needs_entropy = rule.entropy or pulls.entropy is not None
  entropy = _entropy(soft, rule.layout) if needs_entropy else None
  d_hidden = d_unembed = None
  if rule.hidden or rule.unembed:
    factor, d_logits = _pull_logits(soft, pulls, entropy, rule, hidden.dtype)
    needed = rule.hidden, rule.unembed
    d_hidden, d_unembed = gradients(
      d_logits, factor, hidden, unembed, rule.layout, needed
    )
  return Outputs(logps, entropy if rule.entropy else None, d_hidden, d_unembed)


def gradients(
  d_logits: jax.Array,
  factor: jax.Array,
  hidden: jax.Array,
  unembed: jax.Array,
  layout: Layout,
  needed: tuple[bool, bool],
) -> tuple[Any, Any]:
  """Returns the gradients of a chunk in its hidden states and in the unembedding.

  The cotangent of the logits is `factor` [C, 1] times `d_logits` [C, V]. The factor is
  multiplied with the narrow arrays [C, D], not with the block of logits, and `d_logits`
  has the dtype of the hidden states, in which the matrix products are fast.

  Args:
    d_logits, factor: cotangent of the logits.
    hidden: hidden states [C, D].
    unembed: unembedding.
    layout: storage of the unembedding.
    needed: whether each of the two gradients is computed; None is returned otherwise.
  """
  d_hidden = d_unembed = None
  if needed[0]:
    from_logits = "cv,vd->cd" if layout.transposed else "cv,dv->cd"
    d_hidden = factor * dot(from_logits, d_logits, unembed)
  if needed[1]:
    to_table = "cv,cd->vd" if layout.transposed else "cv,cd->dv"
    d_unembed = dot(to_table, d_logits, (factor * hidden).astype(hidden.dtype))
  return d_hidden, d_unembed


def chunk_logits(hidden: jax.Array, unembed: jax.Array, layout: Layout) -> jax.Array:
  """Returns the soft-capped logits of hidden [C, D], float32 [C, V]."""
  to_logits = "cd,vd->cv" if layout.transposed else "cd,dv->cv"
  count = hidden.shape[0]
  if layout.invariant and layout.mesh is not None and layout.transposed:
    # The engine's product on a mesh; the other one has other bits in bfloat16.
    unembed, to_logits = unembed.T, "cd,dv->cv"
  if layout.invariant:
    hidden = jnp.pad(hidden, ((0, max(0, invariant.MANY - count)), (0, 0)))
  logits = dot(to_logits, hidden, unembed)[:count]
  if layout.softcap is None:
    return logits
  capped = soft_cap(logits, layout.softcap)
  return invariant.kept(capped, layout.invariant)


def _softmax(unembed, hidden, targets, rule: Rule) -> _Softmax:
  layout = rule.layout
  capped = chunk_logits(hidden, unembed, layout)
  if layout.invariant:
    logits = invariant.tempered(capped, rule.temperature)
  else:
    logits = capped / rule.temperature
  rows, vocab, offset = jnp.arange(targets.size), logits.shape[-1], 0
  if layout.vocab_axis is not None:
    offset = jax.lax.axis_index(layout.vocab_axis) * vocab
  column = targets - offset
  held = (column >= 0) & (column < vocab)  # True if this shard has the target
  # Subtracting the maximum over all shards keeps exp in [0, 1]: no overflow.
  top = across(jax.lax.pmax, jnp.max(logits, axis=-1), layout)
  at_target = logits[rows, jnp.clip(column, 0, vocab - 1)]
  at_target = across(jax.lax.psum, jnp.where(held, at_target, 0.0), layout) - top
  is_target = jnp.arange(vocab)[None, :] == column[:, None]
  centred = logits - top[:, None]
  others = jnp.where(is_target, 0.0, jnp.exp(centred))
  own = invariant.total(others) if layout.invariant else jnp.sum(others, axis=-1)
  rest = across(jax.lax.psum, own, layout)
  column = jnp.where(held, column, vocab)
  normaliser = rest + jnp.exp(at_target)
  return _Softmax(capped, centred, column, at_target, others, rest, normaliser)


def across(reduce: Any, x: jax.Array, layout: Layout) -> jax.Array:
  """Applies a collective over the shards of the vocabulary, if it is split."""
  return x if layout.vocab_axis is None else reduce(x, layout.vocab_axis)


def _entropy(soft: _Softmax, layout: Layout) -> jax.Array:
  """Returns the entropy [C]: log normaliser minus the mean of the centred logits."""
  mean = across(jax.lax.psum, jnp.sum(soft.others * soft.centred, axis=-1), layout)
  mean = (mean + jnp.exp(soft.at_target) * soft.at_target) / soft.normaliser
  return jnp.log(soft.normaliser) - mean


def _pull_logits(
  soft: _Softmax, pulls: Pulls, entropy: jax.Array | None, rule: Rule, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """Returns factor [C, 1] and d_logits [C, V], whose product is the logits' cotangent.

  Let a and b be the cotangents of the log-probability and of the entropy H. The
  cotangent of the logits is (a (onehot - p) - b p (log p + H)) / temperature. With
  p = exp(centred) / normaliser, all entries have the common factor
  -size / (normaliser * temperature), where size is max(|a|, |b|), or a without an
  entropy term. What remains of an entry is exp(centred) (a + b (log p + H)) / size, and
  at the target (-a rest + b exp(at_target) (log p + H)) / size; see `_Softmax` for
  `rest`.
  """
  norm = soft.normaliser
  if pulls.entropy is None or entropy is None:
    size, d_logits, d_target = pulls.logps.astype(jnp.float32), soft.others, -soft.rest
  else:
    # Both cotangents are divided by the larger one, so that d_logits stays within the
    # range of a 16-bit dtype. If both are 0, the division is by 1.
    size = jnp.maximum(jnp.abs(pulls.logps), jnp.abs(pulls.entropy))
    safe = jnp.where(size > 0, size, 1.0)
    a, b = pulls.logps / safe, pulls.entropy / safe
    shift = entropy - jnp.log(norm)  # log p + H = centred + shift
    d_logits = soft.others * (a[:, None] + b[:, None] * (soft.centred + shift[:, None]))
    d_target = jnp.exp(soft.at_target) * b * (soft.at_target + shift) - a * soft.rest
  factor = (-size / (norm * rule.temperature))[:, None]
  rows = jnp.arange(norm.size)
  # If another shard has the target, its column is V (`_softmax`), out of range, and
  # mode="drop" writes nothing.
  d_logits = d_logits.at[rows, soft.column].set(
    d_target, mode="drop", unique_indices=True
  )
  # `rest` may be as large as V, which can exceed 65504, the largest float16. Dividing
  # by the normaliser first gives probabilities.
  if dtype == jnp.float16:
    d_logits, factor = d_logits / norm[:, None], factor * norm[:, None]
  if rule.layout.softcap is not None:  # d c tanh(x / c) / dx = 1 - tanh(x / c)^2
    d_logits *= 1 - jnp.square(soft.capped / rule.layout.softcap)
  return factor, d_logits.astype(dtype)


def dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns an einsum that accumulates in float32."""
  return jnp.einsum(spec, x, y.astype(x.dtype), preferred_element_type=jnp.float32)


def scaled(gradient: jax.Array | None, factor: jax.Array) -> jax.Array | None:
  """Returns gradient * factor in the dtype of the gradient; None stays None."""
  return None if gradient is None else (gradient * factor).astype(gradient.dtype)


def materialised(cotangent: object, shape: tuple[int, ...] = ()) -> jax.Array:
  """Returns a cotangent as an array; a symbolic zero becomes zeros of this shape."""
  return cotangent if isinstance(cotangent, jax.Array) else jnp.zeros(shape)
