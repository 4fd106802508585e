"""Decoding for models without a cache: every token runs the whole sequence again.

Slow, and right for any causal model: rows are padded on the right, where a causal model
never looks, so that neither masks nor positions have to be told to it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.generate.memory import rows_of
from tunix.models import calling

Memory = tuple[jax.Array, jax.Array]  # int32 [B, S] tokens, int32 [B] lengths


def prefill(
  model: Any, tokens: Int[Array, "B P"], mask: Bool[Array, "B P"], slots: int
) -> tuple[Float[Array, "B V"], Memory]:
  """Like `decode.prefill`: prompts come padded on the left."""
  lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
  width = tokens.shape[1]
  source = (jnp.arange(width) + width - lengths[:, None]) % width
  moved = jnp.take_along_axis(tokens, source, axis=1)
  buffer = jnp.pad(moved, ((0, 0), (0, slots - width)))
  return _logits_at(model, buffer, lengths - 1), (buffer, lengths)


def step(
  model: Any, tokens: Int[Array, " B"], memory: Memory
) -> tuple[Float[Array, "B V"], Memory]:
  """Like `decode.step`."""
  buffer, lengths = memory
  buffer = buffer.at[jnp.arange(buffer.shape[0]), lengths].set(tokens)
  return _logits_at(model, buffer, lengths), (buffer, lengths + 1)


def repeat(model: Any, memory: Memory, source: Int[Array, " B"] | int) -> Memory:
  """Like `memory.repeat`."""
  del model  # what is carried is ours
  return rows_of(memory[0], source), rows_of(memory[1], source)


def _logits_at(model: Any, tokens: jax.Array, index: jax.Array) -> jax.Array:
  """float32 [B, V] of position `index` of each row."""
  adapted = calling.adapt(model)
  states = adapted.states(calling.Sequences(tokens))
  picked = jnp.take_along_axis(states, index[:, None, None], axis=1)
  return adapted.unembed(picked)[:, 0].astype(jnp.float32)
