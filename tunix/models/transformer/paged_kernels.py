"""The implementations of attention over pages, each on the heads of one device.

`paged.PATHS` lists their features and refuses unsupported calls. "gather" runs on every
platform. "ragged" was compiled by the TPU compiler, and its arguments were checked
through the reference of its package; no TPU has run it. "gpu_paged" was checked in the
Pallas interpreter; no GPU has run it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tunix.models.transformer.paged_rows import Group, Ragged

# Score of a hidden key. It is finite, so that the output of an idle row is finite.
NEVER = -1e30

# Number of keys and of queries that "ragged" reads into a TPU's vector memory at once;
# not measured. The kernel's own table of sizes asks for a TPU on this machine.
_RAGGED_KEYS = 512
_RAGGED_QUERIES = 32

# Number of keys of a block of "gpu_paged", and number of parts of a sequence that run
# at the same time; not measured.
_GPU_KEYS = 64
_GPU_PARTS = 8


def gather(
  query: Float[Array, "T N H"],
  pages: tuple[jax.Array, ...],
  ragged: Ragged,
  scale: float,
  softcap: float | None,
  window: int | None,
) -> Float[Array, "T N H"]:
  """Copies the pages of every row and computes all scores at once.

  Args:
    query: queries in the order of `ragged`.
    pages: keys and values, [K, P, page, H] each.
    ragged: the rows.
    scale, softcap, window: see `attention_paths.attend`.
  """
  keys, values = pages
  parts = [
    _gather_group(part, keys, values, group, scale, softcap, window)
    for part, group in zip(ragged.split(query), ragged.groups)
  ]
  return jnp.concatenate(parts).astype(query.dtype)


def _gather_group(query, keys, values, group: Group, scale, softcap, window):
  """Returns the outputs of one group, [R * Q, N, H]."""
  heads, size, head_dim = keys.shape[0], *keys.shape[2:]
  rows, n = group.start.shape[0], query.shape[1]
  table, first = within(group, size, window)
  copied = (heads, rows, table.shape[1] * size, head_dim)
  key = keys[:, table].reshape(copied).astype(query.dtype)
  value = values[:, table].reshape(copied).astype(query.dtype)

  slot = first[:, None] * size + jnp.arange(copied[2])  # position of each key, [R, S]
  at = group.positions[:, :, None]  # position of each query, [R, Q, 1]
  written = slot < (group.start + group.count)[:, None]
  visible = (slot[:, None] <= at) & written[:, None]
  if window is not None:
    visible &= slot[:, None] > at - window
  # The rest of a page may hold NaNs of an earlier sequence, and 0 * NaN is NaN.
  value = jnp.where(jnp.any(visible, axis=1)[None, :, :, None], value, 0)

  query = query.reshape(rows, group.tokens, heads, n // heads, head_dim)
  with jax.named_scope("scores"):
    scores = jnp.einsum(
      "rqkgh,krsh->krgqs", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if softcap is not None:
      scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[None, :, None], scores, NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  with jax.named_scope("values"):
    out = jnp.einsum("krgqs,krsh->rqkgh", weights, value)
  return out.reshape(-1, n, head_dim)


def tpu(
  query: Float[Array, "T N H"],
  pages: tuple[jax.Array, ...],
  ragged: Ragged,
  scale: float,
  softcap: float | None,
  window: int | None,
  kernel: Callable[..., jax.Array] | None = None,
) -> Float[Array, "T N H"]:
  """Runs JAX's ragged paged attention for TPUs: all rows of a round in one kernel.

  The kernel counts the position of a query from the end of its row's keys. A row
  therefore has as many keys as if all its Q tokens were valid; only the queries of
  padding attend to the additional keys. These keys must be finite.

  Args:
    query, ragged, scale, softcap, window: see `gather`.
    pages: one array [P, page, 2K, H]: head 2k holds the keys of key head k, and head
      2k + 1 its values. H may be larger than that of the queries; the rest is zero.
    kernel: replaces the kernel; for tests.
  """
  (both,) = pages
  size, short = both.shape[1], both.shape[3] - query.shape[2]
  tables, lengths = [], []
  for group in ragged.groups:
    table, first = within(group, size, window)
    tables.append(table)
    lengths.append(group.start + group.tokens - first * size)
  widest = max(table.shape[1] for table in tables)
  fill = lambda x: jnp.pad(x, ((0, 0), (0, widest - x.shape[1])))
  tokens = [group.tokens for group in ragged.groups for _ in range(group.rows)]
  out = (_ragged_kernel if kernel is None else kernel)(
    jnp.pad(query, ((0, 0), (0, 0), (0, short))),
    both,
    jnp.concatenate(lengths).astype(jnp.int32),
    jnp.concatenate([fill(table) for table in tables]).astype(jnp.int32),
    jnp.asarray(np.cumsum([0, *tokens]), jnp.int32),
    jnp.asarray([len(tokens)], jnp.int32),
    sm_scale=scale,
    sliding_window=window,
    soft_cap=softcap,
  )
  return out[..., : query.shape[2]]


def _ragged_kernel(query, both, lengths, table, *rows: Any, **options: Any):
  # Imported here, because Pallas takes a second to import and few programs need it.
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as lib

  return lib.ragged_paged_attention(
    query,
    both,
    lengths,
    table,
    *rows,
    num_kv_pages_per_block=min(table.shape[1], max(1, _RAGGED_KEYS // both.shape[1])),
    num_queries_per_block=min(query.shape[0], _RAGGED_QUERIES),
    **options,
  )


def gpu(
  query: Float[Array, "T N H"],
  pages: tuple[jax.Array, ...],
  ragged: Ragged,
  scale: float,
  softcap: float | None,
  window: int | None,
  interpret: bool = False,
) -> Float[Array, "T N H"]:
  """Runs JAX's paged attention for GPUs on rows of one token; other rows use `gather`.

  No GPU has run this path.

  Args:
    query, pages, ragged, scale, softcap: see `gather`.
    window: None; the kernel has no window.
    interpret: if True, the kernel runs in the Pallas interpreter, on any platform.
  """
  assert window is None  # `paged.PATHS` refuses it
  parts = []
  for part, group in zip(ragged.split(query), ragged.groups):
    if group.tokens == 1:
      parts.append(_gpu_group(part, *pages, group, scale, softcap, interpret))
    else:
      parts.append(_gather_group(part, *pages, group, scale, softcap, None))
  return jnp.concatenate(parts).astype(query.dtype)


def _gpu_group(query, keys, values, group: Group, scale, softcap, interpret):
  """Returns the outputs of a group of rows of one token, [R, N, H]."""
  with warnings.catch_warnings():
    # JAX 0.12 marks the module as deprecated and names no other one.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import paged_attention as lib

  width, block = group.table.shape[1], max(1, _GPU_KEYS // keys.shape[2])
  parts = min(_GPU_PARTS, -(-width // block))
  # The kernel splits the table into equal parts, and every part into equal blocks.
  table = jnp.pad(group.table, ((0, 0), (0, -width % (parts * block))))
  # The kernel has no argument for the factor of the scores.
  scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
  return lib.paged_attention(
    scaled,
    keys,
    values,
    table,
    (group.start + 1).astype(jnp.int32),
    attn_logits_soft_cap=softcap,
    pages_per_compute_block=block,
    k_splits=parts,
    interpret=interpret,
  )


def within(
  group: Group, page_tokens: int, window: int | None
) -> tuple[Int[Array, "R M"], Int[Array, "R"]]:
  """Returns the pages that the queries of each row attend to.

  Args:
    group: the rows.
    page_tokens: number of tokens of a page.
    window: see `attention_paths.attend`. With a window that is shorter than the table,
      only the pages that the window can touch are returned.

  Returns:
    The page numbers, and the number of the first of these pages in its sequence.
  """
  table = group.table
  most = table.shape[1]
  if window is not None:
    # The queries of a row attend to `reach` consecutive keys, which begin anywhere in a
    # page.
    reach = window - 1 + group.tokens
    most = min(most, (reach - 2) // page_tokens + 2)
  if window is None or most == table.shape[1]:
    return table, jnp.zeros_like(group.start)
  first = jnp.maximum(group.start - window + 1, 0) // page_tokens
  columns = first[:, None] + jnp.arange(most)
  return jnp.take_along_axis(table, columns, axis=1, mode="clip"), first
