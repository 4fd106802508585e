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
  graph, state = nnx.split(model)
  total = len(next(iter(rows.values())))
  size = min(at_once or total, total)
  parts = []
  with mesh_lib.use_mesh(mesh_lib.mesh_of(state)):
    for start in range(0, total, size):
      index = np.arange(start, start + size)
      part = {k: x[np.minimum(index, total - 1)] for k, x in rows.items()}
      placed = sharding_utils.shard_input(part, axes)
      parts.append(_scored(graph, state, placed, score))
    return np.concatenate([np.asarray(part) for part in parts])[:total]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _scored(graph: Any, state: Any, rows: dict[str, jax.Array], score: Score):
  model = nnx.merge(graph, state)
  model.eval()
  return score(model, **rows)
