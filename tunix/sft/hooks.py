"""Hooks: methods of the user that a trainer calls during training.

A user subclasses one of the two classes, or passes any object with some of the methods.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any


class TrainingHooks:
  """Methods that a trainer calls with itself as the argument; override some of them.

  In every hook `trainer.model`, `trainer.optimizer` and the counters are readable.
  """

  def on_train_start(self, trainer: Any) -> None:
    """Called before the first step, after a checkpoint was restored."""

  def on_train_end(self, trainer: Any) -> None:
    """Called after the last step, before the trainer closes its files."""

  def on_train_step_start(self, trainer: Any) -> None:
    """Called before an optimizer update is dispatched."""

  def on_train_step_end(self, trainer: Any, train_step: int, train_loss: Any) -> None:
    """Called after an optimizer update was dispatched.

    Args:
      trainer: the trainer.
      train_step: number of updates, including this one.
      train_loss: weighted mean of the loss, a device scalar; reading it waits for the
        device.
    """

  def on_eval_step_start(self, trainer: Any) -> None:
    """Called before an evaluation."""

  def on_eval_step_end(self, trainer: Any, eval_loss: Any) -> None:
    """Called after an evaluation; `eval_loss` is the weighted mean of its loss."""


class DataHooks:
  """Methods that supply batches instead of the datasets passed to `train`.

  If a method is not overridden, the trainer draws from the dataset.
  """

  def load_next_train_batch(self, trainer: Any) -> Any:
    """Returns the next micro-batch; None at the end of the data."""

  def load_next_eval_batch(self, trainer: Any) -> Any:
    """Returns the next batch of this evaluation; None at its end."""


def callbacks(kind: type, hooks: Any) -> dict[str, Callable[..., Any] | None]:
  """Returns the methods of `hooks` for each name of `kind`; None for missing ones.

  Args:
    kind: TrainingHooks or DataHooks.
    hooks: an instance of `kind`, any object with some of its methods, or None. Methods
      that are not overridden count as missing.

  Raises:
    ValueError: `hooks` has a public method whose name begins like a hook's and that is
      no hook.
  """
  names = [name for name in vars(kind) if not name.startswith("_")]
  _check_names(names, hooks)
  return {name: _callback(kind, hooks, name) for name in names}


def _check_names(names: Sequence[str], hooks: Any) -> None:
  """Refuses misspelt hooks, which would never be called.

  Only names that begin with `on_` (with `load_` for DataHooks) are checked: the object
  may have methods for other purposes.
  """
  prefix = names[0].partition("_")[0] + "_"
  for name in dir(hooks):
    is_hook = name in names or not name.startswith(prefix)
    if not is_hook and callable(getattr(hooks, name, None)):
      near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
      raise ValueError(
        f"hooks has the method {name}, which no trainer calls; the nearest hook is "
        f"{near}. Rename the method, or begin the name of a helper with _."
      )


def _callback(kind: type, hooks: Any, name: str) -> Callable[..., Any] | None:
  method = getattr(hooks, name, None)
  is_empty = getattr(method, "__func__", None) is vars(kind)[name]
  return None if is_empty else method
