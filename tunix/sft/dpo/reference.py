"""Reference models: a second model, or the policy without its adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.models.backbone import reference_of, share_variables
from tunix.models.transformer.shards import sharding
from tunix.sft import inference, sharding_utils
from tunix.sft.dpo.completions import logps_of
from tunix.sft.steps.module_state import ModuleState, is_lora, trained_variables
from tunix.utils import mesh as mesh_lib


class ReferenceModel:
  """A frozen model that scores completions.

  Args:
    model: a second model; None: the trained model without its adapters.
    axes: mesh axes that split the rows of a batch.
  """

  def __init__(self, model: nnx.Module | None, axes: tuple[str, ...]):
    self._model = model
    self._axes = axes
    self._below: nnx.Module | None = None
    self._shared: list[Any] = []  # the frozen arrays that `_below` was made from

  def model(self, policy: ModuleState, mesh: Mesh | None) -> nnx.Module:
    """Returns the reference on a mesh: its own mesh, or the policy's if it has none."""
    model = self._model
    if model is None:
      return self._below_adapters(policy)
    state = nnx.state(model)
    if mesh is not None and mesh_lib.mesh_of(state) is None:
      where = sharding.named_shardings(state, mesh)
      nnx.update(model, jax.tree.map(mesh_lib.put, state, where))
    return model

  def _below_adapters(self, policy: ModuleState) -> nnx.Module:
    policy.refresh()
    frozen = jax.tree.leaves(policy.frozen)
    same = len(frozen) == len(self._shared)
    same = same and all(a is b for a, b in zip(frozen, self._shared))
    below = self._below
    if below is None or not same:  # the first call, or the policy has moved
      below = self._below = reference_of(policy.model)
      self._shared = frozen
    return below

  def logps(
    self,
    policy: ModuleState,
    mesh: Mesh | None,
    rows: Mapping[str, Any],
    names: Sequence[str],
    shared: bool = False,
  ) -> jax.Array:
    """Dispatches log-probabilities [B, N], and moves them to the policy's devices.

    Args:
      policy: the trained model.
      mesh: the policy's mesh; None: one device.
      rows: ids and masks of B prompts and of their N completions.
      names: names of the completions.
      shared: compute each prompt once for all of its completions.
    """
    model = self.model(policy, mesh)
    score = logps_of(tuple(names), shared)
    logps = inference.apply(model, score, rows, self._axes)
    if mesh is not None:
      return sharding_utils.shard_input(logps, self._axes)
    (home,) = jax.tree.leaves((policy.params, policy.frozen))[0].devices()
    return logps if logps.devices() == {home} else jax.device_put(logps, home)


def reference_for(
  loss: str, model: nnx.Module, ref_model: nnx.Module | None, axes: tuple[str, ...]
) -> ReferenceModel:
  """Returns the reference of a model before its training.

  Args:
    loss: name of the loss, for messages.
    model: the policy.
    ref_model: a second model, or None.
    axes: mesh axes that split the rows of a batch.

  Raises:
    ValueError: There is no reference, or it has trained Variables of the policy.
  """
  trained = trained_variables(model).values()
  if ref_model is not None and share_variables(trained, ref_model):
    raise ValueError(
      "ref_model is the model itself or shares its trained Variables, so training "
      "would change both. Pass nnx.clone(model), load the reference separately, or "
      "leave ref_model out if the model has adapters."
    )
  if ref_model is None and not is_lora(model):
    raise ValueError(
      f"ref_model is None and the loss {loss!r} needs a reference, because all weights "
      "of the model are trained: pass ref_model=, or add adapters to the model, whose "
      "frozen weights are then the reference. Losses of pairs also take "
      "reference_logps=PrecomputedLogps(folder), or reference_free=True in the config."
    )
  return ReferenceModel(ref_model, axes)
