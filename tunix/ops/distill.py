"""Divergences between the next-token distributions of student and teacher, in nats.

Let p be the teacher's and q the student's softmax(logits / temperature). Per token:

  forward_kl  KL(p || q) = sum p (log p - log q): the student covers every token that
              the teacher may produce (arXiv:1503.02531, up to a constant)
  reverse_kl  KL(q || p): the student avoids tokens that the teacher would not produce
  jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: the
              generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649, section
              2). Divided by beta, it approaches the forward KL as beta goes to 0.
              Divided by 1 - beta, it approaches the reverse KL as beta goes to 1. At
              beta 0 and 1 it is defined as these limits

These functions take whole logits. `distill_hidden` computes the same values from hidden
states, with the logits of one chunk of tokens in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Lower bound of the teacher's probability outside its top k. This probability is
# computed as 1 minus a sum, and float32 numbers near 1 are 2^-23 apart.
LEAST_REST = 2.0**-23


class Divergence(NamedTuple):
  """The choice of a divergence; `checked` validates it.

  Attributes:
    name: a name of `DIVERGENCES`.
    beta: weight of jsd, in [0, 1]; None for the others.
    temperature: temperature of both distributions, above 0.
  """

  name: str = "forward_kl"
  beta: float | None = None
  temperature: float = 1.0


class TopK(NamedTuple):
  """The K most likely tokens of a teacher at every position.

  Attributes:
    ids: token ids, int32 [B, T, K], all different.
    logps: their log-probabilities in nats, float32 [B, T, K], under
      softmax(logits / temperature) over the whole vocabulary.
  """

  ids: Any
  logps: Any


class Terms(NamedTuple):
  """The terms of a divergence, one for each token of the vocabulary (or each event).

  Attributes:
    values: terms whose sum is the divergence D.
    pulls: dD / d log q = q dD/dq, plus any multiple of q. The gradient in the student's
      logits is pulls - q sum(pulls), in which a multiple of q cancels.
  """

  values: jax.Array
  pulls: jax.Array


def checked(how: Divergence) -> Divergence:
  """Returns the validated divergence, with jsd at beta 0 or 1 replaced by its limit.

  Raises:
    ValueError: the name is unknown, the temperature is not above 0, or beta is out of
      range, missing for jsd, or given to another divergence.
  """
  name, beta, temperature = how
  if name not in DIVERGENCES:
    raise ValueError(f"divergence is {name!r}: use one of {sorted(DIVERGENCES)}")
  if not (math.isfinite(temperature) and temperature > 0):
    raise ValueError(f"temperature is {temperature}: it must be a positive number")
  if (name == "jsd") != (beta is not None):
    raise ValueError(
      f"beta is {beta} with divergence {name!r}: jsd needs a beta in [0, 1], the other "
      "divergences take none"
    )
  if beta is not None and not 0 <= beta <= 1:
    raise ValueError(f"beta is {beta}: it must be in [0, 1]")
  if beta in (0, 1):
    return Divergence("reverse_kl" if beta else "forward_kl", None, temperature)
  return how


def divergence(
  student_logits: Float[Array, "*B V"],
  teacher_logits: Float[Array, "*B V"],
  how: Divergence,
) -> Float[Array, "*B"]:
  """Returns the divergence at every position, float32; the teacher gets no gradient.

  A token of probability 0 (logit -inf) contributes 0 if the limit is 0. If one side
  excludes a token that the other may produce, the divergence is infinite, and the
  result is a finite number above 1e20.

  Args:
    student_logits: logits of the student.
    teacher_logits: logits of the teacher.
    how: divergence and temperature.

  Raises:
    ValueError: the vocabularies differ in size, or `how` is invalid.
  """
  check_same_vocabulary(student_logits.shape[-1], teacher_logits.shape[-1])
  how = checked(how)
  student = _log_softmax(student_logits, how.temperature)
  teacher = jax.lax.stop_gradient(_log_softmax(teacher_logits, how.temperature))
  return jnp.sum(terms(teacher, student, how).values, axis=-1)


def top_k(logits: Float[Array, "B T V"], k: int, temperature: float = 1.0) -> TopK:
  """Returns the k most likely tokens of every position.

  Raises:
    ValueError: k is not in [1, V], or the temperature is not above 0.
  """
  vocab = logits.shape[-1]
  if not 1 <= k <= vocab:
    raise ValueError(f"k is {k}: it must be from 1 to the vocabulary size {vocab}")
  checked(Divergence(temperature=temperature))
  logps, ids = jax.lax.top_k(_log_softmax(logits, temperature), k)
  return TopK(ids.astype(jnp.int32), logps)


def top_k_divergence(
  student_logits: Float[Array, "B T V"],
  teacher: TopK,
  how: Divergence,
) -> Float[Array, "B T"]:
  """Returns the divergence over K + 1 events, float32.

  The events are the teacher's K tokens, and "any other token". The divergence compares
  the total probability of all other tokens; how the student distributes it among them
  does not matter. The result never exceeds the divergence over the whole vocabulary and
  equals it at K = V. No probability is discarded or rescaled.

  Args:
    student_logits: logits of the student.
    teacher: the teacher's tokens, at the temperature of `how`.
    how: divergence and temperature.

  Raises:
    ValueError: `how` is invalid.
  """
  how = checked(how)
  student = _log_softmax(student_logits, how.temperature)
  student_events = jnp.take_along_axis(student, teacher.ids, axis=-1)
  if teacher.ids.shape[-1] < student.shape[-1]:
    hit = jnp.any(jax.nn.one_hot(teacher.ids, student.shape[-1], dtype=bool), axis=-2)
    rest = jax.nn.logsumexp(student, axis=-1, where=~hit, keepdims=True)
    student_events = jnp.concatenate([student_events, rest], axis=-1)
  teacher_events = events(teacher.logps, student.shape[-1])
  return jnp.sum(terms(teacher_events, student_events, how).values, axis=-1)


def events(logps: jax.Array, vocab: int) -> jax.Array:
  """Appends the log-probability of all other tokens to [..., K] log-probabilities.

  Args:
    logps: log-probabilities of K tokens, in nats.
    vocab: size of the vocabulary; with K = vocab there is no other token.
  """
  if logps.shape[-1] >= vocab:
    return logps
  rest = 1 - jnp.sum(jnp.exp(logps), axis=-1, keepdims=True)
  rest = jnp.log(jnp.maximum(rest, LEAST_REST))
  return jax.lax.stop_gradient(jnp.concatenate([logps, rest], axis=-1))


def terms(teacher: jax.Array, student: jax.Array, how: Divergence) -> Terms:
  """Returns the terms of a divergence from log-probabilities of equal shape."""
  return DIVERGENCES[how.name](teacher, student, how.beta)


def check_same_vocabulary(student: int, teacher: int) -> None:
  """Refuses vocabularies of different sizes.

  Raises:
    ValueError: the sizes differ.
  """
  if student != teacher:
    raise ValueError(
      f"the student has {student} tokens in its vocabulary and the teacher {teacher}; "
      "probabilities can only be compared if an id is the same token for both. Use "
      "models with the same vocabulary"
    )


def _log_softmax(logits: jax.Array, temperature: float) -> jax.Array:
  """Returns log-probabilities; logits of -inf become -1e30.

  The probability of these tokens is still 0, but no gradient becomes NaN.
  """
  logits = jnp.maximum(logits.astype(jnp.float32) / temperature, -1e30)
  return jax.nn.log_softmax(logits)


def _forward(p_log: jax.Array, q_log: jax.Array, beta: float | None) -> Terms:
  del beta
  p = jnp.exp(p_log)
  return Terms(p * _gap(p_log, q_log), -p)


def _reverse(p_log: jax.Array, q_log: jax.Array, beta: float | None) -> Terms:
  del beta
  # dD/dq is log q - log p + 1. The 1 is a multiple of q in `pulls` and cancels, so that
  # terms and pulls are equal.
  both = jnp.exp(q_log) * _gap(q_log, p_log)
  return Terms(both, both)


def _jensen_shannon(p_log: jax.Array, q_log: jax.Array, beta: float | None) -> Terms:
  assert beta is not None
  # dD/dq is (1 - beta) (log q - log m): the derivatives of m add up to 0. So the pulls
  # are the terms of KL(q || m) alone.
  m_log = jnp.logaddexp(math.log(beta) + p_log, math.log1p(-beta) + q_log)
  from_student = (1 - beta) * jnp.exp(q_log) * _gap(q_log, m_log)
  from_teacher = beta * jnp.exp(p_log) * _gap(p_log, m_log)
  return Terms(from_teacher + from_student, from_student)


def _gap(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns a - b, and 0 where a is -inf, because these tokens contribute 0."""
  possible = a > -jnp.inf
  return jnp.where(possible, jnp.where(possible, a, 0.0) - b, 0.0)


# Name -> (log p, log q, beta) -> terms.
DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array, float | None], Terms]] = {
  "forward_kl": _forward,
  "reverse_kl": _reverse,
  "jsd": _jensen_shannon,
}
