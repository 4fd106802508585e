"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads are made from one latent vector c of the token:

  c, r = split(x W_a),  [k_nope, v] = norm(c) W_b,  k = [k_nope, rotate(r)]

Here each head's keys and values are computed and cached, which needs no other attention
than that of `Attention`. Keys, queries and values are padded with zeros to one size:
zeros change neither the scores nor the values' other dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.attention.rope import Angles, rotate
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.configs.mla import MLAConfig
from tunix.models.transformer.dense.layers import Linear, RMSNorm
from tunix.models.transformer.layer_maker import LayerMaker

# The latent vectors' norms have this epsilon in all published models, whatever
# `norm_eps` is.
_NORM_EPS = 1e-6


class MLA(Attention):
  """Latent attention of one layer.

  Attributes:
    sizes: see `MLAConfig`.
    q_proj: linear map [D, N*Q] of the queries, or None with a latent vector, where Q is
      `MLAConfig.query_dim`.
    q_a_proj, q_a_layernorm, q_b_proj: linear map [D, r] to the queries' latent vector,
      its norm, and the linear map [r, N*Q] from it; None without a latent vector.
    kv_a_proj_with_mqa: linear map [D, c + R] to the latent vector of keys and values,
      and to the rotated part of the key that all heads share.
    kv_a_layernorm, kv_b_proj: norm of the latent vector, and the linear map
      [c, N*(nope + value)] to the other part of the keys and the values.
    o_proj: linear map [N*value, D].
  """

  def __init__(self, c: TransformerConfig, mla: MLAConfig, make: LayerMaker):
    heads, d = c.num_heads, c.embed_dim

    # The latent vectors are not split over devices, as every head reads all of them.
    def latent(size):
      return make.linear(d, size, "router", bias=c.qkv_bias)

    q_dim, has_latent = heads * mla.query_dim, mla.q_rank is not None
    super().__init__(
      None if has_latent else make.linear(d, q_dim, "in_out"),
      None,
      None,
      make.linear(heads * mla.value_dim, d, "out_in", bias=c.o_bias),
      head_dim=c.head_dim,
      scale=mla.query_dim**-0.5 if c.query_scale is None else c.query_scale,
      softcap=c.attention_softcap,
      windows=tuple(kind.window for kind in c.kinds),
      implementation=c.attention,
      rules=c.sharding,
    )
    self.sizes = mla
    self.q_a_proj: Linear | None = nnx.data(None)
    self.q_a_layernorm: RMSNorm | None = nnx.data(None)
    self.q_b_proj: Linear | None = nnx.data(None)
    if mla.q_rank is not None:
      self.q_a_proj = nnx.data(latent(mla.q_rank))
      self.q_a_layernorm = nnx.data(make.norm(mla.q_rank, _NORM_EPS))
      self.q_b_proj = nnx.data(make.linear(mla.q_rank, q_dim, "in_out"))
    self.kv_a_proj_with_mqa = latent(mla.kv_rank + mla.rope_dim)
    self.kv_a_layernorm = make.norm(mla.kv_rank, _NORM_EPS)
    kv_dim = heads * (mla.nope_dim + mla.value_dim)
    self.kv_b_proj = make.linear(mla.kv_rank, kv_dim, "in_out")

  def _rotated(self, x: Float[Array, "B T D"], angles: Angles):
    """Returns queries, keys and values by heads, padded to the size of a head."""
    mla = self.sizes
    with jax.named_scope("qkv_matmul"):
      query = self._by_heads(self._queries(x), mla.query_dim)
      latent, shared = jnp.split(self.kv_a_proj_with_mqa(x), [mla.kv_rank], axis=-1)
      made = self.kv_b_proj(self.kv_a_layernorm(latent))
      made = self._by_heads(made, mla.nope_dim + mla.value_dim)
    query, turned = jnp.split(query, [mla.nope_dim], axis=-1)
    key, value = jnp.split(made, [mla.nope_dim], axis=-1)
    with jax.named_scope("rope"):
      turned = rotate(self._pairs(turned), angles)
      shared = rotate(self._pairs(shared[:, :, None]), angles)
    shared = jnp.broadcast_to(shared, (*key.shape[:-1], mla.rope_dim))
    query = jnp.concatenate([query, turned], axis=-1)
    key = jnp.concatenate([key, shared], axis=-1)
    return self._padded(query), None, self._padded(key), self._padded(value)

  def _output(self, out: Float[Array, "B T N H"], gate: None) -> Float[Array, "B T D"]:
    return super()._output(out[..., : self.sizes.value_dim], gate)

  def _queries(self, x: jax.Array) -> jax.Array:
    if self.q_proj is not None:
      return self.q_proj(x)
    assert self.q_a_proj and self.q_a_layernorm and self.q_b_proj
    return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

  def _by_heads(self, x: jax.Array, size: int) -> jax.Array:
    return self._pinned(x).reshape(*x.shape[:2], -1, size)

  def _pairs(self, x: jax.Array) -> jax.Array:
    """Orders interleaved pairs as `rotate` expects them.

    Queries and keys change in the same way, so their products stay the same.
    """
    if not self.sizes.interleaved:
      return x
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)

  def _padded(self, x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, self.head_dim - x.shape[-1]),))
