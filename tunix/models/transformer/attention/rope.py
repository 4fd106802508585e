"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tunix.models.transformer.config import RopeConfig


def frequencies(head_dim: int, config: RopeConfig) -> Float[Array, " H/2"]:
  """Returns the angular frequencies in radians per token, float32, scaled.

  - "linear" is position interpolation (Chen et al. 2023, arXiv:2306.15595).
  - "llama3" is the rule of the Llama 3.1 checkpoints. Frequencies whose wavelength
    exceeds original_max_position / low_freq_factor are divided by `factor`. Those whose
    wavelength is below original_max_position / high_freq_factor are kept. Between them
    the two are blended linearly in original_max_position / wavelength.
  - "yarn" blends the two linearly in the number of the dimension (Peng et al. 2023,
    arXiv:2309.00071, section 3.2).
  - "longrope" divides each frequency by its own number (Ding et al. 2024,
    arXiv:2402.13753). The result is the one of short sequences, see `angles`.
  - "proportional" divides all frequencies by `factor` and sets those of the last pairs
    to 0, so that only the first `partial` H/2 pairs turn (Gemma 4).

  Scaled frequencies are computed on the host, with transformers' operations in float32:
  checkpoints were trained with these numbers, and the last bit of a frequency is 2e-4
  radians at position 2,048. Unscaled frequencies are computed by XLA. Computing them on
  the host would change their last bits, and with them the results of resumed runs.
  """
  if config.scaling is None:
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / (config.theta**exponent)
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  # The power is computed in float64 and rounded once: float32 powers differ between
  # libraries.
  waves = np.power(config.theta, exponents.astype(np.float64)).astype(np.float32)
  factor = np.float32(config.factor)
  if config.scaling == "linear":
    return jnp.asarray(1 / waves / factor)
  if config.scaling == "longrope":
    return _divided(waves, config.short_factors)
  if config.scaling == "proportional":
    turns = np.arange(head_dim // 2) < int(config.partial * head_dim // 2)
    return jnp.asarray(np.where(turns, 1 / waves / factor, np.float32(0)))
  if config.scaling == "yarn":
    keep = _yarn_keep(head_dim, config)
    return jnp.asarray(1 / (factor * waves) * (1 - keep) + 1 / waves * keep)
  return jnp.asarray(_llama3(1 / waves, config))


def _divided(waves: np.ndarray, factors: tuple[float, ...]) -> jax.Array:
  """Returns 1 / (factors * waves), float32 [H/2]."""
  if len(factors) != len(waves):
    raise ValueError(
      f"rope has {len(factors)} short_factors and long_factors; expected "
      f"{len(waves)}, one per pair of rotated dimensions"
    )
  return jnp.asarray(1 / (np.asarray(factors, np.float32) * waves))


def _llama3(base: np.ndarray, config: RopeConfig) -> np.ndarray:
  """Returns the scaled frequencies, float32 [H/2], of the unscaled ones."""
  low, width = config.low_freq_factor, config.high_freq_factor - config.low_freq_factor
  low, width, factor = np.float32(low), np.float32(width), np.float32(config.factor)
  context = np.float32(config.original_max_position)
  # torch computes number / tensor as a product with the reciprocal, and so does this
  # line, to get the same bits.
  waves = 1 / base * np.float32(2 * math.pi)
  keep = np.clip((1 / waves * context - low) / width, 0, 1)
  return np.where(
    keep == 0, base / factor, (1 - keep) * base / factor + keep * base
  ).astype(np.float32)


def _yarn_keep(head_dim: int, config: RopeConfig) -> np.ndarray:
  """Returns the share of each unscaled frequency that YaRN keeps, float32 [H/2].

  The share is 1 for fast frequencies and falls linearly to 0 for slow ones.
  """

  def dimension(turns: float) -> float:
    """Returns the fractional pair with this many turns in the original context."""
    wavelength = config.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

  low, high = dimension(config.beta_fast), dimension(config.beta_slow)
  if config.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  # A ramp of width 0 becomes a step. If the ramp ends before the first pair (a context
  # shorter than the slowest turns), its width is negative and all frequencies are kept,
  # as in transformers.
  width = np.float32(high - low if high != low else 1e-3)
  pairs = np.arange(head_dim // 2, dtype=np.float32)
  return 1 - np.clip((pairs - np.float32(low)) / width, 0, 1)


def length_factor(config: RopeConfig) -> float:
  """Returns the factor of queries and keys; 1 except for "yarn" and "longrope"."""
  if config.scaling not in ("yarn", "longrope"):
    return 1.0
  if config.attention_factor is not None:
    return config.attention_factor
  if config.scaling == "longrope":
    return math.sqrt(
      1 + math.log(config.factor) / math.log(config.original_max_position)
    )

  def grown(m):
    return 0.1 * m * math.log(config.factor) + 1.0

  if config.mscale is None or config.mscale_all_dim is None:
    return grown(1.0)
  return grown(config.mscale) / grown(config.mscale_all_dim)


class Angles(NamedTuple):
  """Rotary angles of positions; the leading axes of all arrays are the same.

  Attributes:
    sin, cos: float32 [..., B, T, 1, R/2], times `length_factor`; R dimensions of a head
      are rotated.
    query: factor of the queries, float32 [..., B, T, 1, 1], or None.
  """

  sin: jax.Array
  cos: jax.Array
  query: jax.Array | None = None

  def for_queries(self) -> Angles:
    """Returns the angles whose rotation multiplies by `query` too."""
    if self.query is None:
      return self
    return Angles(self.sin * self.query, self.cos * self.query, self.query)


Positions = Int[Array, "B T"] | Int[Array, "B T R/2"]


def angles(positions: Positions, head_dim: int, config: RopeConfig) -> Angles:
  """Returns the sines and cosines of every position, float32, times `length_factor`.

  Positions [B, T, R/2] are those of each rotated pair, see `Transformer.__call__`.

  With "longrope" each sequence of a row has the frequencies of its own length in this
  call. transformers takes the length of the longest row, so a row alone agrees with it.
  """
  waves = frequencies(config.rotated(head_dim), config)
  if config.scaling == "longrope":
    longer = dataclasses.replace(config, short_factors=config.long_factors)
    exceeds = _lengths(positions) > config.original_max_position
    long_waves = frequencies(config.rotated(head_dim), longer)
    waves = jnp.where(exceeds[..., None], long_waves, waves)
  positions = positions[..., None] if positions.ndim == 2 else positions
  angle = positions.astype(jnp.float32) * waves
  factor = length_factor(config)
  return Angles(
    factor * jnp.sin(angle)[:, :, None], factor * jnp.cos(angle)[:, :, None]
  )


def _lengths(positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the length of each token's sequence, its last position in the row + 1.

  A sequence ends where the next position does not follow.
  """
  count = positions.shape[1]
  follows = positions[:, 1:] == positions[:, :-1] + 1
  index = jnp.arange(count, dtype=jnp.int32)
  ends = jnp.where(jnp.pad(follows, ((0, 0), (0, 1))), count - 1, index)
  last = jax.lax.cummin(ends, axis=1, reverse=True)
  return jnp.take_along_axis(positions, last, axis=1) + 1


def angles_by_kind(
  positions: Positions, ropes: Sequence[tuple[int, RopeConfig | None]]
) -> Angles | tuple[Angles, ...]:
  """Returns the angles of all kinds of layer.

  They are computed once for all layers of a kind. If all kinds rotate the same number
  of dimensions, the arrays have a leading axis over the kinds; else each kind has its
  own arrays. See `of_kind`.

  Args:
    positions: rotary positions, see `angles`.
    ropes: the size H of a head, and the rotary embedding of each kind. None stands for
      angles of 0, which leave queries and keys as they are.
  """
  rotated = {rope.rotated(size) for size, rope in ropes if rope is not None}
  if len(rotated) > 1:
    each = [angles_by_kind(positions, [rope]) for rope in ropes]
    return tuple(of_kind(one, 0) for one in each)
  half = max(rotated, default=ropes[0][0]) // 2
  still = (
    jnp.zeros((*positions.shape[:2], 1, half), jnp.float32),
    jnp.ones((*positions.shape[:2], 1, half), jnp.float32),
  )
  pairs = [still if r is None else angles(positions, n, r)[:2] for n, r in ropes]
  sin, cos = (jnp.stack(parts) for parts in zip(*pairs))
  if all(rope is None or rope.query_beta is None for _, rope in ropes):
    return Angles(sin, cos)
  factors = [_query_factor(positions, rope) for _, rope in ropes]
  return Angles(sin, cos, jnp.stack(factors)[..., None, None])


def of_kind(by_kind: Angles | tuple[Angles, ...], kind: int | jax.Array) -> Angles:
  """Returns the angles of one kind; `kind` is an int if the kinds differ in shape."""
  if isinstance(by_kind, Angles):
    return jax.tree.map(lambda each: each[kind], by_kind)
  return by_kind[kind]


def _query_factor(
  positions: Int[Array, "B T"], rope: RopeConfig | None
) -> Float[Array, "B T"]:
  """Returns the factors of the queries, see `RopeConfig.query_beta`."""
  if rope is None or rope.query_beta is None:
    return jnp.ones(positions.shape, jnp.float32)
  contexts = (positions // rope.original_max_position).astype(jnp.float32)
  return 1 + rope.query_beta * jnp.log(1 + contexts)


def rotate(x: Float[Array, "B T N H"], angles: Angles) -> Float[Array, "B T N H"]:
  """Rotates the pairs (x[i], x[i + R/2]) in float32, and returns x's dtype.

  R is the number of rotated dimensions, the first ones of a head; the others stay.
  """
  sin, cos = angles.sin, angles.cos
  half = sin.shape[-1]
  wide = x.astype(jnp.float32)
  first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  if rest.shape[-1]:
    turned.append(rest if angles.query is None else rest * angles.query)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)
