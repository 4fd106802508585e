"""The implementations of attention over pages, each on the heads of one device.

`paged.PATHS` lists their features and refuses unsupported calls. "gather" runs on every
platform. "ragged" was compiled by the TPU compiler, and its arguments were checked
through the reference of its package; no TPU has run it. "gpu_paged" was checked in the
Pallas interpreter, and drew on an H200.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tunix.models.transformer.paged.rows import Group, Ragged
from tunix.ops import sinks as sink_ops

# Score of a hidden key. It is finite: an idle row sees no key.
NEVER = -1e30

# Largest number of keys, of queries, and of numbers of all heads of these queries that
# "ragged" has in a TPU's vector memory at once. The speed of other sizes is not
# measured. The kernel's own table of sizes needs a TPU on the machine that compiles.
_TPU_KEYS = 512
_TPU_QUERIES = 32
_TPU_NUMBERS = 64 * 32 * 128  # twice as many do not fit a v5e

# Keys of a block of "gpu_paged", most parts of a sequence that run at once, and blocks
# that keep a GPU busy; not measured. A part writes a result of 16 heads for each key
# head, which takes as much memory as 8 tokens.
_GPU_KEYS = 64
_GPU_PARTS = 8
_GPU_PROGRAMS = 1024


def gather(
  query: Float[Array, "T N H"],
  pages: tuple[jax.Array, ...],
  ragged: Ragged,
  scale: float,
  softcap: float | None,
  window: int | None,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
  """Copies the pages of every row and computes all scores at once.

  Args:
    query: queries in the order of `ragged`.
    pages: keys and values, [K, P, page, H] each.
    ragged: the rows.
    scale, softcap, window, sinks: see `attention_paths.attend`.
  """
  keys, values = pages
  parts = [
    _gather_group(part, keys, values, group, scale, softcap, window, sinks)
    for part, group in zip(ragged.split(query), ragged.groups)
  ]
  return jnp.concatenate(parts).astype(query.dtype)


def _gather_group(
  query, keys, values, group: Group, scale, softcap, window, sinks=None
):
  """Returns the outputs of one group, [R * Q, N, H]."""
  heads, size, head_dim = keys.shape[0], *keys.shape[2:]
  rows, n = group.start.shape[0], query.shape[1]
  table, first = within(group, size, window)
  copied = (heads, rows, table.shape[1] * size, head_dim)
  # One index for heads and pages: with two, XLA's TPU compiler copies all pages into
  # another layout.
  index = jnp.arange(heads)[:, None, None] * keys.shape[1] + table

  def take(pages):
    return pages.reshape(-1, size, head_dim)[index].reshape(copied)

  key, value = take(keys).astype(query.dtype), take(values).astype(query.dtype)

  slot = first[:, None] * size + jnp.arange(copied[2])  # position of each key, [R, S]
  at = group.positions[:, :, None]  # position of each query, [R, Q, 1]
  written = slot < (group.start + group.count)[:, None]
  visible = (slot[:, None] <= at) & written[:, None]
  if window is not None:
    visible &= slot[:, None] > at - window
  # A page may hold NaNs of an earlier sequence after its last key, and 0 * NaN is NaN.
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
    by_group = None if sinks is None else sinks.reshape(heads, 1, -1, 1)
    weights = sink_ops.softmax(scores, by_group).astype(value.dtype)
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

  Args:
    query, ragged, scale, softcap, window: see `gather`.
    pages: see `joint_layout`.
    kernel: replaces the kernel; for tests.
  """
  size, short = pages[0].shape[1], pages[0].shape[3] - query.shape[2]
  tables, lengths, tokens, queries = [], [], [0], []
  for part, group in zip(ragged.split(query), ragged.groups):
    table, first = within(group, size, window)
    tables.append(table)
    # An idle row must have a key, because the kernel waits for a copy of every row.
    length = jnp.where(group.count > 0, group.start + group.count - first * size, 1)
    lengths.append(length)
    tokens += [group.tokens] * group.rows
    queries.append(_rolled(part, group, group.tokens - group.count))
  widest = max(table.shape[1] for table in tables)
  tables = [jnp.pad(x, ((0, 0), (0, widest - x.shape[1]))) for x in tables]
  rows = (
    jnp.concatenate(lengths).astype(jnp.int32),
    jnp.concatenate(tables).astype(jnp.int32),
    jnp.asarray(np.cumsum(tokens), jnp.int32),
    jnp.asarray([len(tokens) - 1], jnp.int32),
  )
  options = {"sm_scale": scale, "sliding_window": window, "soft_cap": softcap}
  kernel = _tpu_kernel if kernel is None else kernel
  padded = jnp.pad(jnp.concatenate(queries), ((0, 0), (0, 0), (0, short)))
  parts = zip(jnp.split(padded, len(pages), axis=1), pages)
  out = jnp.concatenate([kernel(*pair, *rows, **options) for pair in parts], axis=1)
  outs = zip(ragged.split(out[..., : query.shape[2]]), ragged.groups)
  return jnp.concatenate([_rolled(x, group, group.count) for x, group in outs])


def _rolled(x: jax.Array, group: Group, by: jax.Array) -> jax.Array:
  """Moves the tokens of each row of a group by a number of places, [R * Q, ...].

  The TPU's kernel counts the position of a query from the end of its row's keys, so the
  valid queries must be the last ones of a row. A roll by the number of paddings moves
  them there, and a roll by their own number moves them back.
  """
  if group.tokens == 1:
    return x
  rows = x.reshape(group.rows, group.tokens, *x.shape[1:])
  index = (jnp.arange(group.tokens) - by[:, None]) % group.tokens
  return jnp.take_along_axis(rows, index[:, :, None, None], axis=1).reshape(x.shape)


