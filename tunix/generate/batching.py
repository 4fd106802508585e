"""From ragged requests to the few fixed shapes that programs are compiled for, and
back: host arrays in, host arrays out."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray

# Stands for no token in lists of ids that are filled up to a fixed length.
NO_TOKEN = 2**31 - 1
_LEAST_IDS = 8


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


def id_list(ids: Sequence[int]) -> np.ndarray:
  """int32 ids, filled up with NO_TOKEN to a power of two from 8 up."""
  out = np.full(bucket(max(len(ids), 1), _LEAST_IDS), NO_TOKEN, np.int32)
  out[: len(ids)] = ids
  return out


def cut(
  buffer: Array, lengths: Array, width: int | None = None, fill: int = 0
) -> list[np.ndarray] | np.ndarray:
  """The first `lengths[b]` columns of the first rows of `buffer` [B, N, ...].

  Returns: an array a row; with a `width` one array [B, width, ...] filled up with
    `fill`.
  """
  rows = np.asarray(buffer)[: len(lengths)]
  if width is None:
    return [row[:length].copy() for row, length in zip(rows, lengths)]
  kept = np.arange(width) < np.asarray(lengths)[:, None]
  kept = kept.reshape(kept.shape + (1,) * (rows.ndim - 2))
  return np.where(kept, rows[:, :width], np.asarray(fill, rows.dtype))


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
