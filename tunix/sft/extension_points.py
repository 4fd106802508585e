"""What users change of a trainer: its loss, its inputs, its hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

from flax import nnx

from tunix.sft import hooks as hooks_lib
from tunix.sft.losses import LossCall
from tunix.sft.module_state import ModuleState
from tunix.sft.train_state import BuiltSteps


class ExtensionPoints:
  """Set by `with_...` calls, or overridden in subclasses.

  `_prepare_inputs(batch)` runs on the host for every micro-batch, and
  `_prepare_window(batches)` for those of a global batch together;
  `_train_step(model, batch)` and `_eval_step(model, batch)` are traced and return the
  loss of one micro-batch (a scalar mean, a WeightedSum, or either with aux);
  `_post_process_train_step(aux)` and `_post_process_eval_step(aux)` turn aux into
  metrics by name; `custom_checkpoint_metadata()` returns JSON that is saved along.
  """

  _module: ModuleState

  def __init__(self):
    self._loss = LossCall()
    self._steps = BuiltSteps(self._train_step, self._eval_step)
    self._hooks: dict[str, Any] = {"train": None, "data": None}

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss: `loss_fn(model, **fields of the batch)`.

    It returns a scalar mean over the micro-batch (weighted by example), or a
    WeightedSum; with `has_aux` a pair of that and a dict of scalars to log.
    """
    self._loss = dataclasses.replace(self._loss, loss_fn=loss_fn, has_aux=has_aux)
    self._steps.clear()
    return self

  def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> Self:
    """Replaces how a batch becomes the loss's keyword arguments; traced."""
    self._loss = dataclasses.replace(self._loss, input_fn=fn)
    self._steps.clear()
    return self

  def with_training_hooks(self, hooks: Any) -> Self:
    """Calls `hooks` (see hooks.TrainingHooks) around steps and evaluations."""
    self._hooks["train"] = hooks
    return self

  def with_data_hooks(self, hooks: Any) -> Self:
    """Draws batches from `hooks` (see hooks.DataHooks)."""
    self._hooks["data"] = hooks
    return self

  def _prepare_inputs(self, batch: Any) -> Any:
    return batch

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds what only a whole global batch can say: its micro-batches, prepared, in and
    out. An evaluation calls it batch by batch."""
    return batches

  def _train_step(self, model: nnx.Module, batch: Any) -> Any:
    return self._loss(model, batch)

  def _eval_step(self, model: nnx.Module, batch: Any) -> Any:
    return self._train_step(model, batch)

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return aux

  def _post_process_eval_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return aux

  def custom_checkpoint_metadata(self) -> dict[str, Any]:
    """JSON that goes into every checkpoint, as `custom_metadata`."""
    return {}

  def _is_default(self, *methods: str) -> bool:
    """Whether the loss is next_token_loss and no subclass has replaced the methods:
    then batches mean what that loss says they mean."""
    own = (
      getattr(type(self), name) is getattr(ExtensionPoints, name) for name in methods
    )
    return self._loss.is_default and all(own)

  def _call_hook(self, name: str, *args: Any) -> None:
    hooks = self._hooks["train"]
    if hooks_lib.provides(hooks, name):
      self._module.hand_back()
      getattr(hooks, name)(self, *args)
