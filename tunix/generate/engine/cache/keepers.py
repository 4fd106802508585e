"""The choice between `PageKeeper` and `RowKeeper`, the two keepers of a cache."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.engine.cache.paged_store import PageKeeper
from tunix.generate.engine.cache.row_keeper import RowKeeper, Stored, computed_of
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling.layer_groups import Windows
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.paged import attention as paged
from tunix.utils import mesh as mesh_lib


def keeper_of(
  model: TransformerConfig,
  config: EngineConfig,
  mesh: Mesh | None,
  windows: Windows | None = None,
  stored: Stored = computed_of,
  choose_width: Callable[[int], int] = lambda width: width,
) -> RowKeeper | PageKeeper:
  """Returns the keeper that `EngineConfig.attention` decides on.

  Args:
    model: sizes of the model, with the shardings in which it decodes.
    config: sizes of the engine.
    mesh: mesh of the weights, or None.
    windows: the windows of the groups of layers; None: those of this model.
    stored: returns the number of tokens of a completion that have keys and values.
    choose_width: see `RowKeeper`.
  """
  path = _path_of(model, config)
  if path is None:
    return RowKeeper(model, config, windows, stored, choose_width)
  return PageKeeper(model, config, path, mesh, windows)


def has_rows(model: Transformer, config: EngineConfig) -> bool:
  """Returns True if the engine of a model attends to rows, not to pages."""
  mesh = mesh_lib.mesh_of(nnx.state(model))
  with mesh_lib.use_mesh(mesh_lib.current_mesh() if mesh is None else mesh):
    return _path_of(model.config, config) is None


def _path_of(model: TransformerConfig, config: EngineConfig) -> str | None:
  """Returns the path of attention to pages, or None for rows."""
  name = config.attention
  calls = [
    paged.Call(
      platform=mesh_lib.context_platform(),
      dtype=str(jnp.dtype(model.dtype)),
      head_dim=kind.head_dim,
      page_tokens=config.page_tokens,
      softcap=model.attention_softcap is not None,
      window=kind.window is not None,
      sinks=model.attention_sinks,
    )
    for kind in model.kinds
  ]
  paths = {paged.choose(call, name) for call in calls if name != "rows"}
  # The path "gather" copies whole pages in every round. Rows are filled only once.
  is_rows = name == "rows" or (name == "auto" and "gather" in paths)
  return None if is_rows else paths.pop()
