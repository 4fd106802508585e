"""Base class of rollouts of which each process draws a share.

The key of a token is computed from the numbers of its prompt, sample and position.
Tokens therefore do not depend on the process that draws them. Results are exchanged
through the coordinator of `jax.distributed` and not by a program on the devices, so
that a thread may sample while another one trains.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate.tokens import Completion
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
from tunix.rl.weights import local_arrays
from tunix.utils import array_codec, coordination

# Seconds that a process waits for the others' completions after its own are drawn.
_TIMEOUT_S = 3600.0


class SharedRollout(BaseRollout):
  """Rollouts of which each process draws a share. Subclasses write `_draw`."""

  is_per_process = True
  _waited_s = 0.0

  def use_sampler(self, name: str) -> None:
    BaseRollout.use_sampler(self, name)  # also in a class that has several samplers

  def generate(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int = 1,
    seed: Any = None,
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

  @abc.abstractmethod
  def _draw(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int,
    seed: Any,
    first_prompt: int,
  ) -> RolloutOutput:
    """Draws completions in this process; see `BaseRollout.generate`."""

  def exchange(self, what: str, work: Callable[[], Any]) -> list[Any]:
    """Returns the results of all processes, see `coordination.exchange`.

    Args:
      what: subject of the exchange.
      work: function that draws this process's share and returns it as JSON.

    Raises:
      AbsentError: another process failed, or did not take part in time.
    """
    finished = [0.0]

    def timed() -> Any:
      out = work()
      finished[0] = time.monotonic()
      return out

    parts = coordination.exchange(what, timed, _TIMEOUT_S)
    self._waited_s += time.monotonic() - finished[0]
    return parts

  def take_waited(self) -> float:
    """Returns the seconds since the last call that exchanges waited for others."""
    waited, self._waited_s = self._waited_s, 0.0
    return waited


_ROWS = [
  f.name
  for f in dataclasses.fields(RolloutOutput)
  if f.name not in ("version", "versions")
]


def to_json(out: RolloutOutput) -> dict[str, Any]:
  """Returns completions as JSON, without their versions."""
  return array_codec.to_json({name: getattr(out, name) for name in _ROWS})


def from_json(saved: dict[str, Any], version: Any) -> RolloutOutput:
  """Returns the completions of `to_json`, drawn by a version of the weights."""
  return RolloutOutput(**array_codec.from_json(saved), version=version)


def actions_to_json(actions: Sequence[Completion]) -> list[dict[str, Any]]:
  """Returns actions of episodes as JSON, without their prompts and texts."""
  own = lambda x: {"episode": x.number, "finish_reason": x.finish_reason}
  return array_codec.to_json([own(x) | x.saved() for x in actions])


def actions_from_json(saved: list[dict[str, Any]], version: int) -> list[Completion]:
  """Returns the actions of `actions_to_json`, drawn by a version of the weights."""
  return [
    Completion.of_saved(
      {**row, "versions": np.full(len(row["ids"]), version, np.int32)},
      number=row["episode"],
      finish_reason=row["finish_reason"],
    )
    for row in array_codec.from_json(saved)
  ]
