"""Rows that hold one prompt and several completions of it.

The prompt is computed once for all of its completions. Attention is the only part of
the decoder that treats these rows differently. It runs in two parts: the prompt attends
to itself, and each completion attends to the prompt and to itself, as if no other
completion existed.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tunix.ops import masks


@dataclasses.dataclass(frozen=True)
class SharedPrompt:
  """The layout [prompt | completion 1 | ... | completion G] of every row.

  Attributes:
    prompt: number of prompt tokens P >= 1. Prompts are padded on the left, so that a
      distance in slots is a distance in positions.
    copies: number of completions G >= 1, of R tokens each, padded on the right.
  """

  prompt: int
  copies: int

  def __post_init__(self):
    for name, value in vars(self).items():
      if value < 1:
        raise ValueError(f"SharedPrompt.{name} is {value}, it must be at least 1")

  def completion(self, tokens: int) -> int:
    """Returns the length R of a completion in rows of `tokens` tokens.

    Raises:
      ValueError: the number of tokens after the prompt is not a positive multiple of G.
    """
    size, rest = divmod(tokens - self.prompt, self.copies)
    if size < 1 or rest:
      raise ValueError(
        f"rows of {tokens} tokens are not a prompt of {self.prompt} and {self.copies} "
        "completions of one length each"
      )
    return size

  def positions(self, valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the positions of all tokens.

    The positions of a prompt count its valid tokens, and those of every completion
    continue them.
    """
    # Positions count from 0 at the first valid token. The position of the first
    # completion token is therefore the number of valid prompt tokens.
    prompt = valid[:, : self.prompt]
    places = jnp.arange(self.completion(valid.shape[1]), dtype=jnp.int32)
    after = jnp.sum(prompt, axis=1, dtype=jnp.int32)[:, None] + places
    return jnp.concatenate(
      [masks.positions_from_mask(prompt), jnp.tile(after, (1, self.copies))], axis=1
    )

  def prompts(self, x: jax.Array) -> jax.Array:
    """Returns the prompts of rows [B, T, ...] as [B, P, ...]."""
    return x[:, : self.prompt]

  def completions(self, x: jax.Array) -> jax.Array:
    """Returns the completions of rows [B, T, ...] as [B * G, R, ...]."""
    return x[:, self.prompt :].reshape(
      x.shape[0] * self.copies, self.completion(x.shape[1]), *x.shape[2:]
    )

  def sequences(self, x: jax.Array) -> jax.Array:
    """Returns each completion behind its prompt, [B, T, ...] as [B * G, P + R, ...]."""
    # The prompt's keys and values are repeated G times here; queries never are.
    prompts = self.prompts(x)[:, None]
    spread = (x.shape[0], self.copies, *prompts.shape[2:])
    prompts = jnp.broadcast_to(prompts, spread).reshape(-1, *prompts.shape[2:])
    return jnp.concatenate([prompts, self.completions(x)], axis=1)

  def rows(self, prompts: jax.Array, completions: jax.Array) -> jax.Array:
    """Joins [B, P, ...] and [B * G, R, ...] to rows [B, T, ...]."""
    b, rest = prompts.shape[0], completions.shape[2:]
    return jnp.concatenate([prompts, completions.reshape(b, -1, *rest)], axis=1)
