"""Forward passes outside the step: reference models, teachers, critics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.perf import programs
from tunix.sft import sharding_utils
from tunix.utils import mesh as mesh_lib

# (model, **rows) -> array with the rows first; one object a setting, so that it
# compiles once.
Score = Callable[..., jax.Array]


def run(
  model: nnx.Module,
  score: Score,
  rows: Mapping[str, np.ndarray],
  at_once: int | None,
  axes: tuple[str, ...],
  name: str = "scoring",
) -> np.ndarray:
  """`score(model, **rows)` for `at_once` rows at a time; the last part is filled up.
  With several processes each of them has all the rows and gets all the results. `name`
  is the program's in a plan."""
  total = len(next(iter(rows.values())))
  size = min(at_once or total, total)
  parts = []
  for start in range(0, total, size):
    index = np.minimum(np.arange(start, start + size), total - 1)
    part = {k: x[index] for k, x in rows.items()}
    parts.append(apply(model, score, part, axes, whole=True, name=name))
  return np.concatenate([mesh_lib.to_host(part) for part in parts])[:total]


def apply(
  model: nnx.Module,
  score: Callable[..., Any],
  rows: Mapping[str, Any],
  axes: tuple[str, ...],
  *,
  whole: bool = False,
  name: str = "scoring",
) -> Any:
  """`score(model, **rows)` of all rows at once, left on the model's own devices: nobody
  waits for it.

  Args:
    model: runs in eval mode, on the mesh or the device that it lies on.
    score: one object a setting, so that it compiles once; may return any pytree.
    rows: pytrees of arrays, the rows first.
    axes: split the rows, as far as the model's mesh has them.
    whole: see `sharding_utils.shard_input`.
    name: of the program, in a plan.
  """
  graph, state = nnx.split(model)
  state = mesh_lib.on_auto(state)
  mesh = mesh_lib.mesh_of(state)
  if mesh is None and mesh_lib.current_mesh() is not None:
    # Another mesh surrounds the run, of a student: on its own device, one by one.
    device = next(iter(jax.tree.leaves(state)[0].devices()))
    mesh = mesh_lib.create_mesh(dict.fromkeys(axes, 1), [device])
  has = () if mesh is None else tuple(a for a in axes if a in mesh.shape)
  with mesh_lib.use_mesh(mesh):
    placed = sharding_utils.shard_input(dict(rows), has, whole=whole)
    return programs.call(name, _scored, graph, state, placed, score)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _scored(graph: Any, state: Any, rows: dict[str, jax.Array], score: Score):
  model = nnx.merge(graph, state)
  model.eval()
  return score(model, **rows)
