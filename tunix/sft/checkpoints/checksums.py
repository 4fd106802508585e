"""Checksums of the arrays and JSON values of a checkpoint.

The files of a checkpoint have no checksum over array data, so a flipped bit would be
loaded as another number. The checksum (XXH3, 64 bits) is that of the values in memory,
one for each block of an array that a device holds. It is compared after reading, so it
covers everything in between: the compression, the disk and its cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tunix.utils import tree

# Name of a value -> [[bounds of a block, checksum], ...]. The bounds are [start, stop]
# by axis. A JSON value has one block without bounds.
Checksums = Mapping[str, list[list[Any]]]


class ChecksumError(ValueError):
  """A value of a checkpoint is not the one that was written."""


def of(arrays: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the checksums of the blocks that this process writes.

  Args:
    arrays: trees of arrays by name of the item.
    values: JSON values by name of the item.
  """
  out = {name: [[[], _of_json(value)]] for name, value in values.items()}
  for name, leaf in _named(arrays):
    blocks = [[at, _of_block(block)] for at, block in _blocks(leaf, written=True)]
    if blocks:
      out[name] = blocks
  return out


def joined(parts: Iterable[Checksums]) -> dict[str, Any]:
  """Returns the checksums of all processes."""
  out: dict[str, Any] = {}
  for part in parts:
    for name, blocks in part.items():
      out[name] = out.get(name, []) + blocks
  return out


def check(
  saved: Checksums, arrays: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
  """Compares what was read with the checksums of the checkpoint.

  An array may be laid out in other blocks than those that were written. Then this
  process checks it if it holds the whole array.

  Args:
    saved: the checksums.
    arrays, values: see `of`.

  Raises:
    ChecksumError: a value differs; the message names it.
  """
  wrong = [n for n, v in values.items() if n in saved and saved[n][0][1] != _of_json(v)]
  for name, leaf in _named(arrays):
    sums = {json.dumps(at): checksum for at, checksum in saved.get(name, [])}
    held = {json.dumps(at): block for at, block in _blocks(leaf, written=False)}
    if not sums.keys() & held.keys() and _is_whole(leaf):
      whole = np.asarray(_data(leaf))
      held = {at: whole[tuple(slice(*x) for x in json.loads(at))] for at in sums}
    if any(_of_block(held[at]) != sums[at] for at in sums.keys() & held.keys()):
      wrong.append(name)
  if wrong:
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise ChecksumError(f"{wrong[0]}{more} differs from what was written")


def _named(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  for item, part in arrays.items():
    for path, leaf in tree.flatten(part).items():
      yield f"{item}/{path}", leaf


def _data(leaf: Any) -> Any:
  """Returns an array of numbers; that of a random key is its data."""
  is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(leaf) if is_key else leaf


def _is_whole(leaf: object) -> bool:
  return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _blocks(leaf: object, *, written: bool) -> Iterator[tuple[list[list[int]], Any]]:
  """Returns (bounds, values) of the blocks of an array on this process, each once.

  Args:
    leaf: the array.
    written: leave out blocks that another process writes.
  """
  data = _data(leaf)
  if not isinstance(data, jax.Array):
    if not written or jax.process_index() == 0:
      yield [[0, size] for size in data.shape], data
    return
  seen = set()
  for shard in data.addressable_shards:
    if written and shard.replica_id:
      continue
    pairs = zip(shard.index, data.shape)
    bounds = [[x.start or 0, size if x.stop is None else x.stop] for x, size in pairs]
    if (key := str(bounds)) not in seen:
      seen.add(key)
      yield bounds, shard.data


def _of_block(block: object) -> str:
  import xxhash

  values = np.ascontiguousarray(block).reshape(-1)
  return xxhash.xxh3_64_hexdigest(values.view(np.uint8).data)


def _of_json(value: object) -> str:
  import xxhash

  # As it is read back: tuples are lists, and keys are texts.
  plain = json.loads(json.dumps(value))
  return xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())
