"""Reader and writer of rotary settings as fields of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig
from tunix.models.transformer.hf.values import (
  HfConfig,
  flag,
  integer,
  listed,
  number,
  table,
  text,
)
from tunix.utils import attributes, checks

_DEFAULT_THETA = 10_000.0


def read_rope(hf: HfConfig) -> RopeConfig:
  """Returns the rotary settings, from either spelling.

  `rope_parameters` (transformers 5) is one table of all settings. The older spelling is
  `rope_scaling` with a separate `rope_theta`. If a file has both, `rope_scaling` wins,
  as in transformers.

  Raises:
    ValueError: the kind of scaling is unknown, or one of its numbers is missing.
  """
  values = table(hf, "rope_scaling") or table(hf, "rope_parameters")
  if any(isinstance(value, Mapping) for value in values.values()):
    raise ValueError(
      f"rope_parameters {values!r} are not one flat table: this family has no rotary "
      "settings by kind of layer"
    )
  theta = number(values, "rope_theta", number(hf, "rope_theta", _DEFAULT_THETA))
  return rope_of(values, theta)


def rope_of(values: Mapping[str, Any], theta: float) -> RopeConfig:
  """Returns the rotary settings of one flat table.

  Args:
    values: the table.
    theta: base of the frequencies.

  Raises:
    ValueError: the kind of scaling is unknown, or one of its numbers is missing.
  """
  kind: Any = text(values, "rope_type", text(values, "type", "default"))
  partial = values.get("partial_rotary_factor")
  if partial not in (None, 1) and kind != "proportional":
    raise ValueError(
      f"partial_rotary_factor is {partial!r}, supported is only 1 for rope_type "
      f"{kind!r}"
    )
  common: dict[str, Any] = {"theta": theta}
  if beta := number(values, "llama_4_scaling_beta", 0.0, checks.NOT_NEGATIVE):
    common["query_beta"] = beta
    common["original_max_position"] = integer(
      values, "original_max_position_embeddings"
    )
  if kind == "default":
    return RopeConfig(**common)
  if kind not in _ROPE_READERS:
    raise ValueError(
      f"rope_type {kind!r} is not supported: it must be 'default' or one of "
      f"{sorted(_ROPE_READERS)}"
    )
  fields = _ROPE_READERS[kind](values)
  return RopeConfig(scaling=kind, **common | fields)


def _read_llama3(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "factor": number(values, "factor"),
    "low_freq_factor": number(values, "low_freq_factor"),
    "high_freq_factor": number(values, "high_freq_factor"),
    "original_max_position": integer(values, "original_max_position_embeddings"),
  }


def _optional(values: Mapping[str, Any], field: str) -> float | None:
  return None if values.get(field) is None else number(values, field)


def _read_yarn(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "original_max_position": integer(values, "original_max_position_embeddings"),
    "factor": number(values, "factor"),
    "beta_fast": number(values, "beta_fast", 32.0),
    "beta_slow": number(values, "beta_slow", 1.0),
    "attention_factor": _optional(values, "attention_factor"),
    # transformers takes a 0 of these two for an absent number.
    "mscale": number(values, "mscale", 0.0, checks.NOT_NEGATIVE) or None,
    "mscale_all_dim": number(values, "mscale_all_dim", 0.0, checks.NOT_NEGATIVE)
    or None,
    "truncate": flag(values, "truncate", True),
  }


def _read_longrope(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "original_max_position": integer(values, "original_max_position_embeddings"),
    "factor": number(values, "factor"),
    "attention_factor": _optional(values, "attention_factor"),
    **{f"{x}_factors": _numbers(values, f"{x}_factor") for x in ("short", "long")},
  }


def _numbers(values: Mapping[str, Any], field: str) -> tuple[float, ...]:
  return tuple(number({field: value}, field) for value in listed(values, field))


def _read_proportional(values: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "factor": number(values, "factor", 1.0),
    "partial": number(values, "partial_rotary_factor", 1.0),
  }


_ROPE_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
  "linear": lambda values: {"factor": number(values, "factor")},
  "llama3": _read_llama3,
  "yarn": _read_yarn,
  "longrope": _read_longrope,
  "proportional": _read_proportional,
}


_YARN = (
  *("beta_fast", "beta_slow", "truncate"),
  *("attention_factor", "mscale", "mscale_all_dim"),
)


def scaling_fields(rope: RopeConfig) -> dict[str, Any]:
  """Returns the fields of rotary scaling, without the base of the frequencies."""
  scaling: dict[str, Any] = {"rope_type": rope.scaling or "default"}
  if rope.query_beta is not None:
    scaling["llama_4_scaling_beta"] = rope.query_beta
    scaling["original_max_position_embeddings"] = rope.original_max_position
  # transformers warns of a factor of "proportional", for which 1 is the default.
  if rope.scaling not in (None, "proportional") or rope.factor != 1.0:
    scaling["factor"] = rope.factor
  if rope.scaling in ("llama3", "yarn", "longrope"):
    scaling["original_max_position_embeddings"] = rope.original_max_position
  if rope.scaling == "proportional":
    scaling["partial_rotary_factor"] = rope.partial
  if rope.scaling == "llama3":
    scaling["low_freq_factor"] = rope.low_freq_factor
    scaling["high_freq_factor"] = rope.high_freq_factor
  if rope.scaling == "yarn":
    usual = attributes.of(RopeConfig, _YARN)
    values = attributes.of(rope, _YARN)
    scaling |= {name: x for name, x in values.items() if x != usual[name]}
  if rope.scaling == "longrope":
    scaling["short_factor"] = list(rope.short_factors)
    scaling["long_factor"] = list(rope.long_factors)
    if rope.attention_factor is not None:
      scaling["attention_factor"] = rope.attention_factor
  return scaling


def write_rope(rope: RopeConfig) -> dict[str, Any]:
  """Returns the rotary settings in both spellings, for old and new readers."""
  scaling = scaling_fields(rope)
  return {
    "rope_parameters": scaling | {"rope_theta": rope.theta},
    "rope_scaling": None if rope.scaling is None else scaling,
    "rope_theta": rope.theta,
  }


def read_by_kind(
  hf: HfConfig, theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
  """Returns the rotary settings of full and of sliding layers, in either spelling.

  The newer spelling is `rope_parameters`, a table per kind of layer. The older spelling
  is `rope_scaling`, which applies to full layers only.

  Args:
    hf: the parsed `config.json`.
    theta: base of the frequencies of full layers, if no table gives it.
    local_theta: the same for sliding layers.

  Raises:
    ValueError: the settings are not tables by kind of layer, or see `rope_of`.
  """
  both = table(hf, "rope_parameters")
  if "rope_type" in both:
    raise ValueError(f"rope_parameters is {both!r}, expected a table by kind of layer")
  full = dict(table(both, "full_attention")) | dict(table(hf, "rope_scaling"))
  local = table(both, "sliding_attention")
  return (
    rope_of(full, number(full, "rope_theta", theta)),
    rope_of(local, number(local, "rope_theta", local_theta)),
  )


def write_by_kind(config: TransformerConfig) -> dict[str, Any]:
  """Returns the rotary settings of full and of sliding layers, the newer spelling."""
  local = config.local_rope or config.rope
  by_kind = {
    "full_attention": scaling_fields(config.rope) | {"rope_theta": config.rope.theta},
    "sliding_attention": scaling_fields(local) | {"rope_theta": local.theta},
  }
  return {"rope_parameters": by_kind}
