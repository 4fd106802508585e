"""Pads requests to a few fixed shapes, each of which compiles one program.

Every function here takes and returns host arrays.
"""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Padding of id lists: no vocabulary has this id, and scatters drop it as out of range.
NO_TOKEN = 2**31 - 1
_MIN_IDS = 8  # shortest padded id list, so that 1 to 8 ids share a program
MIN_TOKENS = 16  # smallest bucket for a prompt, and for new tokens
MIN_SLOT_TOKENS = 64  # smallest bucket for a slot of the engine


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Shape:
  """The sizes that the programs of a request are compiled for.

  Prefill is compiled for all five sizes, the token loop for `decode`.

  Attributes:
    prompts: P, prompts in the prefill.
    width: W, tokens of a padded prompt.
    rows: B, completions.
    slots: S, tokens of a row, prompt and completion together.
    columns: N, new tokens of a row.
  """

  prompts: int
  width: int
  rows: int
  slots: int
  columns: int

  @property
  def decode(self) -> tuple[int, int, int]:
    """Sizes that the token loop is compiled for: (rows, slots, columns)."""
    return self.rows, self.slots, self.columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """The bounds of a sampler's requests.

  Attributes:
    cache_size: largest number of tokens of a row; None for no bound.
    movable: True if a prompt can be moved inside the cache after the prefill. New
      tokens then overwrite its padding. If False, prompts get less padding, so that
      padding and tokens fit.
    shards: number of devices that split the rows.
  """

  cache_size: int | None = None
  movable: bool = True
  shards: int = 1

  def shape(
    self,
    prompts: int,
    samples: int,
    longest: int,
    steps: int,
    stated: int | None,
    beams: int | None = None,
  ) -> Shape:
    """Returns the fixed shape that holds a request.

    Args:
      prompts: number of prompts.
      samples: completions of each prompt.
      longest: tokens of the longest prompt.
      steps: most new tokens of a row.
      stated: width of the prompts, at least `longest`; None: a power of two.
      beams: rows of each prompt in beam search, where prompts that only fill the batch
        have beams too; None: no beam search.

    Raises:
      ValueError: the request does not fit into the cache.
    """
    width = bucket(longest, MIN_TOKENS) if stated is None else stated
    columns = bucket(steps, MIN_TOKENS)
    slots = width + columns
    size = self.cache_size
    if size is not None:
      needed = longest if stated is None else stated
      if needed + steps > size:
        raise ValueError(
          f"{needed} prompt tokens and max_generation_steps={steps} need "
          f"{needed + steps} slots, and the cache has {size}. Raise "
          "CacheConfig.cache_size, or generate fewer tokens"
        )
      if not self.movable:
        width = min(width, size - steps)
      width, columns, slots = (min(x, size) for x in (width, columns, slots))
    filled = self._rows(prompts)
    return Shape(
      prompts=filled,
      width=width,
      rows=self._rows(prompts * samples) if beams is None else filled * beams,
      slots=slots,
      columns=columns,
    )

  def _rows(self, count: int) -> int:
    """Returns a power of two, rounded up to a multiple of the devices."""
    rows = bucket(count)
    return rows + -rows % self.shards

  def shapes(
    self, prompts: int, samples: int, longest: int, steps: int, stated: int | None
  ) -> list[Shape]:
    """Returns the shapes of all requests up to the given sizes, sorted.

    Args:
      prompts: most prompts.
      samples: most completions of each prompt.
      longest: most tokens of the longest prompt.
      steps: most new tokens of a row.
      stated: width of the prompts; None: a power of two.
    """
    counts = {(p, n) for p in range(1, prompts + 1) for n in range(1, samples + 1)}
    shapes = {
      self.shape(p, n, tokens, new, stated)
      for p, n in counts
      for tokens in ([1] if stated is not None else bucket_minima(longest))
      for new in bucket_minima(steps)
      if self.cache_size is None or (stated or tokens) + new <= self.cache_size
    }
    return sorted(shapes)


