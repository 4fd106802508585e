"""Scores rollouts with models, outside of training steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.generate import scoring
from tunix.rl.config import Role
from tunix.rl.weights import placement
from tunix.sft import inference
from tunix.sft.inference import Score


class InferenceWorker:
  """Runs forward passes over rollouts, in parts of a given number of rows.

  Args:
    models: modules by role.
    data_sharding_axis: mesh axes that split the rows.
    offload: if True, the models are kept in host memory between calls.
  """

  def __init__(
    self,
    models: Mapping[Role, nnx.Module],
    data_sharding_axis: tuple[str, ...] = ("fsdp",),
    offload: bool = False,
  ):
    self._models = dict(models)
    self._axes = data_sharding_axis
    self._offload = offload
    if offload:
      for model in self._models.values():
        placement.offload(model)

  def get_model(self, role: Role) -> nnx.Module:
    """Returns the module of a role.

    Raises:
      ValueError: the cluster has no model in this role.
    """
    if role not in self._models:
      raise ValueError(
        f"the cluster has no {role.value} model: pass {role.value}= to RLCluster"
      )
    return self._models[role]

  @contextlib.contextmanager
  def resident(self, role: Role) -> Iterator[nnx.Module]:
    """Yields the module of a role on its devices; offloads it afterwards."""
    model = self.get_model(role)
    if not self._offload:
      yield model
      return
    placement.onload(model)
    try:
      yield model
    finally:
      placement.offload(model)

  def close(self) -> None:
    """Moves every model back to its devices, because the caller owns the models."""
    if self._offload:
      for model in self._models.values():
        placement.onload(model)

  def run(
    self, role: Role, score: Score, rows: Mapping[str, np.ndarray], at_once: int | None
  ) -> np.ndarray:
    """Returns `score` of all rows by the model of a role; float32 on the host.

    Args:
      role: the role.
      score: `score(model, **rows)`.
      rows: arrays with the rows first.
      at_once: rows of one forward pass; None is all.
    """
    with self.resident(role) as model:
      name = f"{role.value} scoring"
      return inference.run(model, score, rows, at_once, self._axes, name)


@functools.lru_cache(maxsize=64)
def logps_of(group_size: int, temperature: float, tile_rows: int | None) -> Score:
  """Returns a function that computes the log-probabilities of completions, [B, R].

  The result is cached: the same function object for the same settings means that JAX
  compiles it once.
  """

  def score(model, **rows):
    out = scoring.score_completions(
      model,
      **rows,
      group_size=group_size,
      temperature=temperature,
      tile_rows=tile_rows,
    )
    return out.logps

  return score


def values_of(model: nnx.Module, **rows: Any) -> jax.Array:
  """Returns the critic's value before each token, [B, R]."""
  return scoring.score_values(model, **rows)


def rewards_of(model: nnx.Module, **rows: Any) -> jax.Array:
  """Returns the reward model's score of each row, [B]."""
  return scoring.score_sequences(model, **rows)
