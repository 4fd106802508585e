"""Trains one role of a cluster: PeftTrainer without a loop and files of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import optax
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.rl import policy_loss
from tunix.rl.common import TrainExample
from tunix.rl.config import RLTrainingConfig
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.run_state import Progress, RunState
from tunix.utils import mesh as mesh_lib

RoleLoss = Callable[[nnx.Module, TrainExample], tuple[WeightedSum, policy_loss.Aux]]


class Trainer(PeftTrainer):
  """The actor's or the critic's updates.

  Checkpoints, evaluation and cadence are the learner's: what is saved of several roles
  must be of one moment.

  Args:
    model: the role's module.
    optimizer: an optax transformation.
    training_config: of the run.
    role: goes before the metrics' names.
    metrics_logger: shared by all roles of the run.
  """

  def __init__(
    self,
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    training_config: RLTrainingConfig,
    role: str,
    metrics_logger: MetricsLogger | None = None,
  ):
    names = [f.name for f in dataclasses.fields(TrainingConfig)]
    own = TrainingConfig(
      **{
        **{name: getattr(training_config, name) for name in names},
        "checkpoint_root_directory": None,
        "eval_every_n_steps": None,
        "metrics_prefix": "/".join(
          filter(None, (training_config.metrics_prefix, role))
        ),
        "pbar_description": training_config.pbar_description and role.capitalize(),
        "profiler_options": training_config.profiler_options
        if role == "actor"
        else None,
      }
    )
    with _own_mesh(model):
      super().__init__(model, optimizer, own, metrics_logger)

  def with_role_loss(self, loss: RoleLoss) -> Trainer:
    """Sets the loss: (model, example) -> (weighted sum, means to watch)."""

    def scalars(model: nnx.Module, example: TrainExample):
      total, aux = loss(model, example)
      return total, policy_loss.as_scalars(aux, total.weight)

    self.with_gen_model_input_fn(lambda example: {"example": example})
    self.with_loss_fn(scalars, has_aux=True)
    return self

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return policy_loss.from_scalars(aux)

  def update(
    self, mini_batches: Iterable[TrainExample], micro_batches: int, skip_jit: bool
  ) -> int:
    """One update a mini-batch, each cut into `micro_batches`; returns their number."""
    if micro_batches != self.training_config.micro_batches:
      self.training_config = dataclasses.replace(
        self.training_config, gradient_accumulation_steps=micro_batches
      )
    done = self.train_steps
    with _own_mesh(self._module.model), self._session():
      for mini in mini_batches:
        self._dispatch(self._whole(mini), skip_jit)
    return self.train_steps - done

  def restore_checkpoint(self) -> bool:
    """The learner restores; see RLLearner."""
    return False

  def save_checkpoint(self) -> bool:
    """The learner saves.

    Raises:
      RuntimeError: always.
    """
    raise RuntimeError(
      "one role of a cluster is not saved by itself: call RLLearner.save_checkpoint()"
    )

  def flush(self) -> None:
    """Logs what was dispatched; waits for the device."""
    self._reporter.flush()

  def run_state(self) -> tuple[RunState, dict[str, Any]]:
    """(arrays, counters as JSON)."""
    return self._state.to_run_state(), self._progress.to_json()

  def load_run_state(self, state: RunState, progress: dict[str, Any]) -> None:
    """Takes what `run_state` gave."""
    self._state.load(state)
    self._progress = Progress.from_json(progress)

  def after_move(self) -> None:
    """Lets go of arrays that the module no longer holds: it was moved."""
    self._module.refresh()

  def close(self) -> None:
    """Hands the module back and ends the bar."""
    self._module.hand_back()
    if not self._closed:
      self._closed = True
      self._reporter.end()

  def devices(self) -> list[Any]:
    """What this role is trained on."""
    return self._state.devices()


def _own_mesh(model: nnx.Module) -> Any:
  """The mesh that a role's weights lie on, whatever mesh surrounds the run: roles have
  meshes of their own."""
  return mesh_lib.use_mesh(mesh_lib.mesh_of(nnx.state(model)))
