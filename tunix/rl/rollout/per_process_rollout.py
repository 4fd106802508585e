"""Rollouts by one engine in each process, which draws its share of a batch.

    process 0: prompts 0 to 3  -> engine on its own devices --+
                                                              +--> the whole batch,
    process 1: prompts 4 to 7  -> engine on its own devices --+    on every process

The key of a token is computed from the numbers of its prompt, sample and position.
Tokens therefore do not depend on the process that draws them. Results are exchanged
through the coordinator of `jax.distributed` and not by a program on the devices, so
that a thread may sample while another one trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from tunix.generate.engine.engine import Engine
from tunix.generate.engine_sampler import EngineSampler
from tunix.rl import local_arrays
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.utils import coordination, json_arrays, mesh as mesh_lib

# Seconds that a process waits for the others' completions after its own are drawn.
_TIMEOUT_S = 3600.0


class PerProcessRollout(VanillaRollout):
  """Rollouts by an engine on the devices of this process, see the module.

  Args:
    model: the module, on a mesh of this process; see `local_arrays`.
    tokenizer, rollout_config: see `VanillaRollout`.

  Attributes:
    mesh: the mesh of the engine, current while it draws.

  Raises:
    ValueError: the model does not suit the engine, see `engine_sampler.suits`.
  """

  is_per_process = True

  def __init__(self, model: nnx.Module, tokenizer: Any, rollout_config: RolloutConfig):
    shardings = (x.sharding for x in jax.tree.leaves(nnx.state(model)))
    mesh: Any = next(s.mesh for s in shardings if isinstance(s, jax.NamedSharding))
    self.mesh = mesh
    with mesh_lib.use_mesh(mesh):
      super().__init__(model, tokenizer, rollout_config)
    if not isinstance(self._sampler, EngineSampler):
      raise ValueError(
        f'rollout_engine is "per_process", and {type(model).__name__} on the mesh '
        f"{dict(mesh.shape)} does not suit the engine: use a decoder of tunix and "
        'a rollout mesh with the axis tp only, or set rollout_engine to "vanilla"'
      )
    self.sampler, self._waited_s = "per_process", 0.0

  def use_sampler(self, name: str) -> None:
    if name != self.sampler:
      BaseRollout.use_sampler(self, name)

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
      with mesh_lib.use_mesh(self.mesh):
        out = super(PerProcessRollout, self).generate(
          prompts[mine.start : mine.stop],
          rollout_config,
          num_generations=num_generations,
          seed=seed,
          first_prompt=first_prompt + mine.start,
        )
      return json_arrays.encoded({name: getattr(out, name) for name in _ROWS})

    parts = self.exchange("completions", drawn)
    outs = [
      RolloutOutput(**json_arrays.decoded(part), version=self.version)
      for part in parts
      if part is not None
    ]
    return outs[0].joined(outs[1:])

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

  @contextlib.contextmanager
  def session(self, rows: int, max_tokens: int) -> Iterator[Engine | None]:
    with mesh_lib.use_mesh(self.mesh), super().session(rows, max_tokens) as engine:
      yield engine


_ROWS = [
  f.name
  for f in dataclasses.fields(RolloutOutput)
  if f.name not in ("version", "versions")
]
