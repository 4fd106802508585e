"""A moving average of the trained weights, kept in the optimizer's state.

The state of the optimizer is in every checkpoint and lies on the devices of the
weights. The average is therefore resumed exactly and sharded like them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tunix.utils import checks


class Averaged(NamedTuple):
  """The state of `averaging`.

  Attributes:
    inner: state of the optimizer.
    average: average of each trained weight, at least float32: a small rate would vanish
      in the rounding of bfloat16.
  """

  inner: Any
  average: Any


def averaging(
  optimizer: optax.GradientTransformation, rate: float
) -> optax.GradientTransformation:
  """Returns an optimizer that also averages the weights.

  After each update, average += rate (weights - average). The average begins at the
  first weights. It costs the memory of the trained weights, 4 bytes for each.

  Args:
    optimizer: makes the updates, which do not change.
    rate: in [0, 1]. 1: the average is the weights; 0: it stays at the first weights.

  Raises:
    ValueError: the rate is not in [0, 1].
  """
  checks.number("rate", rate, checks.SHARE)

  def init(params: Any) -> Averaged:
    # A copy: a step donates the weights and this state, which must not share memory.
    return Averaged(optimizer.init(params), jax.tree.map(_wide_copy, params))

  def update(updates: Any, state: Any, params: Any = None):
    updates, inner = optimizer.update(updates, state.inner, params)
    new = optax.apply_updates(params, updates)

    def move(old, x):
      return old + rate * (x.astype(old.dtype) - old)

    return updates, Averaged(inner, jax.tree.map(move, state.average, new))

  return optax.GradientTransformation(init, update)


def average_of(state: object) -> Any:
  """Returns the average in a state of `averaging`, nested like the trained weights.

  Raises:
    ValueError: the optimizer keeps no average.
  """
  if not isinstance(state, Averaged):
    raise ValueError(
      f"the optimizer has the state {type(state).__name__}, without an average of the "
      "weights. Wrap it: tunix.sft.averages.averaging(optimizer, rate=0.05)"
    )
  return state.average


def _wide_copy(x: jax.Array) -> jax.Array:
  return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)
