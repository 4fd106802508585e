"""TrainState: the arrays that a trainer changes, and the compiled steps that do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.perf import programs
from tunix.sft import averages
from tunix.sft.steps import offload, shared_steps, train_step
from tunix.sft.steps.module_state import ModuleState
from tunix.sft.steps.run_state import (
  RunState,
  flatten_optimizer,
  init_optimizer,
  optimizer_shardings,
  unflatten_optimizer,
)
from tunix.sft.steps.train_step import Group, StepMetrics
from tunix.utils import mesh as mesh_lib


class OptimizerView(NamedTuple):
  """The transformation, its current state and the number of updates."""

  tx: optax.GradientTransformation
  opt_state: Any
  step: int


class TrainState:
  """A module, its optimizer state, their mesh, and the steps that update them.

  Args:
    model: the caller's module.
    tx: the optimizer.
    losses: returns the train and the evaluation loss, functions (model, batch) -> loss.
      They are traced with a merged module and one micro-batch. Called when a step is
      built.
    offload_optimizer: see TrainingConfig.

  Attributes:
    module: the caller's module and its arrays.
    tx: the optimizer.
    opt_state: the optimizer's state, sharded like the parameters.
    mesh: the mesh of all arrays, with axes of the kind Auto; None: one device.
    home: the same mesh with the axis kinds of the user, if some are Explicit; else
      None.
  """

  def __init__(
    self,
    model: nnx.Module,
    tx: optax.GradientTransformation,
    losses: Callable[[], tuple[train_step.BatchLoss, train_step.BatchLoss]],
    *,
    offload_optimizer: bool = False,
  ):
    self.module = ModuleState(model)
    self.tx = tx
    self.mesh: mesh_lib.Mesh | None = None
    self.home: mesh_lib.Mesh | None = None
    self.opt_state: Any = None
    self._losses = losses
    self._offloads = offload_optimizer
    # The steps by (kind, skip_jit). Each is built once, and again after `forget_steps`.
    self._built: dict[tuple[str, bool], Callable[..., Any]] = {}
    self.place()

  def place(self) -> None:
    """Moves all arrays to the current mesh; without one they keep their own mesh.

    It does nothing if the arrays already lie on that mesh.
    """
    module = self.module
    mesh = mesh_lib.current_mesh() or mesh_lib.mesh_of((module.params, module.frozen))
    home = mesh_lib.explicit_mesh((module.params, module.frozen))
    if self.opt_state is not None and mesh == self.mesh and home == self.home:
      return
    self.home = home
    with mesh_lib.use_mesh(mesh):
      if mesh is not None:
        module.place(mesh)
      if self.opt_state is None:
        self.opt_state = init_optimizer(self.tx, module.params, mesh)
      elif mesh is not None:
        layout = optimizer_shardings(self.opt_state, module.params, mesh)
        self.opt_state = jax.device_put(self.opt_state, layout)
      if self._offloads:
        offload.check(mesh)
        shardings = jax.tree.map(lambda x: x.sharding, self.opt_state)
        shardings = offload.layout(self.opt_state, shardings)
        self.opt_state = jax.tree.map(mesh_lib.put, self.opt_state, shardings)
    self.mesh = mesh
    self.forget_steps()
    self.hand_back()

  @contextlib.contextmanager
  def at_work(self) -> Iterator[None]:
    """Sets the run's mesh, and hands the caller's module back at the end.

    Inside, the caller's module has its arrays on the run's mesh.
    """
    self.place()
    with mesh_lib.use_mesh(self.mesh):
      if self.home is not None and self.mesh is not None:
        self.module.show_on(self.mesh)
      try:
        yield
      finally:
        self.hand_back()

  def is_finite(self) -> bool:
    """Returns True if all trained weights are finite; waits for the device."""
    self.module.refresh()
    # A critic that RL has offloaded returns to the device for the check.
    device = jax.memory.Space.Device
    params = [
      jax.device_put(x, device) if offload.is_on_host(x) else x
      for x in jax.tree.leaves(self.module.params)
    ]
    # Not the current mesh: it may have other devices, or other kinds of axes.
    with mesh_lib.use_mesh(mesh_lib.mesh_of(params)):
      return not params or bool(_all_finite(params))

  def hand_back(self) -> nnx.Module:
    """Gives the caller's module the current arrays, on the caller's mesh."""
    model = self.module.hand_back()
    if self.home is not None:
      self.module.show_on(self.home)
    return model

  def keep_average(self, rate: float) -> None:
    """Averages the weights after each update; the optimizer's state begins anew."""
    self.tx, self.opt_state = averages.averaging(self.tx, rate), None
    self.place()

  def merged(self, *, average: bool = False) -> nnx.Module:
    """Returns a module of the current arrays, which the next step deletes.

    Args:
      average: True takes the average of the trained weights, see `sft.averages`.
    """
    module = self.module
    module.refresh()
    params = module.params
    if average:
      params = offload.on_device(averages.average_of(self.opt_state))
    return module.skeleton.merge(params, module.frozen, module.rest)

  def devices(self) -> list[Any]:
    """Returns the devices of the run."""
    if self.mesh is not None:
      return list(self.mesh.devices.flat)
    leaves = jax.tree.leaves((self.module.params, self.module.frozen))
    return list(leaves[0].devices()) if leaves else jax.devices()[:1]

  # The steps.

  def update(self, groups: Sequence[Group], skip_jit: bool) -> StepMetrics:
    """Dispatches one update without waiting for it, and donates the old arrays.

    Args:
      groups: the micro-batches of the global batch.
      skip_jit: run the step without `jax.jit`.
    """
    module = self.module
    module.own()  # donated arrays must belong to nobody else
    state = (module.params, self.opt_state, module.rest, module.frozen)
    step = self._train_step(skip_jit)
    params, self.opt_state, rest, metrics = (
      step(*state, groups)
      if skip_jit
      else programs.call("train step", step, *state, groups)
    )
    module.replace(params, rest)
    return metrics

  def evaluate(self, batch: object, skip_jit: bool) -> tuple[WeightedSum, Any]:
    """Dispatches the loss of a batch and its aux, without waiting for them.

    It computes with the arrays that the last `module.refresh` took.
    """
    module, step = self.module, self._eval_step(skip_jit)
    state = (module.params, module.rest, module.frozen)
    if skip_jit:
      return step(*state, batch)
    return programs.call("evaluation", step, *state, batch)

  def lower(
    self, groups: Sequence[Group], name: str = "train step"
  ) -> jax.stages.Lowered:
    """Lowers the jitted train step without running it.

    Args:
      groups: the micro-batches of a global batch.
      name: name of the program in a plan.
    """
    module = self.module
    module.refresh()
    step: Any = self._train_step(skip_jit=False)
    state = (module.params, self.opt_state, module.rest, module.frozen)
    return programs.lower(name, step, *state, groups)

  def lower_eval(self, batch: object) -> jax.stages.Lowered:
    """Lowers the jitted evaluation step without running it."""
    self.module.refresh()
    module, step = self.module, self._eval_step(skip_jit=False)
    state = (module.params, module.rest, module.frozen)
    return programs.lower("evaluation", step, *state, batch)

  def forget_steps(self) -> None:
    """Discards the built steps, after a change of the loss or of the shardings."""
    self._built.clear()

  def _train_step(self, skip_jit: bool) -> Callable[..., Any]:
    key, skeleton, tx = ("train", skip_jit), self.module.skeleton, self.tx
    if key not in self._built:
      loss, _ = self._losses()
      if self._offloads:
        shardings = jax.tree.map(lambda x: x.sharding, self.opt_state)
        tx = offload.updated_on_device(tx, shardings)
      self._built[key] = (
        train_step.make_train_step(skeleton, loss, tx)
        if skip_jit
        else shared_steps.shared(
          train_step.jit_train_step, skeleton, loss, tx=tx, layout=self._layout()
        )
      )
    return self._built[key]

  def _eval_step(self, skip_jit: bool) -> Any:
    key, skeleton = ("eval", skip_jit), self.module.skeleton
    if key not in self._built:
      _, loss = self._losses()
      self._built[key] = (
        train_step.make_eval_step(skeleton, loss)
        if skip_jit
        else shared_steps.shared(train_step.jit_eval_step, skeleton, loss)
      )
    return self._built[key]

  def _layout(self) -> tuple[Any, Any] | None:
    """Returns the shardings of (params, opt_state); None on one device."""
    if self.mesh is None and not self._offloads:
      return None
    arrays = (self.module.params, self.opt_state)
    return jax.tree.map(lambda x: x.sharding, arrays)

  # On disk.

  def to_run_state(self, **fields: Any) -> RunState:
    """Returns the arrays as a RunState.

    Args:
      **fields: further fields of the RunState.
    """
    self.module.refresh()
    return RunState(
      model_params=self.module.params,
      model_rest=self.module.rest,
      optimizer_state=flatten_optimizer(self.opt_state),
      **fields,
    )

  def load(self, saved: RunState) -> None:
    """Takes the arrays of a checkpoint, and gives them to the caller's module."""
    self.module.replace(saved.model_params or {}, saved.model_rest or {})
    self.hand_back()
    self.opt_state = unflatten_optimizer(saved.optimizer_state or {}, self.opt_state)


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()
