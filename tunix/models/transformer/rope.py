"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split form."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.models.transformer.config import RopeConfig


def frequencies(head_dim: int, config: RopeConfig) -> Float[Array, " H/2"]:
  """Angular frequencies in radians per token, float32, scaled as the config says.

  "linear" is position interpolation (Chen et al. 2023, arXiv:2306.15595); "llama3" is
  the rule of the Llama 3.1 checkpoints: frequencies whose wavelength exceeds
  original_max_position / low_freq_factor are divided by `factor`, those shorter than
  original_max_position / high_freq_factor are kept, and between the two the divided
  and the kept frequency are blended linearly in original_max_position / wavelength;
  "yarn" blends them linearly in the number of the dimension (Peng et al. 2023,
  arXiv:2309.00071, section 3.2).
  """
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  base = 1.0 / (config.theta**exponent)
  if config.scaling is None:
    return base
  divided = base / config.factor
  if config.scaling == "linear":
    return divided
  if config.scaling == "yarn":
    keep = _yarn_keep(head_dim, config)
    return keep * base + (1 - keep) * divided
  turns = config.original_max_position * base / (2 * math.pi)
  low, high = config.low_freq_factor, config.high_freq_factor
  keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return keep * base + (1 - keep) * divided


def _yarn_keep(head_dim: int, config: RopeConfig) -> Float[Array, " H/2"]:
  """How much of each undivided frequency YaRN keeps: 1 to 0 over the ramp."""

  def dimension(turns: float) -> float:
    """The (fractional) pair that turns this often within the original context."""
    wavelength = config.original_max_position / turns
    return (
      head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))
    )

  low, high = dimension(config.beta_fast), dimension(config.beta_slow)
  if config.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  ramp = (jnp.arange(head_dim // 2) - low) / max(high - low, 1e-3)
  return 1 - jnp.clip(ramp, 0.0, 1.0)


def length_factor(config: RopeConfig) -> float:
  """What queries and keys are multiplied by, besides being turned (YaRN)."""
  if config.scaling != "yarn":
    return 1.0
  if config.attention_factor is not None:
    return config.attention_factor
  return 0.1 * math.log(config.factor) + 1.0


def angles(
  positions: Int[Array, "B T"], head_dim: int, config: RopeConfig
) -> tuple[Float[Array, "B T 1 H/2"], Float[Array, "B T 1 H/2"]]:
  """(sin, cos) for every position, float32, times `length_factor`; computed once for
  all layers of a kind."""
  angle = positions[..., None].astype(jnp.float32) * frequencies(head_dim, config)
  factor = length_factor(config)
  return factor * jnp.sin(angle)[:, :, None], factor * jnp.cos(angle)[:, :, None]


def rotate(
  x: Float[Array, "B T N H"], sin_cos: tuple[jax.Array, jax.Array]
) -> Float[Array, "B T N H"]:
  """Rotates the pairs (x[i], x[i + H/2]); computed in float32, returned as x.dtype."""
  sin, cos = sin_cos
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return turned.astype(x.dtype)
