"""Rollouts by our own engine or padded sampler, from weights in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import numpy as np
from flax import nnx

from tunix.generate import engine_sampler
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.engine.engine import Engine
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.outputs import with_text
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.client import Stream
from tunix.rl.rollout.local_clients import EngineStream
from tunix.rl.rollout.sampler_rollout import SamplerRollout

# Engines of this library, which sample on the devices of a mesh.
NAMES = ("vanilla", "per_process", "padded")
_log = logging.getLogger(__name__)


class VanillaRollout(SamplerRollout):
  """Rollouts from a module; each call reads its current weights.

  The engine draws, or the padded sampler if the model does not suit the engine (see
  `engine_sampler.suits`). A run that is resumed goes on with the sampler it began with.

  Args:
    model: the module. On the actor's own mesh it is the actor itself.
    tokenizer: see `Sampler`.
    rollout_config: its `kv_cache_size` bounds the cache; its `gather_weights` chooses
      the layout of the weights.

  Raises:
    ValueError: `rollout_config` has engine options, or `center_scores` with a model
      that is for the padded sampler.
  """

  def __init__(
    self, model: nnx.Module, tokenizer: object, rollout_config: RolloutConfig
  ):
    check_options(rollout_config)
    self._arguments: tuple[Any, Any, RolloutConfig] = model, tokenizer, rollout_config
    suiting = engine_sampler.suits(model, rollout_config.gather_weights)
    self.sampler = "engine" if suiting and not self.is_always_padded else "padded"
    super().__init__(self._made())

  is_always_padded = False

  def _made(self) -> Any:
    model, tokenizer, config = self._arguments
    size = config.kv_cache_size
    cache = None if size is None else CacheConfig(cache_size=size)
    options = {"cache_config": cache, "gather_weights": config.gather_weights}
    if self.sampler == "padded":
      if config.center_scores:
        raise ValueError(
          f"center_scores is {config.center_scores} and the padded sampler draws; it "
          "records no probabilities. Set center_scores to 0, or use a model and a mesh "
          "that suit the engine (engine_sampler.suits)"
        )
      return Sampler(model, tokenizer, **options)
    head = config.center_scores
    return EngineSampler(
      model, tokenizer, slots=config.slots, record_head=head, **options
    )

  def use_sampler(self, name: str) -> None:
    if name not in (("padded",) if self.is_always_padded else ("engine", "padded")):
      super().use_sampler(name)
    if name != self.sampler:
      _log.warning(
        "this run was begun with the %s sampler and goes on with it, because the %s "
        "one rounds differently; a new run would use the latter",
        *(name, self.sampler),
      )
      self.sampler = name
      self._sampler = self._made()

  def _output(
    self, prompts: list[np.ndarray], steps: int, options: dict[str, Any]
  ) -> RolloutOutput:
    checked = SamplingOptions(max_generation_steps=steps, **options)
    rows = self._sampler.complete(prompts, checked)
    tokenizer, stops = self._sampler.tokenizer, checked.stops
    # The weights are those of `version`, whatever number the engine gave them.
    rows = [dataclasses.replace(row, versions=None) for row in rows]
    rows = [with_text(row, tokenizer, stops) for row in rows]
    return RolloutOutput.of(rows, self.version)

  def session(
    self, rows: int, max_tokens: int
  ) -> contextlib.AbstractContextManager[Engine | None]:
    if isinstance(self._sampler, EngineSampler):
      records = self._arguments[2].replay_routes
      return self._sampler.session(
        rows, max_tokens, record_routes=records, images=self.reads_images
      )
    return super().session(rows, max_tokens)

  def separate_engine(self, rows: int, max_tokens: int) -> tuple[Engine, nnx.Module]:
    """Returns an engine of its own, and its model: a clone with the same arrays.

    Args:
      rows: rows that run at the same time; at most the limits of the sampler.
      max_tokens: most tokens of a row.

    Raises:
      ValueError: the model is for the padded sampler.
    """
    self.check_stream()
    records = self._arguments[2].replay_routes
    return self._sampler.separate_engine(
      rows, max_tokens, record_routes=records, images=self.reads_images
    )

  def sampling_stream(self, config: RolloutConfig, rows: int, limit: int) -> Stream:
    return EngineStream(*self.separate_engine(rows, limit), config)

  def check_stream(self) -> None:
    if not isinstance(self._sampler, EngineSampler):
      raise ValueError(
        "the rollout engine is the padded sampler, and schedule is 'greedy', which "
        "needs our engine: use a model that suits it (engine_sampler.suits), or set "
        "schedule to lagged"
      )

  def update_params(self, model: nnx.Module, version: object) -> None:
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

  is_always_padded = True


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
