"""Forward passes outside the step: reference models, teachers, critics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

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
) -> np.ndarray:
  """`score(model, **rows)` for `at_once` rows at a time; the last part is filled up."""
  total = len(next(iter(rows.values())))
  size = min(at_once or total, total)
  parts = []
  for start in range(0, total, size):
    index = np.minimum(np.arange(start, start + size), total - 1)
    parts.append(dispatch(model, score, {k: x[index] for k, x in rows.items()}, axes))
  return np.concatenate([np.asarray(part) for part in parts])[:total]


def dispatch(
  model: nnx.Module, score: Score, rows: Mapping[str, Any], axes: tuple[str, ...]
) -> jax.Array:
  """`score(model, **rows)` on the model's own mesh, without waiting for it."""
  graph, state = nnx.split(model)
  with mesh_lib.use_mesh(mesh_lib.mesh_of(state)):
    placed = sharding_utils.shard_input(dict(rows), axes)
    return _scored(graph, state, placed, score)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _scored(graph: Any, state: Any, rows: dict[str, jax.Array], score: Score):
  model = nnx.merge(graph, state)
  model.eval()
  return score(model, **rows)
