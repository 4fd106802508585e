"""The mixer of gated delta nets (Yang et al. 2024, arXiv:2412.06464), as in Qwen3.5.

A short convolution mixes queries, keys and values. Queries and keys are normalized to
length 1. The heads' outputs are normalized and multiplied by a gate. The recurrence is
in ops/recurrences/delta_rule.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix.models.transformer.config import DeltaNetConfig, TransformerConfig
from tunix.models.transformer.dense.layers import RMSNorm
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.recurrences.mixer import RecurrentMixer
from tunix.ops.recurrences import delta_rule

# Epsilon of the lengths of queries and keys, the same in all checkpoints.
_UNIT_EPS = 1e-6


class GatedDeltaNet(RecurrentMixer):
  """The mixer whose state is one matrix [K, V] per head, see mixer.py.

  The convolution has C = 2 G K + H V channels.

  Attributes:
    in_proj_qkv: linear map [D, 2 G K + H V]: queries, keys, values.
    in_proj_z: linear map [D, H V]: the gate of the outputs.
    in_proj_b, in_proj_a: linear maps [D, H]: the rates beta and the decays, before
      their functions.
    norm: RMS norm of each head's output.
    out_proj: linear map [H V, D].
    sizes: see `DeltaNetConfig`.
  """

  sizes: DeltaNetConfig

  def __init__(self, config: TransformerConfig, make: LayerMaker):
    m = config.mixer
    assert isinstance(m, DeltaNetConfig)
    self.sizes = m

    def into(width):
      return make.linear(config.embed_dim, width, "in_out")

    self.in_proj_qkv = into(m.channels)
    self.in_proj_z = into(m.inner_dim)
    self.in_proj_b = into(m.num_heads)
    self.in_proj_a = into(m.num_heads)
    super().__init__(make, conv_bias=False)
    self.norm: RMSNorm = make.norm(m.head_dim, config.norm_eps)
    self.out_proj = make.linear(m.inner_dim, config.embed_dim, "out_in")

  def project(self, x):
    inputs = self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)
    return inputs, self.in_proj_z(x)

  def recur(self, channels, rates, valid, *, state=None, starts=None):
    m, (b, a), shape = self.sizes, rates, valid.shape
    keys = m.num_key_heads * m.key_dim
    q, k, v = jnp.split(channels, (keys, 2 * keys), axis=-1)
    q, k = (_unit(x.reshape(*shape, m.num_key_heads, m.key_dim)) for x in (q, k))
    v = v.reshape(*shape, m.num_heads, m.head_dim)
    g = jnp.where(valid[..., None], self.decay_rates() * self.steps(a), 0.0)
    beta = jnp.where(valid[..., None], jax.nn.sigmoid(b.astype(jnp.float32)), 0.0)
    form = delta_rule.recurrent if shape[1] == 1 else delta_rule.chunked
    with jax.named_scope("delta_rule"):
      return form(q * m.key_dim**-0.5, k, v, g, beta, state=state, starts=starts)

  def gated(self, y, gate):
    y = self.norm(y.astype(gate.dtype)).astype(jnp.float32)
    y = y * jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
    return y.reshape(gate.shape)


def _unit(x: jax.Array) -> jax.Array:
  """Returns vectors of length 1; its gradient at 0 is finite."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _UNIT_EPS)
