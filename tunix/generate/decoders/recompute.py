"""Prefill and decode step for models without a cache: each token reruns the sequence.

This path is slow, but correct for any causal model. Rows are padded on the right. A
causal model does not attend to later tokens, so it needs neither a mask nor positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.generate.decoders.memory import rows_of
from tunix.models import calling

Memory = tuple[jax.Array, jax.Array]  # int32 [B, S] tokens, int32 [B] lengths


def prefill(
  model: nnx.Module, tokens: Int[Array, "B P"], mask: Bool[Array, "B P"], slots: int
) -> tuple[Float[Array, "B V"], Memory]:
  """Runs the prompts, which are padded on the left; see `cached.prefill`."""
  lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
  width = tokens.shape[1]
  # Rotates each row so that its prompt starts at slot 0 and its padding is behind it.
  source = (jnp.arange(width) + width - lengths[:, None]) % width
  moved = jnp.take_along_axis(tokens, source, axis=1)
  buffer = jnp.pad(moved, ((0, 0), (0, slots - width)))
  return _logits_at(model, buffer, lengths - 1), (buffer, lengths)


def step(
  model: nnx.Module, tokens: Int[Array, " B"], memory: Memory
) -> tuple[Float[Array, "B V"], Memory]:
  """Appends one token per row and reruns the rows; see `cached.step`."""
  buffer, lengths = memory
  buffer = buffer.at[jnp.arange(buffer.shape[0]), lengths].set(tokens)
  return _logits_at(model, buffer, lengths), (buffer, lengths + 1)


def repeat(model: nnx.Module, memory: Memory, source: Int[Array, " B"] | int) -> Memory:
  """Copies or reorders rows; see `memory.repeat`."""
  del model  # The state has the same two arrays for every model.
  return rows_of(memory[0], source), rows_of(memory[1], source)


def _logits_at(model: Any, tokens: jax.Array, index: jax.Array) -> jax.Array:
  """Returns float32 [B, V] logits at position `index` of each row."""
  adapted = calling.adapt(model)
  states = adapted.states(calling.Sequences(tokens))
  picked = jnp.take_along_axis(states, index[:, None, None], axis=1)
  return adapted.unembed(picked)[:, 0].astype(jnp.float32)