def joint_layout(kv_heads: int, head_dim: int, dtype: DTypeLike) -> tuple[int, int]:
  """Returns the layout of joint pages: the number of arrays A, and their H.

  Each array is [P, page, 2K / A, H] and holds K / A of the key heads of every device.
  Its head 2k holds the keys of its key head k, and its head 2k + 1 the values.

  Args:
    kv_heads: number of key heads K of one device.
    head_dim: size H of a head.
    dtype: dtype of keys and values.
  """
  padded = head_dim + -head_dim % 128  # the kernel works on whole vector registers
  # A tile has 8 rows of 32 bits. The kernel takes whole tiles, or a power of two below.
  # It reads single heads of an array with several only if H is 128.
  tile = 8 * 4 // (2 * jnp.dtype(dtype).itemsize)
  fits = kv_heads % tile == 0 or (kv_heads < tile and kv_heads & (kv_heads - 1) == 0)
  return (1 if fits and padded == 128 else kv_heads), padded


def _tpu_kernel(query, both, lengths, table, *rows: object, **options: object):
  # Imported here, because Pallas takes a second to import and few programs need it.
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as lib

  tokens, heads, head_dim = query.shape
  queries = min(tokens, _TPU_QUERIES, max(1, _TPU_NUMBERS // (heads * head_dim)))
  return lib.ragged_paged_attention(
    query,
    both,
    lengths,
    table,
    *rows,
    num_kv_pages_per_block=min(table.shape[1], max(1, _TPU_KEYS // both.shape[1])),
    num_queries_per_block=queries,
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

  Args:
    query, pages, ragged, scale, softcap: see `gather`.
    window: None; the kernel has no window.
    interpret: if True, the kernel runs in the Pallas interpreter, on any platform.
  """
  assert window is None  # `paged.PATHS` refuses it
  keys, values = pages
  parts = []
  for part, group in zip(ragged.split(query), ragged.groups):
    if group.tokens == 1:
      parts.append(_gpu_group(part, keys, values, group, scale, softcap, interpret))
    else:
      parts.append(_gather_group(part, keys, values, group, scale, softcap, None))
  return jnp.concatenate(parts).astype(query.dtype)


def _gpu_group(query, keys, values, group: Group, scale, softcap, interpret):
  """Returns the outputs of a group of rows of one token, [R, N, H]."""
  with warnings.catch_warnings():
    # JAX 0.12 marks the module as deprecated and names no other one.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import paged_attention as lib

  width, block = group.table.shape[1], max(1, _GPU_KEYS // keys.shape[2])
  parts = _GPU_PROGRAMS // (query.shape[0] * keys.shape[0])
  parts = max(1, min(parts, _GPU_PARTS, -(-width // block)))
  # The kernel splits the table into equal parts, and every part into equal blocks.
  table = jnp.pad(group.table, ((0, 0), (0, -width % (parts * block))))
  # The kernel has no argument for the factor of the scores.
  scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
  return lib.paged_attention(
    scaled,
    keys,
    values,
    table,
    jnp.where(group.count > 0, group.start + 1, 0).astype(jnp.int32),
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


def write_split(
  key: Float[Array, "T K H"],
  value: Float[Array, "T K H"],
  pages: tuple[jax.Array, ...],
  page: Int[Array, "T"],
  slot: Int[Array, "T"],
) -> tuple[jax.Array, ...]:
  """Writes tokens to pages of keys and pages of values, [K, P, page, H] each.

  Args:
    key, value: keys and values of the tokens.
    pages: the pages.
    page, slot: the place of each token; page 0 for tokens that are not written.
  """
  heads, count, size, head_dim = pages[0].shape
  place = page * size + slot
  # One index for heads, pages and slots, for the same reason as in `_gather_group`.
  index = jnp.arange(heads)[:, None] * (count * size) + place
  index = _dropped(index, page == 0, heads * count * size)

  def one(pages, new):
    flat = pages.reshape(-1, head_dim)
    new = new.swapaxes(0, 1).astype(pages.dtype)
    flat = flat.at[index].set(new, mode="drop", unique_indices=True)
    return flat.reshape(pages.shape)

  return one(pages[0], key), one(pages[1], value)


def write_joint(
  key: Float[Array, "T K H"],
  value: Float[Array, "T K H"],
  pages: tuple[jax.Array, ...],
  page: Int[Array, "T"],
  slot: Int[Array, "T"],
) -> tuple[jax.Array, ...]:
  """Writes tokens to joint pages; see `joint_layout`, and `write_split` for Args."""
  count, size, _, head_dim = pages[0].shape
  both = jnp.stack([key, value], axis=2).astype(pages[0].dtype)  # [T, K, 2, H]
  both = jnp.pad(both, ((0, 0),) * 3 + ((0, head_dim - key.shape[2]),))
  index = _dropped(page * size + slot, page == 0, count * size)
  written = []
  for old, new in zip(pages, jnp.split(both, len(pages), axis=1)):
    flat = old.reshape(count * size, -1, head_dim)
    new = new.reshape(new.shape[0], -1, head_dim)
    flat = flat.at[index].set(new, mode="drop", unique_indices=True)
    written.append(flat.reshape(old.shape))
  return tuple(written)


def _dropped(index: jax.Array, is_dropped: jax.Array, end: int) -> jax.Array:
  """Replaces indices by numbers from `end` on, which a scatter drops.

  The numbers differ, because the scatter is told that all indices do.
  """
  unused = end + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
  return jnp.where(is_dropped, unused, index)
