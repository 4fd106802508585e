"""Rows in which several completions of one prompt follow it: what is computed of the
prompt is computed once.

Everything but attention takes such a row as it is. Attention runs in two parts: the
prompt on itself, and each completion on the prompt and itself, as if it stood alone
behind it.
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
    prompt: P, tokens of the prompt, padded on the left, so that a distance in slots is
      one in positions; at least 1.
    copies: G, completions of R tokens each, padded on the right; at least 1.
  """

  prompt: int
  copies: int

  def __post_init__(self):
    for name in ("prompt", "copies"):
      value = getattr(self, name)
      if value < 1:
        raise ValueError(f"SharedPrompt.{name} is {value}, it must be at least 1")

  def completion(self, tokens: int) -> int:
    """R, of rows with `tokens` tokens.

    Raises:
      ValueError: they hold no whole completions.
    """
    size, rest = divmod(tokens - self.prompt, self.copies)
    if size < 1 or rest:
      raise ValueError(
        f"rows of {tokens} tokens are not a prompt of {self.prompt} and {self.copies} "
        "completions of one length each"
      )
    return size

  def positions(self, valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Each completion's go on from the prompt's, which count its valid tokens."""
    prompt = valid[:, : self.prompt]
    places = jnp.arange(self.completion(valid.shape[1]), dtype=jnp.int32)
    after = jnp.sum(prompt, axis=1, dtype=jnp.int32)[:, None] + places
    return jnp.concatenate(
      [masks.positions_from_mask(prompt), jnp.tile(after, (1, self.copies))], axis=1
    )

  def prompts(self, x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B, P, ...]."""
    return x[:, : self.prompt]

  def completions(self, x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B * G, R, ...]."""
    return x[:, self.prompt :].reshape(
      x.shape[0] * self.copies, self.completion(x.shape[1]), *x.shape[2:]
    )

  def sequences(self, x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B * G, P + R, ...]: every completion behind its prompt."""
    prompts = self.prompts(x)[:, None]
    spread = (x.shape[0], self.copies, *prompts.shape[2:])
    prompts = jnp.broadcast_to(prompts, spread).reshape(-1, *prompts.shape[2:])
    return jnp.concatenate([prompts, self.completions(x)], axis=1)

  def rows(self, prompts: jax.Array, completions: jax.Array) -> jax.Array:
    """[B, P, ...] and [B * G, R, ...] -> [B, T, ...]."""
    b, rest = prompts.shape[0], completions.shape[2:]
    return jnp.concatenate([prompts, completions.reshape(b, -1, *rest)], axis=1)
