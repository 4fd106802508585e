"""The public attributes that `PeftTrainer` and `RLLearner` share."""

from __future__ import annotations

import abc

from tunix.sft.loop.run import Run, Work
from tunix.sft.metrics.history import History
from tunix.sft.metrics_logger import MetricsLogger


class BaseTrainer(Work):
  """Implements the public attributes of a trainer that its `Run` can answer.

  A subclass implements `Work`, and sets `_run` at the end of its constructor.
  """

  _run: Run

  @property
  @abc.abstractmethod
  def metrics_logger(self) -> MetricsLogger:
    """The logger that receives every metric of the run."""

  @property
  def history(self) -> History:
    """The logged metrics as a table by step: `trainer.history["train/loss"].values`."""
    return self.metrics_logger.history

  def __repr__(self) -> str:
    limit = self._run.config.max_steps
    of_limit = "" if limit is None else f" of {limit}"
    return f"{type(self).__name__}(step {self.train_steps}{of_limit})"

  def save_checkpoint(self) -> bool:
    """Saves the run now.

    Returns: True if a checkpoint was written. False if the run has no checkpoint
      folder, if this step is already saved, or, in RL, before the first update and
      after an update that failed half-way.

    Raises:
      OSError: The disk is full or not writable. Asynchronous saving may raise this
        error in a later call.
      RuntimeError: The trainer is closed.
    """
    return self._run.save()

  def restore_checkpoint(self) -> bool:
    """Restores the newest checkpoint.

    Returns: True if there was a checkpoint.

    Raises:
      ValueError: The checkpoint belongs to another model, reference or optimizer, or
        was not written by a training run.
      RuntimeError: There are checkpoints, and none can be read.
    """
    return self._run.restore()
