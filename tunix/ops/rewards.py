"""Rewards shaped by the length of a completion, in tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def overlong_penalty(
  lengths: Int[Array, " B"],
  max_tokens: int,
  buffer_tokens: int,
  penalty: float = 1.0,
) -> Float[Array, " B"]:
  """What to add to the reward of completions that come near the limit (<= 0).

  0 up to `max_tokens - buffer_tokens`, then linear down to -penalty at `max_tokens`,
  and -penalty beyond: the soft overlong punishment of DAPO (arXiv:2503.14476).

  Args:
    lengths: completion lengths, in tokens (not characters).
    max_tokens: the length with the full penalty.
    buffer_tokens: over how many tokens the penalty grows, in [1, max_tokens].
    penalty: the largest penalty, in units of reward.

  Raises:
    ValueError: a buffer that does not fit, or a negative penalty.
  """
  if not 1 <= buffer_tokens <= max_tokens:
    raise ValueError(
      f"buffer_tokens={buffer_tokens} must be between 1 and max_tokens={max_tokens}"
    )
  if penalty < 0:
    raise ValueError(f"penalty={penalty} must not be negative: it is subtracted")
  over = lengths - (max_tokens - buffer_tokens)
  return -penalty * jnp.clip(over / buffer_tokens, 0.0, 1.0)
