"""Rollouts by one engine in each process, which draws its share of a batch.

process 0: prompts 0 to 3  -> engine on its own devices --+
                                                          +--> the whole batch,
process 1: prompts 4 to 7  -> engine on its own devices --+    on every process
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.engine.engine import Engine
from tunix.generate.engine_sampler import EngineSampler
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.shared_rollout import SharedRollout
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.rl.weights import local_arrays, reshard
from tunix.utils import mesh as mesh_lib


class PerProcessRollout(SharedRollout, VanillaRollout):
  """Rollouts by an engine on the devices of this process, see the module.

  Args:
    model: the module, on a mesh of this process; see `local_arrays`.
    tokenizer, rollout_config: see `VanillaRollout`.

  Attributes:
    mesh: the mesh of the engine, current while it draws.

  Raises:
    ValueError: the model does not suit the engine, see `engine_sampler.suits`.
  """

  def __init__(
    self, model: nnx.Module, tokenizer: object, rollout_config: RolloutConfig
  ):
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
    self.sampler = "per_process"

  def _draw(
    self, prompts: Sequence[Any], rollout_config: RolloutConfig, **draws: Any
  ) -> RolloutOutput:
    with mesh_lib.use_mesh(self.mesh):
      return VanillaRollout.generate(self, prompts, rollout_config, **draws)

  @classmethod
  def module_of(
    cls,
    actor: nnx.Module,
    actor_mesh: Mesh | None,
    rollout_mesh: Mesh | None,
    *,
    samples_behind: bool,
  ) -> nnx.Module:
    del samples_behind
    own = (
      local_arrays.default_mesh(actor_mesh) if rollout_mesh is None else rollout_mesh
    )
    local_arrays.check_mesh(actor_mesh, own)
    return reshard.reshard_model_to_mesh(nnx.clone(actor), own)

  @contextlib.contextmanager
  def session(self, rows: int, max_tokens: int) -> Iterator[Engine | None]:
    with mesh_lib.use_mesh(self.mesh), super().session(rows, max_tokens) as engine:
      yield engine
