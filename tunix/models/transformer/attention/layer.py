"""Grouped-query attention of one layer: projections, norms, positions, cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer.attention import ring
from tunix.models.transformer.attention.paths import attend
from tunix.models.transformer.attention.rope import Angles, rotate
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.dense.layers import Linear, RMSNorm, unit_rms
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.visibility import Visibility
from tunix.ops.vocabulary import invariant

# Keys and values, or the cache of one layer: buffers, or an object with `attend` (see
# `cache.LayerCache`).
KeysValues = Any
Kind = int | jax.Array


class Attention(nnx.Module):
  """Self-attention of one layer.

  Attributes:
    q_proj, k_proj, v_proj, o_proj: linear maps [D, N*H], [D, K*H], [D, K*H], [N*H, D].
      Without `v_proj` the values are the outputs of `k_proj`. Without both, the layer
      reads the keys and values of another layer.
    gated: if True, q_proj is [D, N*2*H]: each head has a query and a gate, and its
      output is multiplied by the sigmoid of the gate (Qwen3.5).
    qkv_proj: the first three as one linear map [D, (N + 2 K)*H] in their place, or
      None.
    q_norm, k_norm: RMS norms of queries and keys, or None.
    value_eps: epsilon of an RMS norm of the values without scale; None for no norm.
    head_dim: size H of a head.
    scale, softcap, implementation, rules: see `attention_paths.attend`.
    sinks: logits of the heads' sinks [*stack, N], or None (see `ops.sinks`).
    windows: the window of each kind of layer, see `attention_paths.attend`.
    wide_norm: if True, the norms are over all heads together, N*H and K*H (OLMo 2).
      If False, they are over the H of each head (Qwen 3, Gemma 3).
  """

  def __init__(
    self,
    q_proj: Linear | None,
    k_proj: Linear | None,
    v_proj: Linear | None,
    o_proj: Linear,
    *,
    qkv_proj: Linear | None = None,
    head_dim: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    windows: tuple[int | None, ...] = (None,),
    wide_norm: bool = False,
    gated: bool = False,
    implementation: str = "auto",
    rules: ShardingRules | None = None,
    sinks: nnx.Param | None = None,
    value_eps: float | None = None,
  ):
    self.q_proj, self.k_proj = nnx.data(q_proj), nnx.data(k_proj)
    self.v_proj, self.o_proj = nnx.data(v_proj), o_proj
    self.qkv_proj = nnx.data(qkv_proj)
    self.value_eps = value_eps
    self.q_norm, self.k_norm = nnx.data(q_norm), nnx.data(k_norm)
    self.sinks = nnx.data(sinks)
    self.head_dim = head_dim
    self.scale = scale
    self.softcap = softcap
    self.windows = windows
    self.wide_norm = wide_norm
    self.gated = gated
    self.implementation = implementation
    self.rules = ShardingRules() if rules is None else rules

  def __call__(
    self,
    x: Float[Array, "B T D"],
    angles: Angles,
    visible: Visibility,
    cached: KeysValues | None = None,
    kind: Kind = 0,
    source: KeysValues | None = None,
  ) -> tuple[Float[Array, "B T D"], KeysValues]:
    """Returns the output, and the keys and values.

    Keys and values are [B, T, K, H], or the cache's new buffers.

    Args:
      x: normalized input of the layer.
      angles: rotary angles of the positions.
      visible: the keys that each query attends to, before the layer's window, which is
        counted in slots. Without a cache `query_index` must count from 0.
      cached: buffers [B, K, S, H] that the new keys and values are written into, at
        slot `visible.query_index[0]`. The buffers of a sliding layer may be a ring. Or
        the cache of one layer that attends itself, `cache.LayerCache`.
      kind: number of the layer's window; traced if the layers are scanned.
      source: for a layer without keys and values: what the layer that it reads returned
        in this call.
    """
    query, gate, key, value = self._rotated(x, angles)
    if key is None or value is None:
      assert source is not None  # the decoder passes it
      out = self._read(query, source, visible, cached, kind)
      return self._output(out, gate), cached
    keys_values = key, value
    if cached is not None and not isinstance(cached, tuple):
      out, keys_values = cached.attend(
        query,
        key,
        value,
        scale=self.scale,
        softcap=self.softcap,
        window=self.windows[kind],  # with a cache the layers are not scanned
        implementation=self.implementation,
        rules=self.rules,
        sinks=self._sink_logits(),
      )
      return self._output(out, gate), keys_values
    if cached is not None:
      fresh = _swap(key), _swap(value)
      if ring.is_ring(cached[0], visible):
        window = self.windows[kind]  # with a cache the layers are not scanned
        assert window is not None  # only sliding layers have a ring
        keys_values, seen, visible = ring.extend(cached, fresh, visible, window)
      else:
        at = (0, 0, visible.query_index[0], 0)

        def write(buffer, new):
          return jax.lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), at)

        seen = keys_values = write(cached[0], fresh[0]), write(cached[1], fresh[1])
      key, value = map(_swap, seen)
    visible = dataclasses.replace(visible, aligned=cached is None)
    out = self._attend(query, key.astype(x.dtype), value.astype(x.dtype), visible, kind)
    return self._output(out, gate), keys_values

  def _read(self, query, source, visible: Visibility, cached, kind: Kind) -> jax.Array:
    """Returns the heads' outputs on the keys and values of another layer."""
    if cached is not None and not isinstance(cached, tuple):
      out, _ = source.attend(
        query,
        None,
        None,
        scale=self.scale,
        softcap=self.softcap,
        window=self.windows[kind],
        implementation=self.implementation,
        rules=self.rules,
        sinks=self._sink_logits(),
      )
      return out
    key, value = source if cached is None else map(_swap, source)
    visible = dataclasses.replace(visible, aligned=cached is None)
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    return self._attend(query, key, value, visible, kind)

  def _sink_logits(self) -> jax.Array | None:
    return None if self.sinks is None else self.sinks[...]

  def _output(
    self, out: Float[Array, "B T N H"], gate: jax.Array | None
  ) -> Float[Array, "B T D"]:
    """Maps the heads' outputs back to the residual stream."""
    out = self._kept(out)
    if gate is not None:
      out = self._kept(out * jax.nn.sigmoid(gate))
    out = sharding.pin_rows(out.reshape(*out.shape[:2], -1), self.rules)
    out = sharding.pin_features(out, self.rules)
    with jax.named_scope("out_proj"):
      return self.o_proj(out)

  def _rotated(self, x: jax.Array, angles: Angles):
    """Returns queries, gates, keys and values by heads; `MLA` overrides it.

    The gates are None if the heads have none, and keys and values in a layer that reads
    those of another one.
    """
    query, gate, key, value = self._project(x)
    with jax.named_scope("rope"):
      query = self._kept(rotate(query, angles.for_queries()))
      if key is not None:
        key = self._kept(rotate(key, angles._replace(query=None)))
    return query, gate, key, value

  @property
  def _is_invariant(self) -> bool:
    return self.implementation == "invariant"

  def _kept(self, x: jax.Array) -> jax.Array:
    return invariant.kept(x, self._is_invariant)

  def _project(self, x):
    """Returns queries, gates, keys and values by heads.

    Queries and keys are normalized. The gates are None if the heads have none. Keys and
    values are None in a layer that reads those of another one.
    """
    heads = (*x.shape[:2], -1, self.head_dim)
    with jax.named_scope("qkv_matmul"):
      query, key, value = (
        None if y is None else self._pinned(y) for y in self._queries_keys_values(x)
      )

    def normed(y, norm):
      y = y if self.wide_norm else y.reshape(heads)
      return (y if norm is None else norm(y)).reshape(heads)

    gate = None
    assert query is not None
    if self.gated:
      pairs = query.reshape(*x.shape[:2], -1, 2, self.head_dim)
      query, gate = pairs[..., 0, :], pairs[..., 1, :]
      query = query.reshape(*x.shape[:2], -1)
    if key is None:
      return normed(query, self.q_norm), gate, None, None
    value = (key if value is None else value).reshape(heads)
    if self.value_eps is not None:
      value = unit_rms(value, self.value_eps, self._is_invariant).astype(value.dtype)
      value = self._kept(value)
    return normed(query, self.q_norm), gate, normed(key, self.k_norm), value

  def _queries_keys_values(self, x: jax.Array) -> list[jax.Array | None]:
    if self.qkv_proj is None:
      three = (self.q_proj, self.k_proj, self.v_proj)
      return [None if proj is None else proj(x) for proj in three]
    # The parts are pinned before and after the split: shards of the whole map do not
    # end where a part ends.
    whole = self._pinned(self.qkv_proj(x))
    width = self.o_proj.kernel.shape[-2]  # N*H
    return [*jnp.split(whole, (width, (width + whole.shape[-1]) // 2), axis=-1)]

  def _pinned(self, x: jax.Array) -> jax.Array:
    return sharding.pin_rows(sharding.pin_features(x, self.rules), self.rules)

  def _attend(self, query, key, value, visible: Visibility, kind: Kind) -> jax.Array:
    """Computes attention within the window of the layer's kind.

    Each kind of layer is compiled separately, so that a path can skip the blocks that
    no query of this kind attends to.
    """

    def within(window: int | None):
      return functools.partial(
        attend,
        scale=self.scale,
        softcap=self.softcap,
        window=window,
        implementation=self.implementation,
        rules=self.rules,
        sinks=self._sink_logits(),
      )

    if isinstance(kind, int) or len(self.windows) == 1:
      window = self.windows[kind if isinstance(kind, int) else 0]
      return within(window)(query, key, value, visible)
    branches = [within(window) for window in self.windows]
    return jax.lax.switch(kind, branches, query, key, value, visible)


def _swap(x: jax.Array) -> jax.Array:
  """Swaps [B, T, K, H] and [B, K, T, H]."""
  return x.swapaxes(1, 2)
