"""The MLPs of a layer, also as experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models.transformer.dense.layers import Linear, recomputed
from tunix.ops.vocabulary import invariant

Activation = Callable[[jax.Array], jax.Array]
Gate = Callable[[jax.Array, jax.Array], jax.Array]
Product = Callable[[Linear, jax.Array], jax.Array]


class MLP(nnx.Module):
  """down(activation(up(x))).

  Attributes:
    up_proj, down_proj: linear maps [D, F] and [F, D].
    activation: the activation function.
  """

  def __init__(self, up_proj: Linear, down_proj: Linear, activation: Activation):
    self.up_proj = up_proj
    self.down_proj = down_proj
    self.activation = activation

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(self.hidden(x, lambda linear, x: linear(x)))

  def hidden(self, x: jax.Array, product: Product) -> jax.Array:
    """Returns the hidden units.

    Args:
      x: the input.
      product: applies a linear map; for experts see `Linear.grouped`.
    """
    out = self.activation(product(self.up_proj, x))
    return invariant.kept(out, self.up_proj.invariant)


class GatedMLP(MLP):
  """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202).

  Attributes:
    gate_proj: linear map [D, F].
    gating: a function of gate(x) and up(x) in place of activation(gate) * up, or None.
  """

  def __init__(
    self,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation = jax.nn.silu,
    gating: Gate | None = None,
  ):
    self.gate_proj = gate_proj
    super().__init__(up_proj, down_proj, activation)
    self.gating = gating

  def hidden(self, x: jax.Array, product: Product) -> jax.Array:
    """Returns the hidden units, see `MLP.hidden`."""
    gate, up = product(self.gate_proj, x), product(self.up_proj, x)
    out = gated(gate, up, self.activation, self.gating)
    return invariant.kept(out, self.up_proj.invariant)


class FusedGatedMLP(nnx.Module):
  """A `GatedMLP` with one map for gate and up projection.

  Attributes:
    gate_up_proj: its outputs 2 i and 2 i + 1 are gate and up of hidden unit i. A
      contiguous shard of the outputs therefore holds whole hidden units.
    halves: if True, the first half of the outputs is the gate instead, and the second
      half is up.
    down_proj, activation, gating: see `GatedMLP`.
  """

  def __init__(
    self,
    gate_up_proj: Linear,
    down_proj: Linear,
    activation: Activation = jax.nn.silu,
    gating: Gate | None = None,
    *,
    halves: bool = False,
  ):
    self.gate_up_proj = gate_up_proj
    self.halves = halves
    self.down_proj = down_proj
    self.activation = activation
    self.gating = gating

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(self.hidden(x, lambda linear, x: linear(x)))

  def hidden(self, x: jax.Array, product: Product) -> jax.Array:
    """Returns the hidden units, see `MLP.hidden`."""
    both = product(self.gate_up_proj, x)
    if self.halves:
      gate, up = jnp.split(both, 2, axis=-1)
    else:
      # Not both[..., ::2]: its gradient, a pad between elements, takes the TPU compiler
      # minutes and more than 24 GB from 2,048 hidden units on.
      pairs = both.reshape(*both.shape[:-1], -1, 2)
      gate, up = pairs[..., 0], pairs[..., 1]
    out = gated(gate, up, self.activation, self.gating)
    return invariant.kept(out, self.gate_up_proj.invariant)


def gated(
  gate: jax.Array, up: jax.Array, activation: Activation, gating: Gate | None
) -> jax.Array:
  """Returns gating(gate, up), or activation(gate) * up without a `gating`."""
  combine = gating or (lambda gate, up: activation(gate) * up)
  return recomputed(combine, gate, up)
