"""Selects the functions that decode each kind of model.

There are three kinds: our own decoder, another model with its own KV cache, and a
causal model without a cache. `decoder_of` returns the functions of one kind. All other
modules of the sampler use only these functions and do not depend on the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from tunix.generate.decoders import cached, memory, recompute
from tunix.models import calling
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.model import Transformer


class Decoder(NamedTuple):
  """The functions that decode one kind of model, with or without a KV cache.

  The "memory" of a request is the state that a decode step passes to the next step.

  Attributes:
    prefill: `(model, tokens, mask, slots) -> (logits, memory)`; runs the prompts. With
      a cache also `(..., images=...)`.
    step: `(model, tokens, memory) -> (logits, memory)`; runs one token per row.
    repeat: `(model, memory, source) -> memory`; copies or reorders rows.
    shift: `(memory, by) -> memory`; moves every row `by` slots to the left, over the
      padding of its prompt. None if the model's cache cannot be moved.
    cache_bytes: `(model, slots) -> int`; bytes of one row's cache.
    can_split_products: True if the devices of the batch axes can share the matrix
      products of a decode step (see `layout`).
  """

  prefill: Callable[..., Any]
  step: Callable[..., Any]
  repeat: Callable[..., Any]
  shift: Callable[..., Any] | None
  cache_bytes: Callable[[Any, int], int]
  can_split_products: bool = False


_OWN_CACHE = Decoder(
  cached.prefill, cached.step, memory.repeat, None, memory.cache_bytes
)
# Slots can be moved only in our own cache. Another model's cache may store its number
# of tokens in a field that this package does not know.
_OURS = _OWN_CACHE._replace(shift=memory.shift, can_split_products=True)
# Without a cache, prompts start at slot 0: there is no padding to move them over.
_NO_CACHE = Decoder(
  recompute.prefill,
  recompute.step,
  recompute.repeat,
  shift=lambda memory, by: memory,
  cache_bytes=lambda model, slots: 0,
)


def decoder_of(model: nnx.Module) -> Decoder:
  """Returns the functions that decode `model`.

  Args:
    model: a module. A model with `init_cache(batch_size, cache_size)` decodes through
      its cache; any other model runs its whole sequence for every token.
  """
  if isinstance(model, Transformer):
    return _OURS
  return _OWN_CACHE if hasattr(model, "init_cache") else _NO_CACHE


def unstacked(model: Any) -> Any:
  """Returns the model with one module per layer; other models are unchanged."""
  return model.unstack() if hasattr(model, "unstack") else model


def sharding_rules(model: nnx.Module) -> ShardingRules | None:
  """Returns the mesh axes of the model's config; None if the config names none."""
  return calling.config_value(model, "sharding")


def max_positions(model: nnx.Module | None) -> int | None:
  """Returns the largest number of tokens of a row, by the model's config.

  The result is None if the config has no limit.
  """
  most = calling.config_value(model, "max_position")
  return calling.config_value(model, "max_cached", most)
