"""Scores rollouts with models that are not being trained, or not right now."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.generate import scoring
from tunix.rl import placement
from tunix.rl.config import Role
from tunix.sft import inference
from tunix.sft.inference import Score


class InferenceWorker:
  """Runs forward passes over rollouts, some rows at a time.

  Args:
    models: the modules by role.
    data_sharding_axis: mesh axes that split rows.
    offload: keep the models in host memory between calls.

  Raises:
    ValueError: a role that scores nothing.
  """

  def __init__(
    self,
    models: Mapping[Role, nnx.Module],
    data_sharding_axis: tuple[str, ...] = ("fsdp",),
    offload: bool = False,
  ):
    known = (Role.CRITIC, Role.REFERENCE, Role.REWARD)
    if wrong := [role for role in models if role not in known]:
      raise ValueError(
        f"role {wrong[0]} scores nothing: choose from {[r.value for r in known]}"
      )
    self._models = dict(models)
    self._axes = data_sharding_axis
    self._offload = offload
    if offload:
      for model in self._models.values():
        placement.offload(model)

  def get_model(self, role: Role) -> nnx.Module:
    """The module of a role.

    Raises:
      ValueError: the cluster has none.
    """
    if role not in self._models:
      raise ValueError(
        f"the cluster has no {role.value} model: pass {role.value}= to RLCluster"
      )
    return self._models[role]

  @contextlib.contextmanager
  def resident(self, role: Role) -> Iterator[nnx.Module]:
    """The module, on its devices."""
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
    """Brings every model back to its devices: they are the caller's."""
    if self._offload:
      for model in self._models.values():
        placement.onload(model)

  def run(
    self, role: Role, score: Score, rows: Mapping[str, np.ndarray], at_once: int | None
  ) -> np.ndarray:
    """`score` over rows with the model of a role; float32 on the host."""
    with self.resident(role) as model:
      name = f"{role.value} scoring"
      return inference.run(model, score, rows, at_once, self._axes, name)


@functools.lru_cache(maxsize=64)
def logps_of(group_size: int, temperature: float, tile_rows: int | None) -> Score:
  """Log-probs of completions [B, R]; one object a setting, so that it compiles once."""

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
  """A critic's value before each token [B, R]."""
  return scoring.score_values(model, **rows)


def rewards_of(model: nnx.Module, **rows: Any) -> jax.Array:
  """A reward model's score of each row [B]."""
  return scoring.score_sequences(model, **rows)
