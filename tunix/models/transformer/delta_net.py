"""The mixer of gated delta nets (Yang et al. 2024, arXiv:2412.06464), as in Qwen3.5.

A short convolution mixes queries, keys and values. Queries and keys are normalised to
length 1. The heads' outputs are normalised and multiplied by a gate. The recurrence is
in ops/delta_rule.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer import recurrence
from tunix.models.transformer.config import DeltaNetConfig, TransformerConfig
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.layers import RMSNorm
from tunix.models.transformer.visibility import Visibility
from tunix.ops import delta_rule
from tunix.ops.short_conv import causal_conv

# Epsilon of the lengths of queries and keys, the same in all checkpoints.
_UNIT_EPS = 1e-6


class GatedDeltaNet(nnx.Module):
  """A recurrent mixer whose state is one matrix [K, V] per head.

  Attributes:
    in_proj_qkv: linear map [D, 2 G K + H V]: queries, keys, values.
    in_proj_z: linear map [D, H V]: the gate of the outputs.
    in_proj_b, in_proj_a: linear maps [D, H]: the rates beta and the decays, before
      their functions.
    conv_kernel: filters [C, 1, taps] of the C = 2 G K + H V channels.
    dt_bias, a_log: per head: bias of the decay, and logarithm of its factor.
    norm: RMS norm of each head's output.
    out_proj: linear map [H V, D].
    sizes: see `DeltaNetConfig`.
  """

  def __init__(self, config: TransformerConfig, make: LayerMaker):
    m = config.mixer
    assert isinstance(m, DeltaNetConfig)
    self.sizes = m
    into = lambda width: make.linear(config.embed_dim, width, "in_out")
    self.in_proj_qkv = into(m.channels)
    self.in_proj_z = into(m.inner_dim)
    self.in_proj_b = into(m.num_heads)
    self.in_proj_a = into(m.num_heads)
    self.conv_kernel = make.small((m.channels, 1, m.conv_taps))
    self.dt_bias = make.small((m.num_heads,), 1.0)
    self.a_log = make.small((m.num_heads,), jnp.log(jnp.arange(1.0, m.num_heads + 1)))
    self.norm: RMSNorm = make.norm(m.head_dim, config.norm_eps)
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
      inputs = self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)
      gate = self.in_proj_z(x)
    y, cached = recurrence.run(self._step, self.empty_state, inputs, visible, cached)
    y = self.norm(y.astype(x.dtype)).astype(jnp.float32)
    gate = gate.astype(jnp.float32).reshape(*gate.shape[:2], m.num_heads, m.head_dim)
    y = (y * jax.nn.silu(gate)).astype(x.dtype)
    with jax.named_scope("out_proj"):
      return self.out_proj(y.reshape(*x.shape[:2], -1)), cached

  def empty_state(self, rows: int) -> dict[str, jax.Array]:
    """Returns the state of new rows: last inputs of the convolution, and matrices."""
    m = self.sizes
    return {
      "conv": jnp.zeros((rows, m.conv_taps - 1, m.channels), jnp.float32),
      "heads": jnp.zeros((rows, m.num_heads, m.key_dim, m.head_dim), jnp.float32),
    }

  def _step(self, state, inputs, valid, starts):
    """Runs rows of tokens, see `recurrence.Step`."""
    m, (channels, b, a) = self.sizes, inputs
    with jax.named_scope("conv"):
      mixed, last = causal_conv(
        channels,
        self.conv_kernel[...][:, 0].T,
        before=state["conv"],
        valid=valid,
        starts=starts,
      )
      mixed = jax.nn.silu(mixed)
    keys = m.num_key_heads * m.key_dim
    q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
    shape = valid.shape
    q, k = (_unit(x.reshape(*shape, m.num_key_heads, m.key_dim)) for x in (q, k))
    v = v.reshape(*shape, m.num_heads, m.head_dim)
    wide = lambda variable: variable[...].astype(jnp.float32)
    decay = jax.nn.softplus(a.astype(jnp.float32) + wide(self.dt_bias))
    g = jnp.where(valid[..., None], -jnp.exp(wide(self.a_log)) * decay, 0.0)
    beta = jnp.where(valid[..., None], jax.nn.sigmoid(b.astype(jnp.float32)), 0.0)
    form = delta_rule.recurrent if shape[1] == 1 else delta_rule.chunked
    with jax.named_scope("delta_rule"):
      y, heads = form(
        q * m.key_dim**-0.5, k, v, g, beta, state=state["heads"], starts=starts
      )
    return y, {"conv": last, "heads": heads}


def _unit(x: jax.Array) -> jax.Array:
  """Returns vectors of length 1; its gradient at 0 is finite."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _UNIT_EPS)
