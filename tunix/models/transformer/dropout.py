"""Dropout masks that a restarted run draws again, however its batch is cut.

The state of a module is uint32 [*stack, 2]: a seed of its own, and the number of rows
that it has seen. Row b of a call draws from (seed, rows + b), so micro-batches of
another size give each row of the global batch the same mask, and longer padding does
not change it. The state is a variable of the model: it is saved and restored with the
other random state, and the model, not the layer, counts (`advance`), because a layer
inside a scan or a remat is a temporary copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def new_state(key: jax.Array, stack: tuple[int, ...]) -> nnx.RngState:
  """A variable with a seed for every layer of a stack, at row 0."""
  seeds = jax.random.bits(key, stack, jnp.uint32)
  value = jnp.stack([seeds, jnp.zeros_like(seeds)], axis=-1)
  spec = (None,) * value.ndim
  return nnx.RngState(value, tag="dropout", out_sharding=spec, eager_sharding=False)


def apply(x: jax.Array, state: jax.Array, rate: float) -> jax.Array:
  """Sets elements to 0 with probability `rate` and divides the others by 1 - rate.

  Args:
    x: [B, T, ...], masked row by row; [M, ...] of sorted rows gets one mask.
    state: uint32 [..., 2] of one layer; of several experts the first one's.
    rate: in [0, 1).
  """
  seed, rows = state.reshape(-1, 2)[0]
  key = jax.random.key(seed)
  if x.ndim < 3:
    keep = jax.random.bernoulli(jax.random.fold_in(key, rows), 1 - rate, x.shape)
  else:
    numbers = rows + jnp.arange(x.shape[0], dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(keys)
  return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def advance(layers: Any, rows: int) -> None:
  """Counts the rows of a call in the layers whose dropout is on."""
  for _, module in nnx.iter_modules(layers):
    state = getattr(module, "lora_rng", None)
    if state is not None and not getattr(module, "deterministic", True):
      state.set_value(state[...].at[..., 1].add(jnp.uint32(rows)))


def is_on(model: Any) -> bool:
  """Whether a call would drop something, in our layers or in flax's."""
  for _, module in nnx.iter_modules(model):
    rate = getattr(module, "lora_dropout", 0.0) or getattr(module, "rate", 0.0)
    if rate and getattr(module, "deterministic", True) is False:
      return True
  return False
