"""Trains one role of a cluster: a PeftTrainer that is given mini-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.perf.trace import NoopTracer
from tunix.rl.common import TrainExample
from tunix.rl.config import RLTrainingConfig
from tunix.sft import windows
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.run_state import Progress, RunState
from tunix.utils import mesh as mesh_lib

# (model, example) -> (weighted sum, means to watch)
RoleLoss = Callable[[nnx.Module, TrainExample], Any]


class Trainer(PeftTrainer):
  """The actor's or the critic's updates.

  It has no checkpoint folder and no cadence of its own: what is saved of several roles
  must be of one moment, so the learner's run saves and restores them together, with the
  logger that they share.

  Args:
    model: the role's module.
    optimizer: an optax transformation.
    training_config: of the run.
    role: goes before the metrics' names.
    metrics_logger: shared by all roles of the run.
    perf_tracer: likewise; the role's phases stand in a timeline of its own.
  """

  _batches_are_whole = True  # rollouts are gathered: advantages need whole groups

  def __init__(
    self,
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    training_config: RLTrainingConfig,
    role: str,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    tracer = NoopTracer() if perf_tracer is None else perf_tracer.on(role)
    with _own_mesh(model):
      config = _role_config(training_config, role)
      super().__init__(model, optimizer, config, metrics_logger, tracer)

  def with_role_loss(self, loss: RoleLoss) -> Trainer:
    """Sets the loss: (model, example) -> (weighted sum, means to watch), or the sum (or
    a scalar mean over the examples) alone."""

    def pair(model: nnx.Module, example: TrainExample):
      out = loss(model, example)
      is_pair = isinstance(out, tuple) and not isinstance(out, WeightedSum)
      return out if is_pair else (out, {})

    self.with_gen_model_input_fn(lambda example: {"example": example})
    return self.with_loss_fn(pair, has_aux=True)

  def update(
    self, mini_batches: Iterable[TrainExample], micro_batches: int, skip_jit: bool
  ) -> int:
    """One update a mini-batch, each cut into `micro_batches`; returns their number."""
    done = self.train_steps
    with _own_mesh(self._module.model), self._session():
      for mini in mini_batches:
        parts = windows.cut(mini, micro_batches)
        self._learn(self._window(parts, None), skip_jit)
    return self.train_steps - done

  def lower_update(
    self, mini: TrainExample, micro_batches: int, name: str
  ) -> jax.stages.Lowered:
    """The update by a mini-batch, lowered and not run; `name` is its in a plan."""
    with _own_mesh(self._module.model), self._session():
      window = self._window(windows.cut(mini, micro_batches), None)
      return self._state.lower(window.groups, name)

  def flush(self) -> None:
    """Logs what was dispatched; waits for the device."""
    self._reporter.flush()

  def run_state(self) -> tuple[RunState, dict[str, Any]]:
    """(arrays, counters as JSON), for the checkpoint of the whole run."""
    return self._state.to_run_state(), self._progress.to_json([None])

  def load_run_state(self, state: RunState, progress: dict[str, Any]) -> None:
    """Takes what `run_state` gave."""
    self._state.load(state)
    self._progress = Progress.from_json(progress)

  def _load(self, saved: tuple[int, RunState] | None) -> None:
    # It has no folder, and the place of the shared logger is not its to set.
    assert saved is None

  def after_move(self) -> None:
    """Lets go of arrays that the module no longer holds: it was moved."""
    self._module.refresh()

  def close(self) -> None:
    """Hands the module back and ends the bar; the logger is the cluster's."""
    self._module.hand_back()
    if not self._closed:
      self._closed = True
      self._reporter.end()


def _role_config(config: RLTrainingConfig, role: str) -> TrainingConfig:
  """What one role is told of the run's settings."""
  names = [field.name for field in dataclasses.fields(TrainingConfig)]
  prefix = filter(None, (config.metrics_prefix, role))
  is_actor = role == "actor"
  return TrainingConfig(
    **{
      **{name: getattr(config, name) for name in names},
      "checkpoint_root_directory": None,
      "eval_every_n_steps": None,
      "metrics_prefix": "/".join(prefix),
      "pbar_description": config.pbar_description and role.capitalize(),
      "perf_metrics_options": None,  # the run's tracer is given
      # One profile a process.
      "profiler_options": config.profiler_options if is_actor else None,
    }
  )


def _own_mesh(model: nnx.Module) -> Any:
  """The mesh that a role's weights lie on, whatever mesh surrounds the run: roles have
  meshes of their own."""
  return mesh_lib.use_mesh(mesh_lib.mesh_of(nnx.state(model)))
