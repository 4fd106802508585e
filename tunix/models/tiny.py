"""Tiny configurations with all features of a model, for tests and trial runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tunix.models.transformer.config import (
  DeltaNetConfig,
  Mamba2Config,
  TransformerConfig,
)
from tunix.utils.setting import named_values

# Divisible by eight devices, and by the blocks of quantized kernels (64 inputs).
_SIZES = {"embed_dim": 64, "hidden_dim": 128, "num_heads": 8, "head_dim": 16}
_KV_HEADS = 4
_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "hidden_dim": 64}
_TOWER = {"num_layers": 1, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2}
_LATENT = {"kv_rank": 64, "nope_dim": 8, "rope_dim": 8, "value_dim": 16}
_WINDOW = 16
_DELTA = {"num_heads": 8, "num_key_heads": 4, "head_dim": 16, "key_dim": 16}
_DIVISORS = ("short_factors", "long_factors")
_MAMBA = {"num_heads": 8, "head_dim": 16, "state_dim": 16, "groups": 2}


def shrink(config: TransformerConfig, vocab_size: int) -> TransformerConfig:
  """Returns a tiny configuration with all features of the given one.

  It has two layers, or one of each type if there are more. It keeps norms, soft caps
  and biases, and experts or a vision tower if the configuration has them.

  Args:
    config: a configuration of any family.
    vocab_size: V of the result.
  """
  kinds = tuple(dict.fromkeys(config.layer_types or ()))
  grouped = config.num_kv_heads < config.num_heads
  layers = max(2, len(kinds))
  shared = layers if config.shared_kv_layers else 0  # they follow layers to read
  fields: dict[str, Any] = {
    "num_layers": layers + shared,
    "shared_kv_layers": shared,
    "vocab_size": vocab_size,
    "num_kv_heads": _KV_HEADS if grouped else _SIZES["num_heads"],
    "layer_types": (kinds * 4)[: layers + shared] or None,
    "type_fields": tuple((name, _shrunk(own)) for name, own in config.type_fields),
  }
  if config.sliding_window is not None:
    fields["sliding_window"] = min(config.sliding_window, _WINDOW)
  if config.shared_kv_hidden_dim is not None:
    fields["shared_kv_hidden_dim"] = 2 * _SIZES["hidden_dim"]
  if config.layer_input_dim is not None:
    fields |= {"layer_input_dim": 16, "layer_input_vocab": vocab_size}
  if config.moe is not None:
    dense = (0,) if config.moe.dense_layers else ()
    shared = config.moe.shared_hidden_dim and _EXPERTS["hidden_dim"]
    own = {"dense_layers": dense, "shared_hidden_dim": shared}
    if config.moe.groups > 1:  # of two experts, so that half the groups are used
      own |= {"groups": 4, "groups_used": 2}
    fields["moe"] = dataclasses.replace(config.moe, **_EXPERTS, **own)
  if config.mla is not None:
    rank = None if config.mla.q_rank is None else 64
    mla = dataclasses.replace(config.mla, q_rank=rank, **_LATENT)
    fields["mla"] = mla
    if config.query_scale is not None:  # proportional to query_dim ** -0.5
      shorter = config.mla.query_dim / mla.query_dim
      fields["query_scale"] = config.query_scale * math.sqrt(shorter)
  if config.num_heads * config.head_dim == config.embed_dim:  # some families demand it
    fields["head_dim"] = _SIZES["embed_dim"] // _SIZES["num_heads"]
  if config.rope.scaling == "longrope":  # it has numbers for each pair of dimensions
    head_dim = fields.get("head_dim", _SIZES["head_dim"])
    pairs = config.rope.rotated(head_dim) // 2
    divisors = named_values(config.rope, _DIVISORS)
    numbers = {name: x[:pairs] for name, x in divisors.items()}
    fields["rope"] = dataclasses.replace(config.rope, **numbers)
  tower = getattr(config, "vision", None)  # families that take images
  if tower is not None:
    deepstack = {"deepstack": (0,)} if getattr(tower, "deepstack", ()) else {}
    fields["vision"] = dataclasses.replace(tower, **_TOWER, **deepstack)
  return dataclasses.replace(config, **_SIZES | fields)


def _shrunk(own: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
  """Returns the fields of layers of one type with tiny sizes."""
  fields = dict(own)
  if isinstance(fields.get("mixer"), Mamba2Config):
    fields["mixer"] = dataclasses.replace(fields["mixer"], **_MAMBA)
  if isinstance(fields.get("mixer"), DeltaNetConfig):
    fields["mixer"] = dataclasses.replace(fields["mixer"], **_DELTA)
  tiny = {"head_dim": 2 * _SIZES["head_dim"], "num_kv_heads": _KV_HEADS}
  return tuple((fields | {k: v for k, v in tiny.items() if k in fields}).items())
