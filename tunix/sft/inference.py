"""Forward passes outside of a train step: of reference models, teachers and critics."""

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

# (model, **rows) -> array whose first axis is the rows. Pass the same function object
# in every call: each object is compiled once.
Score = Callable[..., jax.Array]


def run(
  model: nnx.Module,
  score: Score,
  rows: Mapping[str, Any],
  at_once: int | None,
  axes: tuple[str, ...],
  name: str = "scoring",
) -> np.ndarray:
  """Computes `score(model, **rows)` for some rows at a time, and gathers the results.

  Args:
    model, score, axes, name: see `apply`.
    rows: pytrees of arrays whose first axis is the rows; k adjacent rows may share one
      of an array. The first array has one for each row. With several processes each of
      them passes all rows, and gets all results.
    at_once: rows of one forward pass, a multiple of every k; None: all. The last pass
      repeats the last row, so that all passes have one shape.
  """
  total = len(next(iter(rows.values())))
  size = min(at_once or total, total)
  parts = []
  for start in range(0, total, size):
    index = np.minimum(np.arange(start, start + size), total - 1)
    part = take(dict(rows), index, total)
    parts.append(apply(model, score, part, axes, whole=True, name=name))
  return np.concatenate([mesh_lib.to_host(part) for part in parts])[:total]


def take(arrays: Any, index: np.ndarray, total: int) -> Any:
  """Returns the elements of some rows of arrays; adjacent rows may share an element.

  Args:
    arrays: a pytree of arrays of `total` elements, or of a divisor.
    index: the rows. If k rows share an element, they are in whole groups of k.
    total: number of all rows.
  """

  def of_rows(x: Any) -> np.ndarray:
    k = total // len(x)
    return np.asarray(x)[index[::k] // k]

  return jax.tree.map(of_rows, arrays)


def apply(
  model: nnx.Module,
  score: Callable[..., Any],
  rows: Mapping[str, Any],
  axes: tuple[str, ...],
  *,
  whole: bool = False,
  name: str = "scoring",
) -> Any:
  """Dispatches `score(model, **rows)` on the model's devices without waiting for it.

  Args:
    model: a model, which runs in eval mode on its mesh or device.
    score: a function that may return any pytree. Each function object is compiled once.
    rows: pytrees of arrays whose first axis is the rows.
    axes: mesh axes that split the rows; axes that the model's mesh lacks are ignored.
    whole: see `sharding_utils.shard_input`.
    name: name of the program in a plan.
  """
  graph, state = nnx.split(model)
  state = mesh_lib.on_auto(state)
  mesh = mesh_lib.mesh_of(state)
  if mesh is None and mesh_lib.current_mesh() is not None:
    # The current mesh is that of another model (a student), and must not be used here:
    # a mesh of one device replaces it.
    device = next(iter(jax.tree.leaves(state)[0].devices()))
    mesh = mesh_lib.create_mesh(dict.fromkeys(axes, 1), [device])
  known_axes = () if mesh is None else tuple(a for a in axes if a in mesh.shape)
  with mesh_lib.use_mesh(mesh):
    placed = sharding_utils.shard_input(dict(rows), known_axes, whole=whole)
    return programs.call(name, _scored, graph, state, placed, score)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _scored(
  graph: nnx.GraphDef[Any], state: nnx.State, rows: dict[str, jax.Array], score: Score
):
  model = nnx.merge(graph, state)
  model.eval()
  return score(model, **rows)
