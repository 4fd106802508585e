"""Attention by the platform's own kernels, each device on its own rows and heads.

Both are causal self-attention without a cache; `attention_paths` says what else they
can do and refuses the rest. Checked on a CPU (splash in the Pallas interpreter, cuDNN's
arguments through XLA) and, splash, with the TPU compiler; no TPU or GPU has run them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from tunix.models.transformer import blockwise, sharding
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.split_tokens import Split
from tunix.models.transformer.visibility import Visibility
from tunix.utils import mesh as mesh_lib

# Most queries and keys of a splash block; not measured.
_SPLASH_BLOCK = 512


def splash(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  visible: Visibility,
  scale: float,
  softcap: float | None,
  window: int | None,
  rules: ShardingRules | Split,
  interpret: bool = False,
) -> Float[Array, "B T N H"]:
  """JAX's splash attention for TPUs: causal, windows, soft cap, segments.

  Args:
    interpret: run the kernel in the Pallas interpreter, which any platform has.
  """

  def rows(query, key, value, *segments):
    t, n = query.shape[1:3]
    size = max(128, blockwise.block_size(t, _SPLASH_BLOCK))
    options = {"size": size, "softcap": softcap, "window": window}
    options["interpret"] = interpret
    if isinstance(rules, Split):
      kernel = _share_of_kernel(n, key.shape[1], rules, options)
    else:
      slots = np.arange(t + -t % size, dtype=np.int32)
      kernel = _splash_kernel(n, slots, slots.size, **options)
    # [B, heads, T, H]; keys that fill up the last block come after every query.
    heads_first = lambda x: _fill(x, size).swapaxes(1, 2)
    arrays = heads_first(_scaled(query, scale)), heads_first(key), heads_first(value)
    if segments:
      kernel = _with_segments(kernel)
    out = jax.vmap(kernel)(*arrays, *(_fill(ids, size) for ids in segments))
    return out.swapaxes(1, 2)[:, :t].astype(value.dtype)

  segments = () if visible.segment_ids is None else (visible.segment_ids,)
  if isinstance(rules, Split):
    keys = () if visible.key_segments is None else (visible.key_segments,)
    return rows(query, key, value, *segments, *keys)
  return _per_shard(rows, rules, query, key, value, *segments)


def cudnn(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  visible: Visibility,
  scale: float,
  softcap: float | None,
  window: int | None,
  rules: ShardingRules,
  backend: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
  """cuDNN's attention through `jax.nn.dot_product_attention`: causal, windows.

  Args:
    backend: "xla" computes the same without cuDNN.
  """
  del visible, softcap  # causal, no cap: the path refuses everything else
  rows = functools.partial(
    jax.nn.dot_product_attention,
    scale=scale,
    is_causal=True,
    # JAX counts the slots before the query's own.
    local_window_size=None if window is None else (window - 1, 0),
    implementation=backend,
  )
  return _per_shard(rows, rules, query, key, value)


def _per_shard(
  rows: Callable[..., jax.Array], rules: ShardingRules, *arrays: jax.Array
) -> jax.Array:
  """Runs (query, key, value[, segments]) by shards of rows and of heads.

  A kernel is opaque to XLA's partitioner, which would gather its operands. Axes that
  do not divide the rows or the KEY heads are dropped.
  """
  mesh = mesh_lib.context_mesh()
  if mesh is None:
    return rows(*arrays)
  wanted = (sharding.batch_axes(rules), None, rules.tp, None)
  spec = mesh_lib.fit_spec(wanted, arrays[1].shape, mesh)
  specs = (spec,) * 3 + (PartitionSpec(spec[0]),) * (len(arrays) - 3)
  return jax.shard_map(
    rows, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False
  )(*arrays)


def _splash_kernel(
  heads: int,
  slots: np.ndarray,
  keys: int,
  *,
  size: int,
  softcap: float | None,
  window: int | None,
  interpret: bool,
  shards: int = 1,
) -> Any:
  """The kernel for [N, T, H] queries; its tables of blocks are made while tracing.

  Args:
    heads: N.
    slots: int32 [T], of the queries of all shards, one shard's after the other's.
    keys: S, whole blocks.
    size: queries, and keys, of a block.
    shards: parts that the queries are split into, whole blocks each.
  """
  # Here, because Pallas takes a second to import and few programs need it.
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  from tunix.models.transformer.splash_mask import ReachMask

  mask = ReachMask(slots, keys, window)
  blocks = lib.BlockSizes(
    block_q=size,
    block_kv=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_q_dq=size,
    block_kv_dq=size,
  )
  return lib.make_splash_mha(
    lib.MultiHeadMask([mask] * heads),
    block_sizes=blocks,
    attn_logits_soft_cap=softcap,
    head_shards=1,
    q_seq_shards=shards,
    interpret=interpret,
  )


def _share_of_kernel(
  heads: int, keys: int, split: Split, options: dict[str, Any]
) -> Any:
  """The kernel for the queries of this device, of those that `split` names."""
  slots, size = split.slots(), options["size"]
  # What fills up a device's last block looks where its last query does.
  slots = np.pad(slots, ((0, 0), (0, -slots.shape[1] % size)), "edge")
  kernel = _splash_kernel(
    heads, slots.reshape(-1), keys + -keys % size, **options, shards=split.shards
  )
  rank = jax.lax.axis_index(split.axis)

  def mine(table, axis):
    if table is None:
      return None
    count = table.shape[axis] // split.shards
    return jax.lax.dynamic_slice_in_dim(table, rank * count, count, axis)

  def share(info):  # as `manual_sharding_spec` of the kernel would have it split
    return info._replace(
      data_next=mine(info.data_next, 1),
      mask_next=mine(info.mask_next, 1),
      block_mask=mine(info.block_mask, 1),
      q_sequence=mine(info.q_sequence, 0),
    )

  tables = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
  return type(kernel)(*map(share, tables), **kernel.kwargs)


def _with_segments(kernel: Any) -> Callable[..., jax.Array]:
  """Of queries, keys, values and the ids of the queries, then of the keys if they are
  others."""
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  return lambda q, k, v, *ids: kernel(q, k, v, lib.SegmentIds(ids[0], ids[-1]))


def _scaled(query: jax.Array, scale: float) -> jax.Array:
  """The kernel has no factor of its own."""
  return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _fill(x: jax.Array, size: int) -> jax.Array:
  """Zeros after the last token up to a whole block."""
  short = -x.shape[1] % size
  return jnp.pad(x, [(0, short if axis == 1 else 0) for axis in range(x.ndim)])
