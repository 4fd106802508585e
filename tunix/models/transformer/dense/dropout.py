"""Dropout masks that do not depend on restarts or on the size of micro-batches.

The state of a module is uint32 [*stack, 2]: the module's seed, and the number of rows
that it has processed. Row b of a call draws from (seed, rows + b), so each row of the
global batch gets the same mask with every size of micro-batch. Longer padding does not
change the mask either.

The state is a variable of the model and is saved and restored with the other random
state. The model counts the rows (`advance`), because a layer inside a scan or a remat
is a temporary copy that cannot store a count.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def new_state(key: jax.Array, stack: tuple[int, ...]) -> nnx.RngState:
  """Returns a state variable with a seed per layer of a stack, at row 0."""
  seeds = jax.random.bits(key, stack, jnp.uint32)
  value = jnp.stack([seeds, jnp.zeros_like(seeds)], axis=-1)
  spec = (None,) * value.ndim
  return nnx.RngState(value, tag="dropout", out_sharding=spec, eager_sharding=False)


def apply(x: jax.Array, state: jax.Array, rate: float) -> jax.Array:
  """Sets elements to 0 with probability `rate` and divides the others by 1 - rate.

  Args:
    x: [B, T, ...] with a mask per row, or sorted rows [M, ...] with one mask.
    state: state of one layer, uint32 [..., 2]; of several experts the first is used.
    rate: probability of dropping an element, in [0, 1).
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
  """Adds the rows of a call to the count of every layer whose dropout is on."""
  for _, module in nnx.iter_modules(layers):
    state = getattr(module, "lora_rng", None)
    if state is not None and not getattr(module, "deterministic", True):
      state.set_value(state[...].at[..., 1].add(jnp.uint32(rows)))


def is_on(model: nnx.Module) -> bool:
  """Returns True if a call would drop elements, in adapters or in flax's layers."""
  for _, module in nnx.iter_modules(model):
    rate = getattr(module, "lora_dropout", 0.0) or getattr(module, "rate", 0.0)
    if rate and getattr(module, "deterministic", True) is False:
      return True
  return False
