"""Rollouts by our own sampler, from weights in this process."""

from __future__ import annotations

from typing import Any

from flax import nnx

from tunix.generate.engine_sampler import sampler_of
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.sampler_rollout import SamplerRollout


class VanillaRollout(SamplerRollout):
  """Rollouts from a module; each call reads its current weights.

  Args:
    model: the module. On the actor's own mesh it is the actor itself.
    tokenizer: see `Sampler`.
    rollout_config: its `kv_cache_size` bounds the cache; its `gather_weights` chooses
      the layout of the weights.

  Raises:
    ValueError: `rollout_config` has engine options.
  """

  def __init__(self, model: nnx.Module, tokenizer: Any, rollout_config: RolloutConfig):
    check_options(rollout_config)
    size = rollout_config.kv_cache_size
    cache = None if size is None else CacheConfig(cache_size=size)
    super().__init__(
      self._make(
        model,
        tokenizer,
        cache_config=cache,
        gather_weights=rollout_config.gather_weights,
        slots=rollout_config.slots,
      )
    )

  _make = staticmethod(sampler_of)

  def update_params(self, model: Any, version: Any) -> None:
    """Stores the version; the weights are in the module already.

    Raises:
      ValueError: `model` is not the module that this engine was made with.
    """
    if model is not self.model():
      raise ValueError(
        "model is another module than the one that the vanilla rollout was made with: "
        "copy weights into that one (placement.copy_weights)"
      )
    self.version = version

  def model(self) -> nnx.Module:
    return self._sampler.transformer


class PaddedRollout(VanillaRollout):
  """Rollouts by the padded sampler, whatever the model is."""

  @staticmethod
  def _make(
    model: nnx.Module, tokenizer: Any, *, slots: Any, **options: Any
  ) -> Sampler:
    del slots
    return Sampler(model, tokenizer, **options)


def check_options(rollout_config: RolloutConfig) -> None:
  """Refuses engine options, which our own sampler does not have.

  Raises:
    ValueError: `rollout_config` has engine options.
  """
  if rollout_config.engine_options:
    raise ValueError(
      f"engine_options has {sorted(rollout_config.engine_options)}, expected none: "
      "they are for other engines than vanilla, leave them out"
    )
