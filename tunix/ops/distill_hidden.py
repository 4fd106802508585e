"""Distillation losses from hidden states: memory follows the tokens, not the words.

A pass over chunks of tokens gives the loss and, as in `logprobs.weighted_nll`, its
gradients at once: the weights of the tokens are known beforehand. So a step multiplies
with the student's unembedding three times (logits, two gradients) and with the
teacher's once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.ops import distill
from tunix.ops.distill import Divergence, TopK
from tunix.ops.vocab_chunks import (
  ONE_DEVICE,
  Layout,
  across,
  chunk_logits,
  for_batch,
  gradient_spec,
  gradients,
  on_mesh,
  over_tokens,
  reduced,
  table_spec,
  words_in,
)


class States(NamedTuple):
  """What makes up a teacher's logits.

  Attributes:
    hidden: [B, T, D'] final hidden states; D' need not be the student's D.
    table: [D', V], or [V, D'] if its layout says so.
  """

  hidden: Any
  table: Any


class Distillation(NamedTuple):
  """What `weighted_distillation` gives.

  Attributes:
    total: the loss, differentiable.
    divergence: [B, T] float32, in nats.
    nll: [B, T] -log q(target) of the student at temperature 1.
    teacher_nll: [B, T] of the teacher; None for a TopK.
  """

  total: jax.Array
  divergence: jax.Array
  nll: jax.Array
  teacher_nll: jax.Array | None


class _Rule(NamedTuple):
  """What a pass computes; fixed when it is traced."""

  how: Divergence
  soft: float
  hard: float
  layout: Layout
  teacher: Layout
  hidden: bool = False  # whether its gradient is wanted
  table: bool = False


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
  """sum over tokens of weights (soft D(teacher, student) - hard log q(target)).

  Equals the plain form on logits of both models, in float32 whatever the inputs are.
  Differentiable in `hidden`, `table` and `weights`; only the gradients asked for are
  computed (not that of the table in LoRA training).

  Args:
    hidden: the student's final hidden states.
    table: its unembedding, [D, V] or as `layout` says.
    teacher: constants: hidden states and unembedding, or the most likely words at the
      temperature of `how` (see `distill.top_k_divergence`).
    targets: the right token at each position, in [0, V).
    weights: 0 on padding.
    how: the divergence and its temperature.
    soft, hard: factors; T^2 in `soft` keeps the size of gradients at temperature T.
    layout: sharding, soft cap and chunk size of the student.
    teacher_layout: of its soft cap and its table, `transposed` or not.

  Raises:
    ValueError: vocabularies of different sizes, or see `distill.checked`.
  """
  if isinstance(teacher, States):
    theirs = words_in(teacher.table, teacher_layout)
    distill.check_same_words(words_in(table, layout), theirs)
  layout = for_batch(layout, hidden.shape)
  # One pass over both: the teacher's words are split as the student's are.
  spread = {
    f: getattr(layout, f) for f in ("mesh", "batch_axes", "token_axis", "vocab_axis")
  }
  rule = _Rule(
    distill.checked(how), soft, hard, layout, teacher_layout._replace(**spread)
  )
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
  """`distill.top_k` of logits that never exist all at once; no gradient.

  Raises:
    ValueError: k is not in [1, V], or a temperature that is not above 0.
  """
  words = words_in(table, layout)
  layout = for_batch(layout, hidden.shape)._replace(vocab_axis=None)

  def local(hidden, table):
    def chunk(hidden):
      logits = chunk_logits(hidden, table, layout)
      return distill.top_k(logits, k, temperature), None

    shape = hidden.shape[:2]
    return over_tokens(chunk, (hidden,), shape, words, None, layout)[0]

  batch = layout.tokens
  out = on_mesh(local, layout, (batch, table_spec(layout)), batch)(hidden, table)
  return jax.lax.stop_gradient(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _distillation(hidden, table, teacher, targets, weights, rule):
  by_token, _, _ = _run(hidden, table, teacher, targets, weights, rule)
  return _total(by_token, weights, rule), by_token


def _total(by_token, weights, rule: _Rule) -> jax.Array:
  return jnp.sum(weights * _values(by_token, rule))


def _values(by_token, rule: _Rule) -> jax.Array:
  return rule.soft * by_token[0] + rule.hard * by_token[1]


def _forward(hidden, table, teacher, targets, weights, rule: _Rule):
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
  cotangent = cotangents[0]
  if not isinstance(cotangent, jax.Array):  # symbolic zero
    cotangent = jnp.zeros(())

  def scaled(gradient):
    return None if gradient is None else (gradient * cotangent).astype(gradient.dtype)

  return scaled(d_hidden), scaled(d_table), None, None, values * cotangent


_distillation.defvjp(_forward, _backward, symbolic_zeros=True)


def _run(hidden, table, teacher, targets, weights, rule: _Rule):
  """(values by token, gradients of the weighted sum in hidden and table or None)."""
  layout = rule.layout
  batch = layout.tokens
  is_states = isinstance(teacher, States)
  words = States(batch, table_spec(rule.teacher)) if is_states else TopK(batch, batch)
  by_token = (batch, batch, batch if is_states else None)
  out_specs = (
    by_token,
    batch if rule.hidden else None,
    gradient_spec(layout, table.shape) if rule.table else None,
  )
  local = functools.partial(_local, rule=rule)
  in_specs = (batch, table_spec(layout), words, batch, batch)
  return on_mesh(local, layout, in_specs, out_specs)(
    hidden, table, teacher, targets, weights
  )


def _local(hidden, table, teacher, targets, weights, *, rule: _Rule):
  """The tokens of one device."""
  layout = rule.layout
  theirs = teacher.table if isinstance(teacher, States) else None
  by_row = teacher._replace(table=None) if isinstance(teacher, States) else teacher

  def chunk(hidden, teacher, targets, weights):
    by_token, d_logits = _chunk(hidden, table, teacher, theirs, targets, rule)
    d_logits = d_logits.astype(hidden.dtype)
    factor = weights.astype(jnp.float32)[:, None]
    wanted = rule.hidden, rule.table
    d_hidden, d_table = gradients(d_logits, factor, hidden, table, layout, wanted)
    return (by_token, d_hidden), d_table

  start = jnp.zeros(table.shape, jnp.float32) if rule.table else None
  rows = (hidden, by_row, targets, weights)
  (by_token, d_hidden), d_table = over_tokens(
    chunk, rows, targets.shape, words_in(table, layout), start, layout
  )
  return by_token, *reduced(d_hidden, d_table, hidden, table, layout)


def _chunk(hidden, table, teacher, theirs, targets, rule: _Rule):
  """Values [C] of one chunk, and the gradient [C, V] of soft D - hard log q in the
  student's logits."""
  layout, warmth = rule.layout, rule.how.temperature
  column = _columns(targets[:, None], words_in(table, layout), layout)
  capped = chunk_logits(hidden, table, layout)
  plain = _log_softmax(capped, layout)
  student = plain if warmth == 1 else _log_softmax(capped / warmth, layout)
  nll = -_at(plain, column, layout)[:, 0]
  if isinstance(teacher, States):
    logits = chunk_logits(teacher.hidden, theirs, rule.teacher)
    plain_teacher = _log_softmax(logits, layout)
    teacher_nll = -_at(plain_teacher, column, layout)[:, 0]
    warm = plain_teacher if warmth == 1 else _log_softmax(logits / warmth, layout)
    values, pulls = distill.terms(warm, student, rule.how)
    values, total = _sum(values, layout), _sum(pulls, layout)
  else:
    values, pulls, total = _top_k_pulls(student, teacher, rule)
    teacher_nll = None
  d_logits = (rule.soft / warmth) * (pulls - jnp.exp(student) * total[:, None])
  if rule.hard:
    right = jnp.arange(capped.shape[-1]) == column
    d_logits += rule.hard * (jnp.exp(plain) - right)
  if layout.softcap is not None:
    d_logits *= 1 - jnp.square(capped / layout.softcap)
  return (values, nll, teacher_nll), d_logits


def _top_k_pulls(student: jax.Array, teacher: TopK, rule: _Rule):
  """(divergence [C], pulls [C, V] by word, their sum [C]) over K + 1 events."""
  layout, shard = rule.layout, student.shape[-1]
  shards = 1 if layout.vocab_axis is None else layout.mesh.shape[layout.vocab_axis]  # pyright: ignore[reportOptionalMemberAccess]
  words = shard * shards
  columns = _columns(teacher.ids, shard, layout)
  events = _at(student, columns, layout)
  rows = jnp.arange(student.shape[0])[:, None]
  # A column out of range, of a word that another shard holds, is dropped.
  others = student.at[rows, columns].set(-jnp.inf, mode="drop")
  has_rest = teacher.ids.shape[-1] < words
  if has_rest:
    rest = _log_sum(others, layout)[:, None]
    events = jnp.concatenate([events, rest], axis=-1)
  theirs = distill.events(teacher.logps, words)
  values, pulls = distill.terms(theirs, events, rule.how)
  if has_rest:  # each other word in proportion
    by_word = pulls[:, -1:] * jnp.exp(others - events[:, -1:])
    at_ids = pulls[:, :-1]
  else:
    by_word, at_ids = jnp.zeros_like(student), pulls
  by_word = by_word.at[rows, columns].set(at_ids, mode="drop")
  return jnp.sum(values, axis=-1), by_word, jnp.sum(pulls, axis=-1)


def _columns(ids: jax.Array, shard: int, layout: Layout) -> jax.Array:
  """Columns of this shard's logits; `shard`, which is none, for words of the others."""
  if layout.vocab_axis is None:
    return ids
  columns = ids - jax.lax.axis_index(layout.vocab_axis) * shard
  return jnp.where((columns >= 0) & (columns < shard), columns, shard)


def _at(logps: jax.Array, columns: jax.Array, layout: Layout) -> jax.Array:
  """logps [C, V] at columns [C, K], from whichever shard has them."""
  picked = jnp.take_along_axis(logps, columns, axis=-1, mode="fill", fill_value=0.0)
  return across(jax.lax.psum, picked, layout)


def _log_softmax(logits: jax.Array, layout: Layout) -> jax.Array:
  return logits - _log_sum(logits, layout)[:, None]


def _log_sum(logits: jax.Array, layout: Layout) -> jax.Array:
  """log of the sum of exp over all words, [C]; of nothing but -inf it is -inf."""
  top = across(jax.lax.pmax, jnp.max(logits, axis=-1), layout)
  top = jnp.where(jnp.isfinite(top), top, 0.0)
  return top + jnp.log(_sum(jnp.exp(logits - top[:, None]), layout))


def _sum(x: jax.Array, layout: Layout) -> jax.Array:
  return across(jax.lax.psum, jnp.sum(x, axis=-1), layout)
