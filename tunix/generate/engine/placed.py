"""An engine on the devices of one mesh, whichever devices its model is on."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine, UpdateMode
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib


class PlacedEngine(Engine):
  """An engine whose weights are on the devices of one mesh.

  Args:
    model: the model, on any devices. Nothing is copied if it is on the mesh already.
    tokenizer, config: see `Engine`.
    mesh: the mesh, which must be current in the thread that steps the engine.
    draft_model: see `Engine`; on any devices.
  """

  def __init__(
    self,
    model: nnx.Module,
    tokenizer: object,
    config: EngineConfig,
    mesh: Mesh,
    draft_model: nnx.Module | None = None,
  ):
    self._mesh = mesh
    with mesh_lib.use_mesh(mesh):
      draft = None if draft_model is None else placed(draft_model, mesh)
      super().__init__(placed(model, mesh), tokenizer, config, draft_model=draft)
      assert (
        not self.adapters
      )  # makes their arrays on the mesh, as no thread does later

  def update_weights(
    self,
    model: nnx.Module | None = None,
    version: int | None = None,
    mode: UpdateMode = "recompute",
  ) -> None:
    """Takes new weights, which may be on other devices; see `Engine`."""
    model = None if model is None else placed(model, self._mesh)
    super().update_weights(model, version, mode)


def placed(model: nnx.Module, mesh: Mesh) -> Any:
  """Returns the model with its weights on a mesh, laid out as they declare.

  Modules that an engine cannot run are returned unchanged: the engine refuses them.
  """
  if not isinstance(model, Transformer):
    return model
  graph, state = nnx.split(model)
  places = sharding.named_shardings(state, mesh)
  return nnx.merge(graph, jax.tree.map(jax.device_put, state, places))
