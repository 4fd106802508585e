"""Layers that read the keys and values of an earlier layer (Gemma 3n and 4).

The last `shared_kv_layers` layers have no keys and values of their own. Each reads
those of the last earlier layer of its type. Without a cache every layer passes its keys
and
values on beside the residual stream, and a later layer of the same type replaces them:
the last ones that were passed on are the ones to read. So the layers can be scanned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tunix.models.transformer.config import LayerKind, TransformerConfig

# Keys and values by type of layer.
Sources = Mapping[str, Any]
Name = tuple[str, bool]  # see `TransformerConfig.kind_names`


def empty_sources(config: TransformerConfig, x: jax.Array) -> dict[str, Any]:
  """Returns the keys and values before the first layer, which no layer reads.

  Args:
    config: the configuration of the decoder.
    x: the residual stream [B, T, D].
  """
  kinds = {
    name: config.kinds[config.layer_kinds[i]] for name, i in config.kv_sources.items()
  }

  def zeros(kind):
    return jnp.zeros((*x.shape[:2], kind.num_kv_heads, kind.head_dim), x.dtype)

  return {name: (zeros(kind), zeros(kind)) for name, kind in kinds.items()}


def source_of(sources: Sources, name: Name | None) -> Any:
  """Returns the keys and values that a layer reads; None for its own ones."""
  return sources[name[0]] if name is not None and name[1] else None


def after(
  sources: dict[str, Any], name: Name | None, written: object
) -> dict[str, Any]:
  """Returns the keys and values to pass on after a layer of this kind."""
  if name is None or name[1] or name[0] not in sources:
    return sources
  return sources | {name[0]: written}


def cache_kinds(config: TransformerConfig) -> list[LayerKind]:
  """Returns the kind of each layer for its cache.

  A sliding layer that others read keeps all tokens: the others read its buffers after
  the new tokens are written, when a ring has lost the oldest tokens that the first new
  token attends to.
  """
  read = set(config.kv_sources.values())
  kinds = [config.kinds[kind] for kind in config.layer_kinds]
  return [k._replace(window=None) if i in read else k for i, k in enumerate(kinds)]
