"""Cuts stacked weights into one array per layer, for layers that run unrolled."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# Largest number of elements per layer of arrays that `_opaque` slices: norm scales,
# biases and small adapters. Larger slices are inputs of matrix products, and XLA does
# not fuse a slice into these.
_SMALL = 2**14
# Fewest layers of a stack that `_opaque` slices. With fewer, the loops take longer to
# trace and to compile than the kernels that they save.
_MANY = 4


def layer_states(state: nnx.State) -> list[Any]:
  """Returns the state of each layer of a stack, whose arrays are `[L, ...]`."""
  leaves, treedef = jax.tree.flatten(state)
  layers = zip(*(unstack(leaf) for leaf in leaves))
  return [treedef.unflatten([x.squeeze(0) for x in layer]) for layer in layers]


def unstack(stack: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the L arrays `[1, ...]` of a stack `[L, ...]`.

  The transpose is one concatenation. Indexing layer by layer would add L zero-padded
  stacks in the backward pass instead.
  """
  if stack.shape[0] == 1:
    return (stack,)
  # Outside `jit` nothing is fused, and `_opaque` would compile a loop for each shape.
  layer_size = math.prod(stack.shape[1:])
  is_opaque = stack.shape[0] >= _MANY and layer_size <= _SMALL
  if not is_opaque or not isinstance(stack, jax.core.Tracer):
    return _slices(stack)
  # On CPU, XLA fuses a slice at a constant offset into each of its readers. The kernels
  # of L equal layers then differ by that offset alone and are compiled L times: 86k
  # lines of LLVM for 8 layers of 512 features instead of 57k, 7.4 CPU seconds instead
  # of 5.1.
  return jax.lax.platform_dependent(stack, cpu=_opaque, default=_slices)


def _slices(stack: jax.Array) -> tuple[jax.Array, ...]:
  return tuple(jax.lax.split(stack, (1,) * stack.shape[0]))


@jax.custom_jvp
def _opaque(stack: jax.Array) -> tuple[jax.Array, ...]:
  """Computes `_slices` in a loop with one iteration, so that XLA cannot fuse them.

  XLA would remove a loop whose number of iterations it knows. The number here depends
  on `first != first`, which is False, or True for NaN. The loop always runs once, but
  the compiler cannot derive this.
  """
  first = stack.reshape(-1)[0]
  rounds = 1 + jnp.minimum((first != first).astype(jnp.int32), 0)
  empty = tuple(jnp.zeros_like(part) for part in _slices(stack))
  _, parts = jax.lax.while_loop(
    lambda carry: carry[0] < rounds,
    lambda carry: (carry[0] + 1, _slices(stack)),
    (jnp.int32(0), empty),
  )
  return parts


@_opaque.defjvp
def _opaque_jvp(primals, tangents):
  return _opaque(*primals), _slices(*tangents)
