"""How far a student's distribution of the next token is from a teacher's, in nats.

With p the teacher's and q the student's softmax(logits / temperature), per token:

  forward_kl  KL(p || q) = sum p (log p - log q): the student covers whatever the
              teacher may say (arXiv:1503.02531, up to a constant)
  reverse_kl  KL(q || p): the student keeps to what the teacher would say
  jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: the
              generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649, section
              2). Divided by beta it becomes the forward KL towards beta = 0, and by
              1 - beta the reverse KL towards 1; at 0 and 1 themselves it is these.

Everything here takes logits that exist; `distill_hidden` does the same from hidden
states without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Teacher probability that the words outside its top k have at least: 1 minus a sum in
# float32 is no better known.
LEAST_REST = 2.0**-23


class Divergence(NamedTuple):
  """Which divergence; `checked` refuses nonsense.

  Attributes:
    name: one of `DIVERGENCES`.
    beta: of jsd, in [0, 1]; the others take none.
    temperature: of both distributions, above 0.
  """

  name: str = "forward_kl"
  beta: float | None = None
  temperature: float = 1.0


class TopK(NamedTuple):
  """A teacher's most likely words.

  Attributes:
    ids: int32 [B, T, K], all different.
    logps: float32 [B, T, K], natural logs under softmax(logits / temperature) over the
      whole vocabulary.
  """

  ids: Any
  logps: Any


class Terms(NamedTuple):
  """A divergence word by word (or event by event).

  Attributes:
    values: they add up to the divergence.
    pulls: q dD/dq up to a multiple of q, so that the gradient in log q's logits is
      pulls - q sum(pulls).
  """

  values: jax.Array
  pulls: jax.Array


def checked(how: Divergence) -> Divergence:
  """The divergence, with jsd at an end replaced by what it is there.

  Raises:
    ValueError: an unknown name, a temperature that is not above 0, a beta out of range,
      missing from jsd, or given to another.
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
  """The divergence at every position, float32; no gradient reaches the teacher.

  Words of probability 0 (logit -inf) count 0 where the limit does; where the divergence
  is infinite (only the teacher excludes what the student says), it is above 1e20.

  Raises:
    ValueError: vocabularies of different sizes, or see `checked`.
  """
  check_same_words(student_logits.shape[-1], teacher_logits.shape[-1])
  how = checked(how)
  student = _log_softmax(student_logits, how.temperature)
  teacher = jax.lax.stop_gradient(_log_softmax(teacher_logits, how.temperature))
  return jnp.sum(terms(teacher, student, how).values, axis=-1)


def top_k(logits: Float[Array, "B T V"], k: int, temperature: float = 1.0) -> TopK:
  """The k most likely words of every position.

  Raises:
    ValueError: k is not in [1, V], or a temperature that is not above 0.
  """
  words = logits.shape[-1]
  if not 1 <= k <= words:
    raise ValueError(f"k is {k}: it must be from 1 to the {words} words there are")
  checked(Divergence(temperature=temperature))
  logps, ids = jax.lax.top_k(_log_softmax(logits, temperature), k)
  return TopK(ids.astype(jnp.int32), logps)


def top_k_divergence(
  student_logits: Float[Array, "B T V"],
  teacher: TopK,
  how: Divergence,
) -> Float[Array, "B T"]:
  """The divergence over K + 1 events: each of the teacher's K words, and "another one".

  What lies outside the top k is one event on both sides: the student must give it as
  much probability in all as the teacher does, and is free in how. So it never exceeds
  the divergence over all words, equals it at K = V, and no probability is cut off or
  scaled up.

  Args:
    student_logits: of the student.
    teacher: at the temperature of `how`.

  Raises:
    ValueError: see `checked`.
  """
  how = checked(how)
  student = _log_softmax(student_logits, how.temperature)
  said = jnp.take_along_axis(student, teacher.ids, axis=-1)
  if teacher.ids.shape[-1] < student.shape[-1]:
    hit = jnp.any(jax.nn.one_hot(teacher.ids, student.shape[-1], dtype=bool), axis=-2)
    rest = jax.nn.logsumexp(student, axis=-1, where=~hit, keepdims=True)
    said = jnp.concatenate([said, rest], axis=-1)
  wanted = events(teacher.logps, student.shape[-1])
  return jnp.sum(terms(wanted, said, how).values, axis=-1)


def events(logps: jax.Array, words: int) -> jax.Array:
  """Log-probabilities [..., K], followed by that of all other words together."""
  if logps.shape[-1] >= words:
    return logps
  rest = 1 - jnp.sum(jnp.exp(logps), axis=-1, keepdims=True)
  rest = jnp.log(jnp.maximum(rest, LEAST_REST))
  return jax.lax.stop_gradient(jnp.concatenate([logps, rest], axis=-1))


def terms(teacher: jax.Array, student: jax.Array, how: Divergence) -> Terms:
  """The divergence's terms from log-probabilities of equal shape."""
  return DIVERGENCES[how.name](teacher, student, how.beta)


def check_same_words(student: int, teacher: int) -> None:
  """Refuses vocabularies of different sizes.

  Raises:
    ValueError: they differ.
  """
  if student != teacher:
    raise ValueError(
      f"the student has {student} words and the teacher {teacher}: probabilities of "
      "words can only be compared where both mean the same by an id. Take models of "
      "one vocabulary"
    )


def _log_softmax(logits: jax.Array, temperature: float) -> jax.Array:
  """Logits of -inf become -1e30: still probability 0, but no gradient is NaN."""
  logits = jnp.maximum(logits.astype(jnp.float32) / temperature, -1e30)
  return jax.nn.log_softmax(logits)


def _forward(p_log: jax.Array, q_log: jax.Array, beta: float | None) -> Terms:
  del beta
  p = jnp.exp(p_log)
  return Terms(p * _gap(p_log, q_log), -p)


def _reverse(p_log: jax.Array, q_log: jax.Array, beta: float | None) -> Terms:
  del beta
  both = jnp.exp(q_log) * _gap(q_log, p_log)  # dD/dq is log q - log p + 1
  return Terms(both, both)


def _jensen_shannon(p_log: jax.Array, q_log: jax.Array, beta: float | None) -> Terms:
  assert beta is not None
  m_log = jnp.logaddexp(math.log(beta) + p_log, math.log1p(-beta) + q_log)
  from_student = (1 - beta) * jnp.exp(q_log) * _gap(q_log, m_log)
  from_teacher = beta * jnp.exp(p_log) * _gap(p_log, m_log)
  return Terms(from_teacher + from_student, from_student)


def _gap(a: jax.Array, b: jax.Array) -> jax.Array:
  """a - b, and 0 where a is -inf: such words count 0."""
  possible = a > -jnp.inf
  return jnp.where(possible, jnp.where(possible, a, 0.0) - b, 0.0)


# (log p, log q, beta) -> terms.
DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array, float | None], Terms]] = {
  "forward_kl": _forward,
  "reverse_kl": _reverse,
  "jsd": _jensen_shannon,
}
