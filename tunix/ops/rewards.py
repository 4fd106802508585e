"""Rewards that depend on the length of a completion, in tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def overlong_penalty(
  lengths: Int[Array, " B"],
  max_tokens: int,
  buffer_tokens: int,
  penalty: float = 1.0,
) -> Float[Array, " B"]:
  """Returns a term <= 0 that is added to the rewards of long completions.

  It is 0 up to `max_tokens - buffer_tokens`, falls linearly to -penalty at
  `max_tokens`, and is -penalty beyond: the soft overlong punishment of DAPO
  (arXiv:2503.14476).

  Args:
    lengths: lengths of the completions, in tokens (not characters).
    max_tokens: length with the full penalty.
    buffer_tokens: number of tokens over which the penalty grows, in [1, max_tokens].
    penalty: largest penalty, in units of reward.

  Raises:
    ValueError: `buffer_tokens` is out of range, or `penalty` is negative.
  """
  if not 1 <= buffer_tokens <= max_tokens:
    raise ValueError(
      f"buffer_tokens={buffer_tokens} must be between 1 and max_tokens={max_tokens}"
    )
  if penalty < 0:
    raise ValueError(f"penalty={penalty} must not be negative: it is subtracted")
  over = lengths - (max_tokens - buffer_tokens)
  return -penalty * jnp.clip(over / buffer_tokens, 0.0, 1.0)
