"""Grouped-query attention of one layer: projections, norms, positions, cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer import ring, sharding
from tunix.models.transformer.attention_paths import attend
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.layers import Linear, RMSNorm
from tunix.models.transformer.rope import rotate
from tunix.models.transformer.visibility import Visibility

KeysValues = tuple[jax.Array, jax.Array]
Kind = int | jax.Array


class Attention(nnx.Module):
  """Self-attention of one layer.

  Attributes:
    q_proj, k_proj, v_proj, o_proj: [D, N*H], [D, K*H], [D, K*H], [N*H, D].
    q_norm, k_norm: RMS norms of queries and keys, or None.
    head_dim: H.
    scale, softcap, implementation, rules: as in `attention_paths.attend`.
    windows: by kind of layer, keys that a query sees; None: all before it.
    wide_norm: the norms are over all heads together, N*H and K*H (OLMo 2), not over
      each head's H (Qwen 3, Gemma 3).
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
    scale: float | None = None,
    softcap: float | None = None,
    windows: tuple[int | None, ...] = (None,),
    wide_norm: bool = False,
    implementation: str = "auto",
    rules: ShardingRules | None = None,
  ):
    self.q_proj, self.k_proj = q_proj, k_proj
    self.v_proj, self.o_proj = v_proj, o_proj
    self.q_norm, self.k_norm = nnx.data(q_norm), nnx.data(k_norm)
    self.head_dim = head_dim
    self.scale = scale
    self.softcap = softcap
    self.windows = windows
    self.wide_norm = wide_norm
    self.implementation = implementation
    self.rules = ShardingRules() if rules is None else rules

  def __call__(
    self,
    x: Float[Array, "B T D"],
    sin_cos: tuple[jax.Array, jax.Array],
    visible: Visibility,
    cached: KeysValues | None = None,
    kind: Kind = 0,
  ) -> tuple[Float[Array, "B T D"], KeysValues]:
    """Returns the output, and keys and values: [B, T, K, H], or the cache's buffers.

    Args:
      x: normalised input of the layer.
      sin_cos: rotary angles of its positions.
      visible: who may look where. The layer's window is laid over it, counted in
        slots; without a cache `query_index` must count from 0.
      cached: [B, K, S, H] buffers that the new keys and values are written into at
        `visible.query_index[0]`; a sliding layer's may be a ring.
      kind: number of the layer's window; traced when the layers are scanned.
    """
    query, key, value = self._project(x)
    with jax.named_scope("rope"):
      query, key = rotate(query, sin_cos), rotate(key, sin_cos)
    keys_values = key, value
    if cached is not None:
      fresh = _swap(key), _swap(value)
      if ring.is_ring(cached[0], visible):
        window = self.windows[kind]  # with a cache the layers are not scanned
        assert window is not None
        keys_values, seen, visible = ring.extend(cached, fresh, visible, window)
      else:
        at = (0, 0, visible.query_index[0], 0)
        write = lambda buffer, new: jax.lax.dynamic_update_slice(
          buffer, new.astype(buffer.dtype), at
        )
        seen = keys_values = write(cached[0], fresh[0]), write(cached[1], fresh[1])
      key, value = map(_swap, seen)
    visible = dataclasses.replace(visible, aligned=cached is None)
    out = self._attend(query, key.astype(x.dtype), value.astype(x.dtype), visible, kind)
    out = sharding.pin_rows(out.reshape(*x.shape[:2], -1), self.rules)
    out = sharding.pin_features(out, self.rules)
    with jax.named_scope("out_proj"):
      return self.o_proj(out), keys_values

  def _project(self, x):
    """Queries, keys and values by heads, the first two normalised."""
    heads = (*x.shape[:2], -1, self.head_dim)
    with jax.named_scope("qkv_matmul"):
      query, key, value = (
        sharding.pin_rows(sharding.pin_features(proj(x), self.rules), self.rules)
        for proj in (self.q_proj, self.k_proj, self.v_proj)
      )
    if not self.wide_norm:
      query, key = query.reshape(heads), key.reshape(heads)
    if self.q_norm is not None and self.k_norm is not None:
      query, key = self.q_norm(query), self.k_norm(key)
    return query.reshape(heads), key.reshape(heads), value.reshape(heads)

  def _attend(self, query, key, value, visible: Visibility, kind: Kind) -> jax.Array:
    """Attention within the window of the layer's kind. Each kind is compiled for
    itself, so that a path can leave out what no query of it sees."""

    def within(window: int | None):
      return functools.partial(
        attend,
        scale=self.scale,
        softcap=self.softcap,
        window=window,
        implementation=self.implementation,
        rules=self.rules,
      )

    if isinstance(kind, int) or len(self.windows) == 1:
      window = self.windows[kind if isinstance(kind, int) else 0]
      return within(window)(query, key, value, visible)
    branches = [within(window) for window in self.windows]
    return jax.lax.switch(kind, branches, query, key, value, visible)


def _swap(x: jax.Array) -> jax.Array:
  """[B, T, K, H] to [B, K, T, H], and back."""
  return x.swapaxes(1, 2)
