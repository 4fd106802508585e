"""Rollouts by our own sampler, from weights that this process holds."""

from __future__ import annotations

from typing import Any

from flax import nnx

from tunix.generate.sampler import CacheConfig, Sampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.sampler_rollout import SamplerRollout


class VanillaRollout(SamplerRollout):
  """Samples from a module, as it stands at each call.

  Args:
    model: the module; colocated, it is the actor itself.
    tokenizer: see `Sampler`.
    rollout_config: its `kv_cache_size` bounds the cache, `gather_weights` lays the
      weights out.

  Raises:
    ValueError: engine_options, of which there are none here.
  """

  def __init__(self, model: nnx.Module, tokenizer: Any, rollout_config: RolloutConfig):
    check_options(rollout_config)
    size = rollout_config.kv_cache_size
    cache = None if size is None else CacheConfig(cache_size=size)
    super().__init__(
      Sampler(model, tokenizer, cache, gather_weights=rollout_config.gather_weights)
    )

  def update_params(self, model: Any, version: Any) -> None:
    """Samples as `version` from here on.

    Raises:
      ValueError: `model` is not the module that this engine was made with.
    """
    if model is not self.model():
      raise ValueError(
        "the vanilla rollout samples from the module it was made with: copy weights "
        "into it (placement.copy_weights) instead of handing another one over"
      )
    self.version = version

  def model(self) -> nnx.Module:
    return self._sampler.transformer


def check_options(rollout_config: RolloutConfig) -> None:
  """Refuses what our own sampler would not read.

  Raises:
    ValueError: engine_options.
  """
  if rollout_config.engine_options:
    raise ValueError(
      f"engine_options {sorted(rollout_config.engine_options)} are for other "
      "engines: the vanilla rollout has none, leave them out"
    )
