"""Where users step into the training loop.

Both classes may be subclassed, or any object with some of the methods may be given:
`callbacks` looks once what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TrainingHooks:
  """Called by the trainer, which passes itself. Override what you need.

  `trainer.model`, `trainer.optimizer` and the counters are readable in every hook.
  """

  def on_train_start(self, trainer: Any) -> None:
    """Before the first step, after a checkpoint was restored."""

  def on_train_end(self, trainer: Any) -> None:
    """After the last step, before the trainer closes its files."""

  def on_train_step_start(self, trainer: Any) -> None:
    """Before an optimizer update is dispatched."""

  def on_train_step_end(self, trainer: Any, train_step: int, train_loss: Any) -> None:
    """After an optimizer update was dispatched.

    Args:
      trainer: the trainer.
      train_step: updates done, this one included.
      train_loss: device scalar, mean over the trained tokens; reading it waits for
        the device.
    """

  def on_eval_step_start(self, trainer: Any) -> None:
    """Before an evaluation."""

  def on_eval_step_end(self, trainer: Any, eval_loss: Any) -> None:
    """After an evaluation; `eval_loss` is the mean over all its tokens."""


class DataHooks:
  """Supplies batches in place of the datasets passed to `train`.

  A method that is not overridden leaves the trainer with its own dataset.
  """

  def load_next_train_batch(self, trainer: Any) -> Any:
    """The next micro-batch, None at the end of the data."""

  def load_next_eval_batch(self, trainer: Any) -> Any:
    """The next batch of this evaluation, None at its end."""


def callbacks(kind: type, hooks: Any) -> dict[str, Callable[..., Any] | None]:
  """The methods of `hooks` by the names that `kind` has; None where there is none, or
  the empty one of `kind`.

  Args:
    kind: TrainingHooks or DataHooks.
    hooks: an instance of it, any object with some of its methods, or None.
  """
  names = [name for name in vars(kind) if not name.startswith("_")]
  return {name: _callback(kind, hooks, name) for name in names}


def _callback(kind: type, hooks: Any, name: str) -> Callable[..., Any] | None:
  method = getattr(hooks, name, None)
  is_empty = getattr(method, "__func__", None) is vars(kind)[name]
  return None if is_empty else method
