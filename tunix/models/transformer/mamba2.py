"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 7), as in Nemotron.

One projection gives a gate, the channels of a short convolution and the steps. The
convolved channels are the values x and the vectors b and c of the recurrence, see
ops/state_space.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer import recurrence
from tunix.models.transformer.config import Mamba2Config, TransformerConfig
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.layers import RMSNorm
from tunix.models.transformer.visibility import Visibility
from tunix.ops import state_space
from tunix.ops.short_conv import causal_conv


class Mamba2(nnx.Module):
  """A recurrent mixer whose state is one matrix [P, N] per head.

  Attributes:
    in_proj: linear map [D, 2 H P + 2 G N + H]: gate, channels, steps.
    conv_kernel, conv_bias: filters [C, 1, K] and biases [C] of the C = H P + 2 G N
      channels; the bias may be None.
    dt_bias, a_log, skip: per head: bias of the steps, logarithm of the decay rate, and
      factor of x that is added to the output.
    norm: RMS norm over each of the G groups of outputs.
    out_proj: linear map [H P, D].
    sizes: see `Mamba2Config`.
  """

  def __init__(self, config: TransformerConfig, make: LayerMaker):
    m = config.mixer
    assert isinstance(m, Mamba2Config)
    self.sizes = m
    self.in_proj = make.linear(
      config.embed_dim, m.inner_dim + m.channels + m.num_heads, "in_out"
    )
    self.conv_kernel = make.small((m.channels, 1, m.conv_taps))
    bias = make.small((m.channels,), 0.0) if m.conv_bias else None
    self.conv_bias = nnx.data(bias)
    self.dt_bias = make.small((m.num_heads,), 1.0)
    self.a_log = make.small((m.num_heads,), jnp.log(jnp.arange(1.0, m.num_heads + 1)))
    self.skip = make.small((m.num_heads,), 1.0)
    self.norm: RMSNorm = make.norm(m.inner_dim, config.norm_eps)
    self.out_proj = make.linear(m.inner_dim, config.embed_dim, "out_in")

  def __call__(
    self,
    x: Float[Array, "B T D"],
    angles: Any,
    visible: Visibility,
    cached: Any = None,
    kind: Any = 0,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Returns the output and the layer's new cache; see `recurrence.run`."""
    del angles, kind
    m = self.sizes
    with jax.named_scope("in_proj"):
      at = (m.inner_dim, m.inner_dim + m.channels)
      gate, channels, steps = jnp.split(self.in_proj(x), at, axis=-1)
    y, cached = recurrence.run(
      self._step, self.empty_state, (channels, steps), visible, cached
    )
    y = self._grouped_norm(y * jax.nn.silu(gate.astype(jnp.float32)))
    with jax.named_scope("out_proj"):
      return self.out_proj(y.astype(x.dtype)), cached

  def empty_state(self, rows: int) -> dict[str, jax.Array]:
    """Returns the state of new rows: last inputs of the convolution, and matrices."""
    m = self.sizes
    return {
      "conv": jnp.zeros((rows, m.conv_taps - 1, m.channels), jnp.float32),
      "heads": jnp.zeros((rows, m.num_heads, m.head_dim, m.state_dim), jnp.float32),
    }

  def _step(self, state, inputs, valid, starts):
    """Runs rows of tokens, see `recurrence.Step`."""
    m, (channels, steps) = self.sizes, inputs
    with jax.named_scope("conv"):
      mixed, last = causal_conv(
        channels,
        self.conv_kernel[...][:, 0].T,
        before=state["conv"],
        valid=valid,
        starts=starts,
      )
      if self.conv_bias is not None:
        mixed = mixed + self.conv_bias[...].astype(jnp.float32)
      mixed = jax.nn.silu(mixed)
    at = (m.inner_dim, m.inner_dim + m.groups * m.state_dim)
    x, b, c = jnp.split(mixed, at, axis=-1)
    shape = x.shape[:2]
    x = x.reshape(*shape, m.num_heads, m.head_dim)
    b, c = (v.reshape(*shape, m.groups, m.state_dim) for v in (b, c))
    wide = lambda variable: variable[...].astype(jnp.float32)
    dt = jax.nn.softplus(steps.astype(jnp.float32) + wide(self.dt_bias))
    dt = jnp.where(valid[..., None], jnp.maximum(dt, m.least_step), 0.0)
    form = state_space.recurrent if shape[1] == 1 else state_space.chunked
    with jax.named_scope("state_space"):
      y, heads = form(
        x, dt, -jnp.exp(wide(self.a_log)), b, c, state=state["heads"], starts=starts
      )
    y = y + wide(self.skip)[:, None] * x
    return y.reshape(*shape, -1), {"conv": last, "heads": heads}

  def _grouped_norm(self, y: jax.Array) -> jax.Array:
    """Normalises each group of outputs; the scale has one entry for each output."""
    groups = y.reshape(*y.shape[:-1], self.sizes.groups, -1)
    mean = jnp.mean(groups * groups, axis=-1, keepdims=True)
    y = (groups * jax.lax.rsqrt(mean + self.norm.eps)).reshape(y.shape)
    return y * self.norm.scale[...].astype(jnp.float32)
