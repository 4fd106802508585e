"""Prompt lookup, for speculative decoding: proposes what followed the same tokens.

A completion that copies from its prompt, as a summary or an edit does, repeats long
parts of its own history (Saxena 2023, "Prompt Lookup Decoding"). The history is
searched for an earlier place with the same last tokens; what followed there is
proposed. If there is none, the last token may replace another one: what followed the
token after the same earlier tokens is proposed. A wrong proposal costs its share of a
round and nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Lengths of the end of the history that are searched for, the longest first.
_LENGTHS = (3, 2)
# Length of what comes before a token that replaces another one.
_BEFORE_EDIT = 3
NONE = -1  # in place of a draft where the history has no such place


def propose(
  history: Int[Array, "B M"], position: Int[Array, " B"], count: int
) -> Int[Array, "B D"]:
  """Returns the tokens that followed the latest earlier place with the same end.

  Without such a place, it is one whose end differs in the last token only.

  Args:
    history: tokens of each row.
    position: position of each row's last token.
    count: number D of proposed tokens; after a place near the end there are fewer, and
      the others are NONE.
  """
  if not count:
    return jnp.zeros((position.shape[0], 0), jnp.int32)
  latest = _latest(history, position - 1, _BEFORE_EDIT)
  place = jnp.where(latest >= 0, latest + 1, NONE)
  for length in reversed(_LENGTHS):
    latest = _latest(history, position, length)
    place = jnp.where(latest >= 0, latest, place)
  at = place[:, None] + jnp.arange(count)
  tokens = jnp.take_along_axis(history, jnp.clip(at, 0, history.shape[1] - 1), axis=1)
  return jnp.where((place[:, None] >= 0) & (at <= position[:, None]), tokens, NONE)


def _latest(history: jax.Array, position: jax.Array, length: int) -> jax.Array:
  """Returns the place after the latest earlier copy of the last `length` tokens."""
  width = history.shape[1]
  # ends[b, i]: the `length` tokens up to and including i equal those up to `position`.
  ends = jnp.ones(history.shape, bool)
  for back in range(length):
    last = jnp.take_along_axis(
      history, jnp.maximum(position - back, 0)[:, None], axis=1
    )
    same = history == last
    ends &= jnp.pad(same, ((0, 0), (back, 0)))[:, :width]
  index = jnp.arange(width)
  ends &= (index < position[:, None]) & (index >= length - 1)
  ends &= (position >= length)[:, None]
  return jnp.max(jnp.where(ends, index + 1, NONE), axis=1)
