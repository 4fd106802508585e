"""Base class of rollouts of which each process draws a share.

The key of a token is computed from the numbers of its prompt, sample and position.
Tokens therefore do not depend on the process that draws them. Results are exchanged
through the coordinator of `jax.distributed` and not by a program on the devices, so
that a thread may sample while another one trains.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
from tunix.rl.rollout.client import SamplingClient
from tunix.rl.weights import local_arrays
from tunix.utils import array_codec, attributes, coordination


class SharedRollout(BaseRollout):
  """Rollouts of which each process draws a share. Subclasses write `_draw`."""

  def use_sampler(self, name: str) -> None:
    BaseRollout.use_sampler(self, name)  # also in a class that has several samplers

  def generate(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int = 1,
    seed: jax.Array | int | None = None,
    first_prompt: int = 0,
  ) -> RolloutOutput:
    """Returns completions of all prompts, of which this process draws its share.

    Every process calls it with the same arguments; see `BaseRollout.generate`.

    Raises:
      AbsentError: another process failed, or did not take part in time.
    """
    mine = coordination.share(len(prompts))
    if isinstance(seed, jax.Array):
      seed = local_arrays.key_here(seed)

    def drawn() -> dict[str, Any] | None:
      if not mine:
        return None
      out = self._draw(
        prompts[mine.start : mine.stop],
        rollout_config,
        num_generations=num_generations,
        seed=seed,
        first_prompt=first_prompt + mine.start,
      )
      return to_json(out)

    parts = self.exchange("completions", drawn)
    outs = [from_json(part, self.version) for part in parts if part is not None]
    return outs[0].joined(outs[1:])

  def sampling_client(
    self, config: RolloutConfig, key: jax.Array, **sizes: int
  ) -> AbstractContextManager[SamplingClient]:
    return super().sampling_client(config, local_arrays.key_here(key), **sizes)

  @abc.abstractmethod
  def _draw(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int,
    seed: jax.Array | int | None,
    first_prompt: int,
  ) -> RolloutOutput:
    """Draws completions in this process; see `BaseRollout.generate`."""


_ROWS = [
  f.name
  for f in dataclasses.fields(RolloutOutput)
  if f.name not in ("version", "versions")
]


def to_json(out: RolloutOutput) -> dict[str, Any]:
  """Returns completions as JSON, without their versions."""
  return array_codec.to_json(attributes.known(out, _ROWS))


def from_json(saved: dict[str, Any], version: object) -> RolloutOutput:
  """Returns the completions of `to_json`, drawn by a version of the weights."""
  return RolloutOutput(**array_codec.from_json(saved), version=version)
