"""Rotary settings of a GGUF file, in both directions.

llama.cpp has metadata for "linear" and "yarn". The other kinds are tables of divisors,
one per frequency, that are stored as tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix.models.gguf.file import File
from tunix.models.transformer.attention.rope import frequencies, length_factor
from tunix.models.transformer.config import RopeConfig
from tunix.models.transformer.hf.rope import rope_of
from tunix.utils import attributes

FREQS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
TABLES = (FREQS, SHORT, LONG)

_SKIPPED = 1e30  # divisor of the frequencies that "proportional" leaves out
_THETA = 10_000.0
_LLAMA3_CONTEXT = 8192  # llama.cpp's converter knows no other original context
_BETAS = {
  "beta_fast": "rope.scaling.yarn_beta_fast",
  "beta_slow": "rope.scaling.yarn_beta_slow",
}
_ATTENTION = "rope.scaling.yarn_attn_factor"
_CONTEXT = "rope.scaling.original_context_length"


def read(file: File, theta: float = _THETA) -> dict[str, Any]:
  """Returns the flat table `rope_parameters` of `config.json`.

  Args:
    file: the file.
    theta: base of the frequencies if the file does not give it.

  Raises:
    ValueError: the kind of scaling is unknown, or one of its numbers is missing.
  """
  base = {"rope_theta": file.number("rope.freq_base", theta)}
  kind = file.text("rope.scaling.type", "none")
  if file.floats(LONG) is not None:
    return base | _read_longrope(file)
  if (table := file.floats(FREQS)) is not None:
    return base | _read_table(table, base["rope_theta"])
  if kind == "none":
    return base | {"rope_type": "default"}
  if kind in ("linear", "yarn"):
    factor = file.number("rope.scaling.factor")
    more = _read_yarn(file, factor) if kind == "yarn" else {}
    return base | {"rope_type": kind, "factor": factor} | more
  raise ValueError(
    f"rope.scaling.type is {kind!r}; expected 'none', 'linear', 'yarn' or a table of "
    "factors. Use another file of this model"
  )


def _read_yarn(file: File, factor: float) -> dict[str, Any]:
  out: dict[str, Any] = {"original_max_position_embeddings": _original(file)}
  given = {field: key for field, key in _BETAS.items() if key in file.metadata}
  out |= {field: file.number(key) for field, key in given.items()}
  if _ATTENTION in file.metadata:
    # llama.cpp multiplies its number by the factor that is the default here.
    default = length_factor(RopeConfig(scaling="yarn", factor=factor))
    out["attention_factor"] = file.number(_ATTENTION) * default
  return out


def _read_longrope(file: File) -> dict[str, Any]:
  tables = {}
  for field, name in (("short_factor", SHORT), ("long_factor", LONG)):
    table = file.floats(name)
    if table is None:
      raise ValueError(f"tensor {name!r} is missing: use another file of this model")
    tables[field] = table.tolist()
  original = max(2, _original(file))  # whose logarithm divides
  scaled = {
    "rope_type": "longrope",
    "original_max_position_embeddings": original,
    "factor": max(1.0, file.whole("context_length") / original),
    **tables,
  }
  attention = file.number("rope.scaling.attn_factor", 1.0)
  if not math.isclose(attention, length_factor(rope_of(scaled, 1.0)), rel_tol=1e-6):
    scaled["attention_factor"] = attention
  return scaled


def _original(file: File) -> int:
  return int(file.scalar(_CONTEXT) or file.whole("context_length"))


def _read_table(table: np.ndarray, theta: float) -> dict[str, Any]:
  """Returns the settings that a table of divisors comes from."""
  skipped = table >= _SKIPPED / 2
  if skipped.any():
    turning, pairs = int((~skipped).sum()), len(table)
    share = turning / pairs
    if int(share * 2 * pairs // 2) < turning:  # as `frequencies` counts them
      share = (turning + 0.5) / pairs
    return {"rope_type": "proportional", "partial_rotary_factor": share}
  llama3 = {
    "rope_type": "llama3",
    "factor": float(table.max()),
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": _LLAMA3_CONTEXT,
  }
  usual = divisors(rope_of(llama3, theta), 2 * len(table))
  if table.max() > 1 and np.allclose(table, usual, rtol=1e-4):
    return llama3
  # Any table can be expressed in this kind, whose two tables are then the same.
  return {
    "rope_type": "longrope",
    "original_max_position_embeddings": _LLAMA3_CONTEXT,
    "factor": 1.0,
    "attention_factor": 1.0,
    "short_factor": table.tolist(),
    "long_factor": table.tolist(),
  }


def divisors(config: RopeConfig, head_dim: int) -> np.ndarray:
  """Returns the divisors of the frequencies, float32 [H/2]."""
  plain = np.asarray(frequencies(head_dim, RopeConfig(theta=config.theta)))
  scaled = np.asarray(frequencies(head_dim, config))
  with np.errstate(divide="ignore"):
    return np.where(scaled == 0, np.float32(_SKIPPED), plain / scaled)


def write(config: RopeConfig) -> dict[str, Any]:
  """Returns the metadata of rotary settings, by keys without the architecture.

  Raises:
    ValueError: llama.cpp cannot express the settings.
  """
  out: dict[str, Any] = {"rope.freq_base": float(config.theta)}
  if config.query_beta is not None:
    raise ValueError(
      "llama_4_scaling_beta is given; this architecture of llama.cpp has none"
    )
  if config.scaling in ("linear", "yarn"):
    out["rope.scaling.type"] = config.scaling
    out["rope.scaling.factor"] = float(config.factor)
  if config.scaling == "yarn":
    out[_CONTEXT] = config.original_max_position
    betas = attributes.of(config, _BETAS)
    out |= {_BETAS[field]: float(beta) for field, beta in betas.items()}
    default = length_factor(RopeConfig(scaling="yarn", factor=config.factor))
    if not math.isclose(length_factor(config), default):
      out[_ATTENTION] = length_factor(config) / default
  if config.scaling == "longrope":
    out["rope.scaling.type"] = "longrope"
    out[_CONTEXT] = config.original_max_position
    out["rope.scaling.attn_factor"] = length_factor(config)
  return out


def tables(config: RopeConfig, head_dim: int) -> dict[str, np.ndarray]:
  """Returns the tensors of rotary settings by name, float32 [H/2]; often none.

  Args:
    config: the settings; those of full layers if a model has two kinds of layers.
    head_dim: number of dimensions of a head that are rotated.
  """
  if config.scaling == "longrope":
    return {
      SHORT: np.asarray(config.short_factors, np.float32),
      LONG: np.asarray(config.long_factors, np.float32),
    }
  if config.scaling in ("llama3", "proportional"):
    return {FREQS: divisors(config, head_dim)}
  return {}


def parse(hf: Mapping[str, Any]) -> RopeConfig:
  """Returns the rotary settings of a canonical `config.json`, those of full layers."""
  table = dict(hf["rope_parameters"])
  table = dict(table.get("full_attention", table))
  if table["rope_type"] != "proportional":  # Phi's is stored as a number of dimensions
    table.pop("partial_rotary_factor", None)
  return rope_of(table, table["rope_theta"])
