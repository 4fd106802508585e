"""Parts of all recurrent mixers: projections, a short convolution, states of heads.

A mixer projects its input into channels, gates and rates. A short convolution mixes the
channels of neighboring tokens, a recurrence runs them head by head, and the gated and
normalized outputs are projected back. mamba2.py and delta_net.py have the parts that
differ.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from tunix.models.transformer.config import DeltaNetConfig, Mamba2Config
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.recurrences import recurrence
from tunix.models.transformer.visibility import Visibility
from tunix.ops.recurrences.short_conv import causal_conv


class RecurrentMixer(nnx.Module):
  """A mixer whose state is one matrix per head.

  A subclass makes its projections of the input before it calls `__init__` here, then
  its norm and `out_proj`, and has `project`, `recur` and `gated`.

  Attributes:
    sizes: a `Mamba2Config` or a `DeltaNetConfig`.
    conv_kernel, conv_bias: filters [C, 1, K] and biases [C] of the C channels; the bias
      may be None.
    dt_bias, a_log: per head: bias of the steps, and logarithm of the decay rate.
    out_proj: linear map from the heads' outputs to [D].
  """

  sizes: Mamba2Config | DeltaNetConfig
  out_proj: Linear

  def __init__(self, make: LayerMaker, *, conv_bias: bool):
    m = self.sizes
    self.conv_kernel = make.small((m.channels, 1, m.conv_taps))
    bias = make.small((m.channels,), 0.0) if conv_bias else None
    self.conv_bias = nnx.data(bias)
    self.dt_bias = make.small((m.num_heads,), 1.0)
    self.a_log = make.small((m.num_heads,), jnp.log(jnp.arange(1.0, m.num_heads + 1)))

  @abc.abstractmethod
  def project(
    self, x: Float[Array, "B T D"]
  ) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns (channels [B, T, C], rates [B, T, H], ...) and the gate [B, T, *]."""

  @abc.abstractmethod
  def recur(
    self,
    channels: Float[Array, "B T C"],
    rates: tuple[jax.Array, ...],
    valid: jax.Array,
    *,
    state: jax.Array | None = None,
    starts: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the heads' outputs and states.

    `state` and `starts` are those of `recurrence.Step`.
    """

  @abc.abstractmethod
  def gated(self, y: jax.Array, gate: jax.Array) -> Float[Array, "B T I"]:
    """Returns the normalized and gated outputs of the heads."""

  def __call__(
    self,
    x: Float[Array, "B T D"],
    angles: object,
    visible: Visibility,
    cached: object = None,
    kind: object = 0,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Returns the output and the layer's new cache; see `recurrence.run`."""
    del angles, kind
    with jax.named_scope("in_proj"):
      inputs, gate = self.project(x)
    y, cached = recurrence.run(self._step, self.empty_state, inputs, visible, cached)
    y = self.gated(y, gate)
    with jax.named_scope("out_proj"):
      return self.out_proj(y.astype(x.dtype)), cached

  def empty_state(self, rows: int) -> dict[str, jax.Array]:
    """Returns the state of new rows: last inputs of the convolution, and matrices."""
    m = self.sizes
    return {
      "conv": jnp.zeros((rows, m.conv_taps - 1, m.channels), jnp.float32),
      "heads": jnp.zeros((rows, m.num_heads, *m.state_shape), jnp.float32),
    }

  def advanced(self, state: Any, inputs: object, valid: Bool[Array, "B T"]) -> Any:
    """Returns the state after the valid tokens, which come first in each row.

    Args:
      state: a tree of arrays [B, ...].
      inputs: what `project` returned for the tokens, a tree of arrays [B, T, ...].
      valid: the tokens that count.
    """
    return self._step(state, inputs, valid, None)[1]

  def _step(self, state, inputs, valid, starts):
    """Runs rows of tokens, see `recurrence.Step`."""
    channels, *rates = inputs
    kernel = self.conv_kernel[...][:, 0].T
    with jax.named_scope("conv"):
      mixed, last = causal_conv(
        channels, kernel, before=state["conv"], valid=valid, starts=starts
      )
      if self.conv_bias is not None:
        mixed = mixed + self.conv_bias[...].astype(jnp.float32)
      mixed = jax.nn.silu(mixed)
    y, heads = self.recur(
      mixed, tuple(rates), valid, state=state["heads"], starts=starts
    )
    return y, {"conv": last, "heads": heads}

  def steps(self, rates: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Returns the positive steps of the heads, in float32."""
    return jax.nn.softplus(rates.astype(jnp.float32) + float32(self.dt_bias))

  def decay_rates(self) -> Float[Array, " H"]:
    """Returns the rates that multiply the steps, below 0."""
    return -jnp.exp(float32(self.a_log))


def float32(variable: nnx.Variable) -> jax.Array:
  """Returns the value of a variable in float32."""
  return variable[...].astype(jnp.float32)
