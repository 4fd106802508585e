"""The trainer of one role of a cluster: a PeftTrainer that receives mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.perf.trace import NoopTracer
from tunix.rl import policy_loss
from tunix.rl.common import TrainExample
from tunix.rl.config import RLTrainingConfig
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.steps import windows
from tunix.sft.steps.run_state import Progress, RunState
from tunix.sft.steps.shared_steps import Call
from tunix.utils import mesh as mesh_lib
from tunix.utils.setting import shared_values

# (model, example) -> (weighted sum, metrics), or the weighted sum
RoleLoss = Callable[[nnx.Module, TrainExample], Any]


class Trainer(PeftTrainer):
  """Makes the updates of the actor or of the critic.

  The trainer has no checkpoint folder and makes no evaluations. A checkpoint must hold
  all roles at the same step, so the learner saves and restores them together, with the
  logger that they share.

  Args:
    model: the module of the role.
    optimizer: an optax transformation.
    training_config: settings of the run.
    role: name of the role, the prefix of its metrics.
    metrics_logger: logger that all roles of the run share.
    perf_tracer: tracer that all roles share; each role has its own timeline in it.
  """

  # Every process has all rollouts: advantages are computed from whole groups.
  _batches_are_whole = True

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
    """Sets the loss; returns the trainer.

    Args:
      loss: function of (model, example). It returns a WeightedSum, a scalar mean over
        the examples, or a pair of one of these and metrics by name.
    """

    self.with_gen_model_input_fn(_as_example)
    return self.with_loss_fn(Call.of(_role_loss, loss=loss), has_aux=True)

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return policy_loss.derived(aux)

  def update(
    self, mini_batches: Iterable[TrainExample], micro_batches: int, skip_jit: bool
  ) -> int:
    """Makes one update per mini-batch; returns their number.

    Args:
      mini_batches: the mini-batches.
      micro_batches: number of parts of a mini-batch whose gradients are added.
      skip_jit: if True, the update runs without `jax.jit`.
    """
    done = self.train_steps
    with _own_mesh(self._module.model), self._session():
      for mini in mini_batches:
        parts = windows.cut(mini, micro_batches)
        self._learn(self._window(parts, None), skip_jit)
    return self.train_steps - done

  def lower_update(
    self, mini: TrainExample, micro_batches: int, name: str
  ) -> jax.stages.Lowered:
    """Lowers the update of a mini-batch without running it; `name` is used in plans."""
    with _own_mesh(self._module.model), self._session():
      window = self._window(windows.cut(mini, micro_batches), None)
      return self._state.lower(window.groups, name)

  def keep_average(self, rate: float) -> None:
    """Averages the weights after each update, see `sft.averages`; before training."""
    with _own_mesh(self._module.model):
      self._state.keep_average(rate)

  def averaged(self) -> nnx.Module:
    """Returns a module with the average, which the next update deletes."""
    return self._state.merged(average=True)

  def flush(self) -> None:
    """Waits for the dispatched updates and logs their metrics."""
    self._reporter.flush()

  def phase(self, name: str) -> None:
    """Shows on the progress bar what the run does until the next update."""
    self._reporter.phase(name, self.train_steps)

  def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of an evaluation, and shows their number on the bar."""
    return self._reporter.counted(batches, self.train_steps)

  def show(self, values: Mapping[str, float]) -> None:
    """Sets the metrics of the rollouts that the progress bar shows from now on."""
    self._reporter.run_values = values

  @property
  def had_no_gradient(self) -> bool:
    """True if the gradient was 0 in every update of the run."""
    return self._had_no_gradient

  def run_state(self) -> tuple[RunState, dict[str, Any]]:
    """Returns the arrays and the counters as JSON, for the checkpoint of the run."""
    return self._state.to_run_state(), self._progress.to_json([None])

  def load_run_state(self, state: RunState, progress: dict[str, Any]) -> None:
    """Restores the result of `run_state`."""
    self._state.load(state)
    self._progress = Progress.from_json(progress)

  def _load(self, saved: tuple[int, RunState] | None) -> None:
    # There is no checkpoint folder, and the learner restores the shared logger.
    assert saved is None

  def after_move(self) -> None:
    """Reads the arrays of the module again after it was moved."""
    self._module.refresh()

  def close(self) -> None:
    """Writes the weights to the module and ends the progress bar.

    The logger stays open, because the cluster owns it.
    """
    self._module.hand_back()
    if not self._closed:
      self._closed = True
      self._reporter.end()


def _as_example(example: TrainExample) -> dict[str, TrainExample]:
  return {"example": example}


def _role_loss(model: nnx.Module, example: TrainExample, loss: RoleLoss) -> Any:
  """Returns the loss and its metrics; {} if the loss has none."""
  out = loss(model, example)
  is_pair = isinstance(out, tuple) and not isinstance(out, WeightedSum)
  return out if is_pair else (out, {})


def _role_config(config: RLTrainingConfig, role: str) -> TrainingConfig:
  """Returns the settings of one role of the run."""
  role_values = {
    "checkpoint_root_directory": None,
    "eval_every_n_steps": None,
    "metrics_prefix": "/".join(filter(None, (config.metrics_prefix, role))),
    # The critic of PPO has a bar of its own.
    "pbar_description": config.pbar_description
    and f"{config.pbar_description}{' critic' * (role == 'critic')}",
    "perf_metrics_options": None,  # the tracer of the run is passed to the trainer
    # JAX records one profile per process at a time.
    "profiler_options": config.profiler_options if role == "actor" else None,
  }
  return TrainingConfig(**shared_values(TrainingConfig, config) | role_values)


def _own_mesh(model: nnx.Module) -> Any:
  """Returns a context with the mesh of a role's weights.

  The roles may have different meshes, and none may be the mesh that surrounds the run.
  """
  return mesh_lib.use_mesh(mesh_lib.mesh_of(nnx.state(model)))
