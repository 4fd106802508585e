"""Grouped-query attention with rotary positions, masks made where they are used."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from tunix.models.transformer.layers import Linear, RMSNorm
from tunix.models.transformer.rope import rotate
from tunix.ops.masks import causal_mask

# Finite, so that a row that may look nowhere gives numbers and no NaN gradients.
NEVER = -1e30

KeysValues = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """Which keys each query may look at, in the cheapest form there is.

  Attributes:
    query_index: int32 [T], the slot of each query.
    mask: bool [B, T, S] that the caller gave, or None.
    segment_ids: int32 [B, T] of packed rows, or None; only without a cache.
  """

  query_index: jax.Array
  mask: jax.Array | None = None
  segment_ids: jax.Array | None = None

  def dense(self, keys: int) -> Bool[Array, "B T S"]:
    """The mask as an array; built inside the layer, so that XLA can fuse it."""
    if self.mask is not None:
      return self.mask.astype(bool)
    segments = self.segment_ids
    return causal_mask(self.query_index, jnp.arange(keys), segments, segments)


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K H"],
  mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
  """softmax(q k^T / sqrt(H)) v; scores and softmax in float32."""
  b, t, n, h = query.shape
  groups = n // key.shape[2]
  query = query.reshape(b, t, key.shape[2], groups, h)
  with jax.named_scope("scores"):
    scores = jnp.einsum(
      "btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, None, None], scores * h**-0.5, NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  with jax.named_scope("values"):
    out = jnp.einsum("bkgts,bskh->btkgh", weights, value)
  return out.reshape(b, t, n, h)


class Attention(nnx.Module):
  """Self-attention of one layer.

  Attributes:
    q_proj, k_proj, v_proj, o_proj: [D, N*H], [D, K*H], [D, K*H], [N*H, D].
    q_norm, k_norm: RMS norms over H, or None.
  """

  def __init__(
    self,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    *,
    head_dim: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
  ):
    self.q_proj, self.k_proj = q_proj, k_proj
    self.v_proj, self.o_proj = v_proj, o_proj
    self.q_norm, self.k_norm = nnx.data(q_norm), nnx.data(k_norm)
    self.head_dim = head_dim

  def __call__(
    self,
    x: Float[Array, "B T D"],
    sin_cos: tuple[jax.Array, jax.Array],
    visible: Visibility,
    cached: KeysValues | None = None,
  ) -> tuple[Float[Array, "B T D"], KeysValues]:
    """Returns the output and the keys and values it looked at.

    Args:
      x: normalised input of the layer.
      sin_cos: rotary angles of its positions.
      visible: who may look where.
      cached: [B, S, K, H] buffers that the new keys and values are written into at
        `visible.query_index[0]`.
    """
    heads = (*x.shape[:2], -1, self.head_dim)
    with jax.named_scope("qkv_matmul"):
      query = self.q_proj(x).reshape(heads)
      key = self.k_proj(x).reshape(heads)
      value = self.v_proj(x).reshape(heads)
    if self.q_norm is not None and self.k_norm is not None:
      query, key = self.q_norm(query), self.k_norm(key)
    with jax.named_scope("rope"):
      query, key = rotate(query, sin_cos), rotate(key, sin_cos)
    if cached is not None:
      at = (0, visible.query_index[0], 0, 0)
      key = jax.lax.dynamic_update_slice(cached[0], key.astype(cached[0].dtype), at)
      value = jax.lax.dynamic_update_slice(cached[1], value.astype(cached[1].dtype), at)
    out = attend(
      query, key.astype(x.dtype), value.astype(x.dtype), visible.dense(key.shape[1])
    )
    with jax.named_scope("out_proj"):
      return self.o_proj(out.reshape(*x.shape[:2], -1)), (key, value)
