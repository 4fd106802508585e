"""Grouped-query attention with rotary positions, masks made where they are used."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from tunix.models.transformer.layers import Linear, RMSNorm
from tunix.models.transformer.rope import rotate
from tunix.ops.logprobs import soft_cap
from tunix.ops.masks import causal_mask

# Finite, so that a row that may look nowhere gives numbers and no NaN gradients.
NEVER = -1e30

KeysValues = tuple[jax.Array, jax.Array]
Kind = int | jax.Array


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

  def dense(self, keys: int, window: int | None = None) -> Bool[Array, "B T S"]:
    """The mask as an array; built inside the layer, so that XLA can fuse it."""
    slots = jnp.arange(keys)
    near = None
    if window is not None:
      near = (self.query_index[:, None] - slots[None, :] < window)[None]
    if self.mask is not None:
      mask = self.mask.astype(bool)
    else:
      segments = self.segment_ids
      mask = causal_mask(self.query_index, slots, segments, segments)
    return mask if near is None else mask & near


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K H"],
  mask: Bool[Array, "B T S"],
  *,
  scale: float,
  softcap: float | None = None,
) -> Float[Array, "B T N H"]:
  """softmax(scale q k^T) v; scores and softmax in float32."""
  b, t, n, h = query.shape
  groups = n // key.shape[2]
  query = query.reshape(b, t, key.shape[2], groups, h)
  with jax.named_scope("scores"):
    scores = jnp.einsum(
      "btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if softcap is not None:
      scores = soft_cap(scores, softcap)
    scores = jnp.where(mask[:, None, None], scores, NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  with jax.named_scope("values"):
    out = jnp.einsum("bkgts,bskh->btkgh", weights, value)
  return out.reshape(b, t, n, h)


class Attention(nnx.Module):
  """Self-attention of one layer.

  Attributes:
    q_proj, k_proj, v_proj, o_proj: [D, N*H], [D, K*H], [D, K*H], [N*H, D].
    q_norm, k_norm: RMS norms over H, or over all heads together, or None.
    windows: keys that a query sees, None for all, by kind of layer.
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
    wide_norm: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    windows: tuple[int | None, ...] = (None,),
  ):
    self.q_proj, self.k_proj = q_proj, k_proj
    self.v_proj, self.o_proj = v_proj, o_proj
    self.q_norm, self.k_norm = nnx.data(q_norm), nnx.data(k_norm)
    self.head_dim = head_dim
    self.wide_norm = wide_norm
    self.scale = head_dim**-0.5 if scale is None else scale
    self.softcap = softcap
    self.windows = windows

  def __call__(
    self,
    x: Float[Array, "B T D"],
    sin_cos: tuple[jax.Array, jax.Array],
    visible: Visibility,
    cached: KeysValues | None = None,
    kind: Kind = 0,
  ) -> tuple[Float[Array, "B T D"], KeysValues]:
    """Returns the output and the keys and values it looked at.

    Args:
      x: normalised input of the layer.
      sin_cos: rotary angles of its positions.
      visible: who may look where.
      cached: [B, S, K, H] buffers that the new keys and values are written into at
        `visible.query_index[0]`.
      kind: number of the layer's window; traced when the layers are scanned.
    """
    heads = (*x.shape[:2], -1, self.head_dim)
    with jax.named_scope("qkv_matmul"):
      query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if self.wide_norm:
      query, key = self._normed(query, key)
    query, key, value = (y.reshape(heads) for y in (query, key, value))
    if not self.wide_norm:
      query, key = self._normed(query, key)
    with jax.named_scope("rope"):
      query, key = rotate(query, sin_cos), rotate(key, sin_cos)
    if cached is not None:
      at = (0, visible.query_index[0], 0, 0)
      key = jax.lax.dynamic_update_slice(cached[0], key.astype(cached[0].dtype), at)
      value = jax.lax.dynamic_update_slice(cached[1], value.astype(cached[1].dtype), at)
    out = self._attend(query, key.astype(x.dtype), value.astype(x.dtype), visible, kind)
    with jax.named_scope("out_proj"):
      return self.o_proj(out.reshape(*x.shape[:2], -1)), (key, value)

  def _normed(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    if self.q_norm is None or self.k_norm is None:
      return query, key
    return self.q_norm(query), self.k_norm(key)

  def _attend(self, query, key, value, visible: Visibility, kind: Kind) -> jax.Array:
    """Attention with the window of the layer's kind; each is compiled for itself, so
    that a path may skip what lies outside."""

    def within(window: int | None):
      def run(query, key, value, visible):
        mask = visible.dense(key.shape[1], window)
        return attend(query, key, value, mask, scale=self.scale, softcap=self.softcap)

      return run

    if isinstance(kind, int):
      return within(self.windows[kind])(query, key, value, visible)
    paths = [within(window) for window in self.windows]
    if len(paths) == 1:
      return paths[0](query, key, value, visible)
    return jax.lax.switch(kind, paths, query, key, value, visible)
