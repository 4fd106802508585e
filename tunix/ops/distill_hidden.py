"""Distillation losses from hidden states, without logits of all tokens at once.

Logits [B, T, V] of student and teacher would take most of the memory: 8 x 2048 tokens
with a vocabulary of 150,000 are 10 GB each in float32. A pass over chunks of tokens
(vocabulary/chunks.py) holds one block of logits of each at a time.

The pass computes the loss together with its gradients, as `logprobs.weighted_nll` does,
because the weights of the tokens are known in advance. A step then has three matrix
products with the student's unembedding (logits and two gradients) and one with the
teacher's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.ops import distill
from tunix.ops.distill import Divergence, TopK
from tunix.ops.vocabulary.chunks import (
  for_batch,
  gradient_spec,
  on_mesh,
  over_tokens,
  reduced,
  table_spec,
)
from tunix.ops.vocabulary.softmax import (
  ONE_DEVICE,
  Layout,
  across,
  chunk_logits,
  gradients,
  materialised,
  scaled,
  vocabulary_size,
)


class States(NamedTuple):
  """Hidden states and unembedding of a teacher, whose product are its logits.

  Attributes:
    hidden: [B, T, D'] final hidden states; D' may differ from the student's D.
    table: unembedding [D', V], or [V, D'] if its layout is `transposed`.
  """

  hidden: Any
  table: Any


class Distillation(NamedTuple):
  """The result of `weighted_distillation`.

  Attributes:
    total: loss, scalar, differentiable.
    divergence: divergence of each token, float32 [B, T], in nats.
    nll: -log q(target) of the student at temperature 1, [B, T].
    teacher_nll: -log p(target) of the teacher at temperature 1, [B, T]; None for a
      TopK.
  """

  total: jax.Array
  divergence: jax.Array
  nll: jax.Array
  teacher_nll: jax.Array | None


class _Rule(NamedTuple):
  """Static settings of a pass, fixed when it is traced."""

  how: Divergence
  soft: float  # factor of the divergence
  hard: float  # factor of the cross-entropy
  layout: Layout  # of the student
  teacher: Layout  # of the teacher
  hidden: bool = False  # True computes the gradient in the hidden states
  table: bool = False  # True computes the gradient in the unembedding


def weighted_distillation(
  hidden: Float[Array, "B T D"],
  table: Float[Array, "D V"],
  teacher: States | TopK,
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  how: Divergence,
  *,
  soft: float = 1.0,
  hard: float = 0.0,
  layout: Layout = ONE_DEVICE,
  teacher_layout: Layout = ONE_DEVICE,
) -> Distillation:
  """Returns sum over tokens of weights (soft D(teacher, student) - hard log q(target)).

  The result equals the formula on whole logits of both models. Logits and losses are
  float32 for all input dtypes. It is differentiable in `hidden`, `table` and `weights`.
  A gradient is only computed if it is needed; LoRA training, for example, does not need
  the gradient of the table.

  Args:
    hidden: final hidden states of the student.
    table: unembedding of the student, [D, V], or [V, D] with `layout.transposed`.
    teacher: hidden states and unembedding, or the most likely tokens at the temperature
      of `how` (see `distill.top_k_divergence`); not differentiated.
    targets: next token of each position, in [0, V).
    weights: weight of each token; 0 on padding.
    how: divergence D and temperature.
    soft, hard: factors of divergence and cross-entropy. At temperature T, gradients of
      the divergence shrink by about 1 / T^2; a factor T^2 in `soft` restores them.
    layout: sharding, soft cap and chunk size of the student.
    teacher_layout: soft cap of the teacher, and whether its table is `transposed`.

  Raises:
    ValueError: the vocabularies differ in size, or `how` is invalid.
  """
  if isinstance(teacher, States):
    teacher_vocab = vocabulary_size(teacher.table, teacher_layout)
    distill.check_same_vocabulary(vocabulary_size(table, layout), teacher_vocab)
  layout = for_batch(layout, hidden.shape)
  # One pass computes both models, so tokens and vocabulary of the teacher are split as
  # those of the student.
  alike = teacher_layout._replace(
    mesh=layout.mesh,
    batch_axes=layout.batch_axes,
    token_axis=layout.token_axis,
    vocab_axis=layout.vocab_axis,
  )
  rule = _Rule(distill.checked(how), soft, hard, layout, alike)
  teacher = jax.lax.stop_gradient(teacher)
  arrays = (hidden, table, teacher, targets, weights)
  total, by_token = cast(Any, _distillation)(*arrays, rule)
  return Distillation(total, *jax.lax.stop_gradient(by_token))


def hidden_top_k(
  hidden: Float[Array, "B T D"],
  table: Float[Array, "D V"],
  k: int,
  temperature: float = 1.0,
  layout: Layout = ONE_DEVICE,
) -> TopK:
  """Returns `distill.top_k` without holding all logits at once; no gradient.

  Args:
    hidden: final hidden states of the teacher.
    table: unembedding of the teacher, [D, V], or [V, D] with `layout.transposed`.
    k: number of tokens per position, in [1, V].
    temperature: temperature of the log-probabilities, above 0.
    layout: sharding, soft cap and chunk size.

  Raises:
    ValueError: k is not in [1, V], or the temperature is not above 0.
  """
  vocab = vocabulary_size(table, layout)
  layout = for_batch(layout, hidden.shape)._replace(vocab_axis=None)

  def local(hidden, table):
    def chunk(hidden):
      logits = chunk_logits(hidden, table, layout)
      return distill.top_k(logits, k, temperature), None

    shape = hidden.shape[:2]
    return over_tokens(chunk, (hidden,), shape, vocab, None, layout)[0]

  batch = layout.tokens
  out = on_mesh(local, layout, (batch, table_spec(layout)), batch)(hidden, table)
  return jax.lax.stop_gradient(out)


# The custom derivative computes the gradients in the forward pass, where the weights of
# the tokens are known. The backward pass only multiplies them by the cotangent of the
# scalar loss. Automatic differentiation would save or recompute the logits of every
# chunk.
@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _distillation(hidden, table, teacher, targets, weights, rule):
  by_token, _, _ = _run(hidden, table, teacher, targets, weights, rule)
  return _total(by_token, weights, rule), by_token


def _total(by_token, weights, rule: _Rule) -> jax.Array:
  return jnp.sum(weights * _values(by_token, rule))


def _values(by_token, rule: _Rule) -> jax.Array:
  return rule.soft * by_token[0] + rule.hard * by_token[1]


def _forward(hidden, table, teacher, targets, weights, rule: _Rule):
  # With `symbolic_zeros`, each argument is a pair (value, perturbed). `perturbed` is
  # False if nothing needs the gradient in this argument.
  rule = rule._replace(hidden=hidden.perturbed, table=table.perturbed)
  arrays = (hidden, table, teacher, targets, weights)
  plain = jax.tree.map(lambda x: x.value, arrays)
  hidden, table, teacher, targets, weights = plain
  by_token, d_hidden, d_table = _run(hidden, table, teacher, targets, weights, rule)
  total = _total(by_token, weights, rule)
  return (total, by_token), (d_hidden, d_table, _values(by_token, rule))


def _backward(rule: _Rule, saved, cotangents):
  del rule
  d_hidden, d_table, values = saved
  cotangent = materialised(cotangents[0])
  d_hidden, d_table = scaled(d_hidden, cotangent), scaled(d_table, cotangent)
  return d_hidden, d_table, None, None, values * cotangent


_distillation.defvjp(_forward, _backward, symbolic_zeros=True)


def _run(hidden, table, teacher, targets, weights, rule: _Rule):
  """Runs the pass over all tokens.

  Returns:
    (values, d_hidden, d_table). `values` are (divergence, nll, teacher_nll), [B, T]
    each. The gradients are those of the weighted sum in `hidden` and `table`, each None
    if `rule` does not need it.
  """
  layout = rule.layout
  batch = layout.tokens
  is_states = isinstance(teacher, States)
  teacher_specs: Any = TopK(batch, batch)
  if is_states:
    teacher_specs = States(batch, table_spec(rule.teacher))
  by_token = (batch, batch, batch if is_states else None)
  out_specs = (
    by_token,
    batch if rule.hidden else None,
    gradient_spec(layout, table.shape) if rule.table else None,
  )
  local = functools.partial(_local, rule=rule)
  in_specs = (batch, table_spec(layout), teacher_specs, batch, batch)
  return on_mesh(local, layout, in_specs, out_specs)(
    hidden, table, teacher, targets, weights
  )


def _local(hidden, table, teacher, targets, weights, *, rule: _Rule):
  """Computes the tokens of one device, chunk by chunk."""
  layout = rule.layout
  # Every chunk uses the teacher's whole table; all other arrays are cut into chunks of
  # tokens.
  teacher_table = teacher.table if isinstance(teacher, States) else None
  by_row = teacher._replace(table=None) if isinstance(teacher, States) else teacher

  def chunk(hidden, teacher, targets, weights):
    by_token, d_logits = _chunk(hidden, table, teacher, teacher_table, targets, rule)
    d_logits = d_logits.astype(hidden.dtype)
    factor = weights.astype(jnp.float32)[:, None]
    needed = rule.hidden, rule.table
    d_hidden, d_table = gradients(d_logits, factor, hidden, table, layout, needed)
    return (by_token, d_hidden), d_table

  start = jnp.zeros(table.shape, jnp.float32) if rule.table else None
  rows = (hidden, by_row, targets, weights)
  (by_token, d_hidden), d_table = over_tokens(
    chunk, rows, targets.shape, vocabulary_size(table, layout), start, layout
  )
  return by_token, *reduced(d_hidden, d_table, hidden, table, layout)


def _chunk(hidden, table, teacher, teacher_table, targets, rule: _Rule):
  """Computes one chunk of C tokens.

  Returns:
    The values (divergence, nll, teacher_nll), [C] each, and the gradient of
    soft D - hard log q(target) in the student's logits, [C, V].
  """
  layout, temperature = rule.layout, rule.how.temperature
  column = _columns(targets[:, None], vocabulary_size(table, layout), layout)
  capped = chunk_logits(hidden, table, layout)
  plain = _log_softmax(capped, layout)
  student = plain
  if temperature != 1:
    student = _log_softmax(capped / temperature, layout)
  nll = -_at(plain, column, layout)[:, 0]
  if isinstance(teacher, States):
    logits = chunk_logits(teacher.hidden, teacher_table, rule.teacher)
    plain_teacher = _log_softmax(logits, layout)
    teacher_nll = -_at(plain_teacher, column, layout)[:, 0]
    tempered = plain_teacher
    if temperature != 1:
      tempered = _log_softmax(logits / temperature, layout)
    values, pulls = distill.terms(tempered, student, rule.how)
    values, total = _sum(values, layout), _sum(pulls, layout)
  else:
    values, pulls, total = _top_k_pulls(student, teacher, rule)
    teacher_nll = None
  # d log q_i / d logit_j = ((i == j) - q_j) / temperature. Summed over i with the pulls
  # this gives (pulls_j - q_j sum(pulls)) / temperature; see `distill.Terms`.
  d_logits = (rule.soft / temperature) * (pulls - jnp.exp(student) * total[:, None])
  if rule.hard:
    is_target = jnp.arange(capped.shape[-1]) == column
    d_logits += rule.hard * (jnp.exp(plain) - is_target)
  if layout.softcap is not None:  # d c tanh(x / c) / dx = 1 - tanh(x / c)^2
    d_logits *= 1 - jnp.square(capped / layout.softcap)
  return (values, nll, teacher_nll), d_logits


def _top_k_pulls(student: jax.Array, teacher: TopK, rule: _Rule):
  """Computes the divergence over K + 1 events (see `distill.top_k_divergence`).

  Returns:
    The divergence [C], the pulls of the tokens [C, V], and the sum of the pulls [C].
  """
  # `shard` is the number of columns on this device, `vocab` that of all devices.
  layout, shard = rule.layout, student.shape[-1]
  vocab = shard
  if layout.mesh is not None and layout.vocab_axis is not None:
    vocab *= layout.mesh.shape[layout.vocab_axis]
  columns = _columns(teacher.ids, shard, layout)
  events = _at(student, columns, layout)
  rows = jnp.arange(student.shape[0])[:, None]
  # If another shard has the token, its column is `shard`, out of range, and mode="drop"
  # writes nothing.
  others = student.at[rows, columns].set(-jnp.inf, mode="drop")
  has_rest = teacher.ids.shape[-1] < vocab
  if has_rest:
    rest = _log_sum(others, layout)[:, None]
    events = jnp.concatenate([events, rest], axis=-1)
  teacher_events = distill.events(teacher.logps, vocab)
  values, pulls = distill.terms(teacher_events, events, rule.how)
  if has_rest:
    # The pull of the event "any other token" is divided among these tokens in
    # proportion to their probabilities, because
    # d log(sum_j q_j) / d log q_i = q_i / sum_j q_j.
    by_column = pulls[:, -1:] * jnp.exp(others - events[:, -1:])
    at_ids = pulls[:, :-1]
  else:
    by_column, at_ids = jnp.zeros_like(student), pulls
  by_column = by_column.at[rows, columns].set(at_ids, mode="drop")
  return jnp.sum(values, axis=-1), by_column, jnp.sum(pulls, axis=-1)


def _columns(ids: jax.Array, shard: int, layout: Layout) -> jax.Array:
  """Returns the columns of token ids in this shard's logits.

  Tokens of other shards get `shard`, one past the last column.
  """
  if layout.vocab_axis is None:
    return ids
  columns = ids - jax.lax.axis_index(layout.vocab_axis) * shard
  return jnp.where((columns >= 0) & (columns < shard), columns, shard)


def _at(logps: jax.Array, columns: jax.Array, layout: Layout) -> jax.Array:
  """Returns the entries of logps [C, V] at the columns [C, K], as [C, K].

  A column out of range gives 0, so the sum over shards is the entry of the shard that
  has the token.
  """
  picked = jnp.take_along_axis(logps, columns, axis=-1, mode="fill", fill_value=0.0)
  return across(jax.lax.psum, picked, layout)


def _log_softmax(logits: jax.Array, layout: Layout) -> jax.Array:
  return logits - _log_sum(logits, layout)[:, None]


def _log_sum(logits: jax.Array, layout: Layout) -> jax.Array:
  """Returns log sum exp over the vocabulary, [C]; -inf if all logits are -inf."""
  top = across(jax.lax.pmax, jnp.max(logits, axis=-1), layout)
  top = jnp.where(jnp.isfinite(top), top, 0.0)  # -inf - -inf would be NaN
  return top + jnp.log(_sum(jnp.exp(logits - top[:, None]), layout))


def _sum(x: jax.Array, layout: Layout) -> jax.Array:
  return across(jax.lax.psum, jnp.sum(x, axis=-1), layout)
