"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 7), as in Nemotron.

One projection gives a gate, the channels of a short convolution and the steps. The
convolved channels are the values x and the vectors b and c of the recurrence, see
ops/recurrences/state_space.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix.models.transformer.config import Mamba2Config, TransformerConfig
from tunix.models.transformer.dense.layers import RMSNorm
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.recurrences.mixer import RecurrentMixer, float32
from tunix.ops.recurrences import state_space


class Mamba2(RecurrentMixer):
  """The mixer whose state is one matrix [P, N] per head, see mixer.py.

  The convolution has C = H P + 2 G N channels.

  Attributes:
    in_proj: linear map [D, 2 H P + 2 G N + H]: gate, channels, steps.
    skip: per head: factor of x that is added to the output.
    norm: RMS norm over each of the G groups of outputs.
    out_proj: linear map [H P, D].
    sizes: see `Mamba2Config`.
  """

  sizes: Mamba2Config

  def __init__(self, config: TransformerConfig, make: LayerMaker):
    m = config.mixer
    assert isinstance(m, Mamba2Config)
    self.sizes = m
    self.in_proj = make.linear(
      config.embed_dim, m.inner_dim + m.channels + m.num_heads, "in_out"
    )
    super().__init__(make, conv_bias=m.conv_bias)
    self.skip = make.small((m.num_heads,), 1.0)
    self.norm: RMSNorm = make.norm(m.inner_dim, config.norm_eps)
    self.out_proj = make.linear(m.inner_dim, config.embed_dim, "out_in")

  def project(self, x):
    m = self.sizes
    at = (m.inner_dim, m.inner_dim + m.channels)
    gate, channels, rates = jnp.split(self.in_proj(x), at, axis=-1)
    return (channels, rates), gate

  def recur(self, channels, rates, valid, *, state=None, starts=None):
    m, shape = self.sizes, valid.shape
    at = (m.inner_dim, m.inner_dim + m.groups * m.state_dim)
    x, b, c = jnp.split(channels, at, axis=-1)
    x = x.reshape(*shape, m.num_heads, m.head_dim)
    b, c = (v.reshape(*shape, m.groups, m.state_dim) for v in (b, c))
    dt = jnp.maximum(self.steps(*rates), m.least_step)
    dt = jnp.where(valid[..., None], dt, 0.0)
    form = state_space.recurrent if shape[1] == 1 else state_space.chunked
    with jax.named_scope("state_space"):
      y, after = form(x, dt, self.decay_rates(), b, c, state=state, starts=starts)
    y = y + float32(self.skip)[:, None] * x
    return y.reshape(*shape, -1), after

  def gated(self, y, gate):
    return self._grouped_norm(y * jax.nn.silu(gate.astype(jnp.float32)))

  def _grouped_norm(self, y: jax.Array) -> jax.Array:
    """Normalizes each group of outputs; the scale has one entry for each output."""
    groups = y.reshape(*y.shape[:-1], self.sizes.groups, -1)
    mean = jnp.mean(groups * groups, axis=-1, keepdims=True)
    y = (groups * jax.lax.rsqrt(mean + self.norm.eps)).reshape(y.shape)
    return y * float32(self.norm.scale)