def bucket_minima(size: int) -> list[int]:
  """Returns the smallest size of every bucket of tokens, up to the bucket of `size`."""
  ends = [0]
  while max(MIN_TOKENS, 2 * ends[-1]) < size:
    ends.append(max(MIN_TOKENS, 2 * ends[-1]))
  return [end + 1 for end in ends]


def shorter_prompts(longest: int, steps: int) -> list[int]:
  """Returns lengths of prompts that need other programs than the longest prompts.

  There is one length for each of these sets of programs.

  Args:
    longest: tokens of the longest prompt.
    steps: most new tokens of a row.
  """

  def buckets(length: int) -> tuple[int, int]:
    return bucket(length, MIN_TOKENS), bucket(length + steps, MIN_SLOT_TOKENS)

  lengths = {buckets(length): length for length in range(1, longest + 1)}
  return sorted(lengths.values())[:-1]


def bucket(size: int, least: int = 1) -> int:
  """Returns the smallest power of two that is at least `size` and `least`."""
  return max(least, 1 << (size - 1).bit_length())


def left_padded(
  prompts: Sequence[np.ndarray], rows: int, width: int, fill: int
) -> tuple[np.ndarray, np.ndarray]:
  """Pads prompts on the left.

  Args:
    prompts: ids of each prompt.
    rows: B, number of rows; those behind the prompts only fill the batch.
    width: W, tokens of a row.
    fill: padding id.

  Returns:
    int32 [B, W] tokens and bool [B, W] mask, True on the prompts' tokens.
  """
  tokens = np.full((rows, width), fill, np.int32)
  mask = np.zeros((rows, width), bool)
  # A row without a prompt also gets one visible token, because a softmax over no key is
  # NaN.
  mask[:, -1] = True
  for row, prompt in enumerate(prompts):
    tokens[row, width - len(prompt) :] = prompt
    mask[row, width - len(prompt) :] = True
  return tokens, mask


def right_padded(
  rows: Sequence[np.ndarray], width: int, dtype: np.typing.DTypeLike, fill: int = 0
) -> np.ndarray:
  """Returns an array [B, width, ...] of the rows, padded with `fill` on the right."""
  deeper = np.shape(rows[0])[1:] if len(rows) else ()
  out = np.full((len(rows), width, *deeper), fill, dtype)
  for target, row in zip(out, rows):
    target[: len(row)] = row
  return out


def id_list(ids: Sequence[int]) -> np.ndarray:
  """Returns int32 ids, padded with NO_TOKEN to a power of two of at least 8."""
  out = np.full(bucket(max(len(ids), 1), _MIN_IDS), NO_TOKEN, np.int32)
  out[: len(ids)] = ids
  return out


def random_key(seed: int | jax.Array | None) -> jax.Array:
  """Returns the random key of a call.

  Args:
    seed: an int, a typed or raw `jax.random` key, or None for a random one.

  Raises:
    TypeError: the seed has another type.
    ValueError: the seed is an int outside [0, 2**32), which JAX would cut to 32 bits;
      or None with several processes.
  """
  if seed is None:
    if jax.process_count() > 1:
      raise ValueError(
        "seed is None, and several processes would draw different tokens: give every "
        "process the same seed"
      )
    return jax.random.key(secrets.randbits(32))
  if isinstance(seed, jax.Array) and seed.ndim == 0:
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
      return seed
  elif isinstance(seed, jax.Array) and seed.dtype == jnp.uint32:
    return jax.random.wrap_key_data(seed)
  try:
    number = operator.index(seed)
  except TypeError as error:
    raise TypeError(
      f"seed has type {type(seed).__name__}, expected an int or a jax.random key"
    ) from error
  if not 0 <= number < 2**32:
    raise ValueError(f"seed is {number}, expected an int from 0 to 2**32 - 1")
  return jax.random.key(number)
