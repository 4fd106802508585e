"""From ragged requests to the few fixed shapes that programs are compiled for: host
arrays in, host arrays out."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Stands for no token in lists of ids that are filled up to a fixed length.
NO_TOKEN = 2**31 - 1
_LEAST_IDS = 8
MIN_TOKENS = 16  # smallest space for a prompt, and for new tokens


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Shape:
  """What the programs of a request are compiled for: prefill for all of it, decoding
  for `rows`, `slots` and `columns`.

  Attributes:
    prompts: P, prompts in the prefill.
    width: W, tokens of a padded prompt.
    rows: B, completions.
    slots: S, tokens of a row, prompt and completion.
    columns: N, new tokens of a row.
  """

  prompts: int
  width: int
  rows: int
  slots: int
  columns: int

  @property
  def decode(self) -> tuple[int, int, int]:
    """What the token loop is compiled for."""
    return self.rows, self.slots, self.columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What a sampler's requests must keep to.

  Attributes:
    cache_size: most tokens of a row, or None.
    movable: prompts can be moved inside the cache once they are in it, so that their
      padding costs no slots. Else the padding shrinks where it would not fit.
    shards: over how many devices rows are spread.
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
    """The fixed shape that holds a request.

    Args:
      prompts: how many.
      samples: completions a prompt.
      longest: tokens of the longest prompt.
      steps: most new tokens of a row.
      stated: the width that the caller wants instead of a power of two; no less than
        the longest.
      beams: a prompt's rows instead of the samples, for its filling as well.

    Raises:
      ValueError: it does not fit.
    """
    width = bucket(longest, MIN_TOKENS) if stated is None else stated
    columns = bucket(steps, MIN_TOKENS)
    slots = width + columns
    size = self.cache_size
    if size is not None:
      needed = longest if stated is None else stated
      if needed + steps > size:
        raise ValueError(
          f"{needed} prompt tokens and max_generation_steps={steps} make "
          f"{needed + steps}, the cache holds {size}: raise CacheConfig.cache_size or "
          "generate fewer tokens"
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
    rows = bucket(count)
    return rows + -rows % self.shards

  def shapes(
    self, prompts: int, samples: int, longest: int, steps: int, stated: int | None
  ) -> list[Shape]:
    """All shapes of requests that are at most as large in every respect."""
    counts = {(p, n) for p in range(1, prompts + 1) for n in range(1, samples + 1)}
    shapes = {
      self.shape(p, n, tokens, new, stated)
      for p, n in counts
      for tokens in ([1] if stated is not None else least_of_buckets(longest))
      for new in least_of_buckets(steps)
      if self.cache_size is None or (stated or tokens) + new <= self.cache_size
    }
    return sorted(shapes)


def least_of_buckets(size: int) -> list[int]:
  """The smallest size in every bucket of tokens up to that of `size`."""
  ends = [0]
  while max(MIN_TOKENS, 2 * ends[-1]) < size:
    ends.append(max(MIN_TOKENS, 2 * ends[-1]))
  return [end + 1 for end in ends]


def bucket(size: int, least: int = 1) -> int:
  """The power of two, from `least` up, that holds `size`."""
  return max(least, 1 << (size - 1).bit_length())


def left_padded(
  prompts: Sequence[np.ndarray], rows: int, width: int, fill: int
) -> tuple[np.ndarray, np.ndarray]:
  """int32 [rows, width] tokens and their bool mask.

  Rows without a prompt hold one token, so that every row has something to look at.
  """
  tokens = np.full((rows, width), fill, np.int32)
  mask = np.zeros((rows, width), bool)
  mask[:, -1] = True
  for row, prompt in enumerate(prompts):
    tokens[row, width - len(prompt) :] = prompt
    mask[row, width - len(prompt) :] = True
  return tokens, mask


def right_padded(
  rows: Sequence[np.ndarray], width: int, dtype: np.typing.DTypeLike, fill: int = 0
) -> np.ndarray:
  """[rows, width, ...], filled up with `fill` on the right."""
  deeper = np.shape(rows[0])[1:] if len(rows) else ()
  out = np.full((len(rows), width, *deeper), fill, dtype)
  for target, row in zip(out, rows):
    target[: len(row)] = row
  return out


def id_list(ids: Sequence[int]) -> np.ndarray:
  """int32 ids, filled up with NO_TOKEN to a power of two from 8 up."""
  out = np.full(bucket(max(len(ids), 1), _LEAST_IDS), NO_TOKEN, np.int32)
  out[: len(ids)] = ids
  return out


def random_key(seed: int | jax.Array | None) -> jax.Array:
  """The key of a call: of an int, a key (typed or raw), or a fresh one for None.

  Raises:
    TypeError: the seed is of another kind.
    ValueError: an int outside [0, 2**32), which JAX would cut to 32 bits; None with
      several processes.
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
      f"seed of type {type(seed).__name__} is neither an int nor a jax.random key"
    ) from error
  if not 0 <= number < 2**32:
    raise ValueError(f"seed is {number}, it must be from 0 to 2**32 - 1")
  return jax.random.key(number)
