"""Attention by the kernels of a platform, each device on its own rows and heads.

Both kernels compute causal self-attention without a cache. `attention_paths` lists
their other features and refuses unsupported calls. cuDNN was checked on an H200 without
segments, and splash in the Pallas interpreter and with the TPU compiler: no TPU has run
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from tunix.models.transformer.attention import blockwise
from tunix.models.transformer.attention.split_tokens import Split
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.visibility import Visibility
from tunix.utils import mesh as mesh_lib

# Largest number of queries and keys in a splash block; not measured.
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
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
  """Runs JAX's splash attention for TPUs: causal, windows, soft cap, segments, sinks.

  Args:
    query, key, value, visible, scale, softcap, window, rules, sinks: see
      `attention_paths.Path.run`.
    interpret: if True, the kernel runs in the Pallas interpreter, on any platform.
  """

  def rows(query, key, value, sinks, *segments):
    t, n = query.shape[1:3]
    # At least 128, the number of lanes of a TPU's vector registers.
    size = max(128, blockwise.block_size(t, _SPLASH_BLOCK))
    options = {"size": size, "softcap": softcap, "window": window}
    options["interpret"] = interpret
    if isinstance(rules, Split):
      kernel = _share_of_kernel(n, key.shape[1], rules, options)
    else:
      slots = np.arange(t + -t % size, dtype=np.int32)
      kernel = _splash_kernel(n, slots, slots.size, **options)

    # The kernel takes [B, heads, T, H]. Padded keys come after every query, so the
    # causal mask hides them.
    def heads_first(x):
      return _fill(x, size).swapaxes(1, 2)

    arrays = heads_first(_scaled(query, scale)), heads_first(key), heads_first(value)
    run = _keyword_free(kernel, sinks)
    out = jax.vmap(run)(*arrays, *(_fill(ids, size) for ids in segments))
    return out.swapaxes(1, 2)[:, :t].astype(value.dtype)

  segments = () if visible.segment_ids is None else (visible.segment_ids,)
  if isinstance(rules, Split):
    keys = () if visible.key_segments is None else (visible.key_segments,)
    return rows(query, key, value, sinks, *segments, *keys)
  return _per_shard(rows, rules, query, key, value, *segments, sinks=sinks)


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
  sinks: None = None,
) -> Float[Array, "B T N H"]:
  """Runs cuDNN's attention through `jax.nn.dot_product_attention`: causal, windows.

  Segments are a bias of T * T numbers for each row, in the dtype of the queries.

  Args:
    query, key, value, visible, scale, softcap, window, rules: see
      `attention_paths.Path.run`.
    backend: "xla" computes the same function without cuDNN.
    sinks: None; the kernel has no sinks.
  """
  # `attention_paths` allows this kernel only for causal calls without mask, groups,
  # soft cap or sinks, so these arguments hold no information here.
  del softcap, sinks

  def rows(query, key, value, _, *segments):
    # `window` counts the query's own slot; JAX counts only the slots before it.
    mask, span = None, None if window is None else (window - 1, 0)
    length = query.shape[1]
    if segments:
      odd = length % 2  # cuDNN takes a bias of even lengths alone
      query, key, value = (
        jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (query, key, value)
      )
      ids = jnp.pad(segments[0], ((0, 0), (0, odd)))
      slots = jnp.arange(length + odd)
      mask = ids[:, :, None] == ids[:, None]
      if window is not None:  # in the bias, too: no GPU was asked for both
        mask, span = mask & (slots[:, None] - slots < window), None
    out = jax.nn.dot_product_attention(
      query,
      key,
      value,
      mask=None if mask is None else mask[:, None],
      scale=scale,
      is_causal=True,
      local_window_size=span,
      implementation=backend,
    )
    return out[:, :length]

  segments = () if visible.segment_ids is None else (visible.segment_ids,)
  return _per_shard(rows, rules, query, key, value, *segments)


def _per_shard(
  rows: Callable[..., jax.Array],
  rules: ShardingRules,
  *arrays: jax.Array,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Runs a kernel on shards of rows and heads.

  XLA's partitioner cannot split a kernel and would all-gather its operands. Mesh axes
  that do not divide the rows or the key heads are dropped.

  Args:
    rows: the kernel, a function of (query, key, value, sinks) and optionally segment
      ids.
    rules: mesh axes of rows and heads.
    arrays: the kernel's arguments without the sinks.
    sinks: logits of the sinks [N], or None.
  """
  mesh = mesh_lib.context_mesh()
  if mesh is None:
    return rows(*arrays[:3], sinks, *arrays[3:])
  entries = (sharding.batch_axes(rules), None, rules.tp, None)
  spec = mesh_lib.fit_spec(entries, arrays[1].shape, mesh)
  specs = (spec,) * 3 + (PartitionSpec(spec[2]),)
  specs += (PartitionSpec(spec[0]),) * (len(arrays) - 3)
  return jax.shard_map(
    rows, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False
  )(*arrays[:3], sinks, *arrays[3:])


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
  """Makes the kernel for queries [N, T, H]; its block tables are made while tracing.

  Args:
    heads: number of query heads N.
    slots: slots of the queries of all shards, int32 [T], shard after shard.
    keys: number of keys S, a multiple of `size`.
    size: number of queries and of keys in a block.
    softcap, window: see `attention_paths.attend`.
    interpret: see `splash`.
    shards: number of parts of the queries, each a multiple of `size`.
  """
  # Imported here, because Pallas takes a second to import and few programs need it.
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  from tunix.models.transformer.attention.splash_mask import ReachMask

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
  """Makes the kernel for this device's queries.

  The tables are made for the queries of all devices, because they are computed on the
  host while tracing. Each device then takes its part of them by its index in the mesh.

  Args:
    heads: number of query heads N.
    keys: number of keys S.
    split: assigns the queries to devices.
    options: further arguments of `_splash_kernel`.
  """
  slots, size = split.slots(), options["size"]  # slots [n, T/n]
  # Padded queries of a device repeat the slot of its last query, so that their blocks
  # of the mask are no larger. Their outputs are cut off by `splash`.
  slots = np.pad(slots, ((0, 0), (0, -slots.shape[1] % size)), "edge")
  kernel = _splash_kernel(
    heads, slots.reshape(-1), keys + -keys % size, **options, shards=split.shards
  )
  rank = jax.lax.axis_index(split.axis)

  def shard(table, axis):
    if table is None:
      return None
    count = table.shape[axis] // split.shards
    return jax.lax.dynamic_slice_in_dim(table, rank * count, count, axis)

  def shard_tables(info):  # the axes follow the kernel's `manual_sharding_spec`
    return info._replace(
      data_next=shard(info.data_next, 1),
      mask_next=shard(info.mask_next, 1),
      block_mask=shard(info.block_mask, 1),
      q_sequence=shard(info.q_sequence, 0),
    )

  tables = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
  return type(kernel)(*map(shard_tables, tables), **kernel.kwargs)


def _keyword_free(
  kernel: Callable[..., jax.Array], sinks: jax.Array | None
) -> Callable[..., jax.Array]:
  """Returns a function of one row's queries, keys, values and optionally segment ids.

  One array of ids serves queries and keys. If there are two arrays, the first has the
  ids of the queries and the second those of the keys. The sinks are the same for all
  rows.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as lib

  def run(q, k, v, *ids):
    segments = lib.SegmentIds(ids[0], ids[-1]) if ids else None
    return kernel(q, k, v, segments, sinks)

  return run


def _scaled(query: jax.Array, scale: float) -> jax.Array:
  """Scales the queries: the kernel has no argument for the factor of the scores."""
  return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _fill(x: jax.Array, size: int) -> jax.Array:
  """Pads the tokens with zeros to a multiple of the block size."""
  short = -x.shape[1] % size
  return jnp.pad(x, [(0, short if axis == 1 else 0) for axis in range(x.ndim)])
