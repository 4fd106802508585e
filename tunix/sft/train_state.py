"""What a trainer trains: a module, its optimizer state, the mesh they lie on, and the
steps that are built for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from tunix.ops.reductions import WeightedSum
from tunix.perf import programs
from tunix.sft import offload, train_step
from tunix.sft.module_state import ModuleState
from tunix.sft.run_state import (
  RunState,
  flatten_optimizer,
  init_optimizer,
  optimizer_shardings,
  unflatten_optimizer,
)
from tunix.sft.train_step import Group, StepMetrics
from tunix.utils import mesh as mesh_lib


class OptimizerView(NamedTuple):
  """The optimizer as it stands: the transformation, its state, updates done."""

  tx: optax.GradientTransformation
  opt_state: Any
  step: int


class TrainState:
  """The arrays of a run between two steps, and the steps that change them.

  Args:
    model: the caller's module.
    tx: the optimizer.
    train_loss, eval_loss: (model, batch) -> loss; traced on a merged module and one
      micro-batch.
    offload_optimizer: see TrainingConfig.

  Attributes:
    module: the caller's module and its arrays.
    tx: the optimizer.
    opt_state: its state, laid out like the parameters.
    mesh: the mesh all of it lies on; None: one device.
    home: that mesh as the user has it, where its axes are Explicit.
  """

  def __init__(
    self,
    model: nnx.Module,
    tx: optax.GradientTransformation,
    train_loss: train_step.BatchLoss,
    eval_loss: train_step.BatchLoss,
    *,
    offload_optimizer: bool = False,
  ):
    self.module = ModuleState(model)
    self.tx = tx
    self.mesh: mesh_lib.Mesh | None = None
    self.home: mesh_lib.Mesh | None = None
    self.opt_state: Any = None
    self._train_loss, self._eval_loss = train_loss, eval_loss
    self._offloads = offload_optimizer
    # {(kind, skip_jit): step}, each built once, until something it rests on changes.
    self._built: dict[tuple[str, bool], Callable[..., Any]] = {}
    self.place()

  def place(self) -> None:
    """Lays everything out on the mesh that is current, or that it lies on."""
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
        where = jax.tree.map(lambda x: x.sharding, self.opt_state)
        where = offload.layout(self.opt_state, where)
        self.opt_state = jax.tree.map(mesh_lib.put, self.opt_state, where)
    self.mesh = mesh
    self.forget_steps()
    self.hand_back()

  @contextlib.contextmanager
  def at_work(self) -> Iterator[None]:
    """Under the run's mesh, on which the caller's module lies meanwhile; it is handed
    back at the end."""
    self.place()
    with mesh_lib.use_mesh(self.mesh):
      if self.home is not None and self.mesh is not None:
        self.module.show_on(self.mesh)
      try:
        yield
      finally:
        self.hand_back()

  def hand_back(self) -> nnx.Module:
    """The caller's module, with the current arrays, on the caller's mesh."""
    model = self.module.hand_back()
    if self.home is not None:
      self.module.show_on(self.home)
    return model

  def devices(self) -> list[Any]:
    """What the run computes on."""
    if self.mesh is not None:
      return list(self.mesh.devices.flat)
    leaves = jax.tree.leaves((self.module.params, self.module.frozen))
    return list(leaves[0].devices()) if leaves else jax.devices()[:1]

  # The steps.

  def update(self, groups: Sequence[Group], skip_jit: bool) -> StepMetrics:
    """One update, dispatched and not waited for; the arrays before it are donated."""
    module = self.module
    module.own()
    state = (module.params, self.opt_state, module.rest, module.frozen)
    step = self._train_step(skip_jit)
    params, self.opt_state, rest, metrics = (
      step(*state, groups)
      if skip_jit
      else programs.call("train step", step, *state, groups)
    )
    module.replace(params, rest)
    return metrics

  def evaluate(self, batch: Any, skip_jit: bool) -> tuple[WeightedSum, Any]:
    """The loss of a batch and its aux, by the arrays that `module.refresh` took;
    dispatched and not waited for."""
    module, step = self.module, self._eval_step(skip_jit)
    state = (module.params, module.rest, module.frozen)
    if skip_jit:
      return step(*state, batch)
    return programs.call("evaluation", step, *state, batch)

  def lower(
    self, groups: Sequence[Group], name: str = "train step"
  ) -> jax.stages.Lowered:
    """The jitted train step, lowered and not run; `name` is its in a plan."""
    module = self.module
    module.refresh()
    step: Any = self._train_step(skip_jit=False)
    state = (module.params, self.opt_state, module.rest, module.frozen)
    return programs.lower(name, step, *state, groups)

  def lower_eval(self, batch: Any) -> jax.stages.Lowered:
    """The jitted step of an evaluation, lowered and not run."""
    self.module.refresh()
    module, step = self.module, self._eval_step(skip_jit=False)
    state = (module.params, module.rest, module.frozen)
    return programs.lower("evaluation", step, *state, batch)

  def forget_steps(self) -> None:
    """The loss or the layout of the arrays has changed."""
    self._built.clear()

  def _train_step(self, skip_jit: bool) -> Callable[..., Any]:
    key, skeleton, loss = ("train", skip_jit), self.module.skeleton, self._train_loss
    if key not in self._built:
      tx = self.tx
      if self._offloads:
        where = jax.tree.map(lambda x: x.sharding, self.opt_state)
        tx = offload.updated_on_device(tx, where)
      self._built[key] = (
        train_step.make_train_step(skeleton, loss, tx)
        if skip_jit
        else train_step.jit_train_step(skeleton, loss, tx, self._layout())
      )
    return self._built[key]

  def _eval_step(self, skip_jit: bool) -> Any:
    key = ("eval", skip_jit)
    if key not in self._built:
      step = train_step.make_eval_step(self.module.skeleton, self._eval_loss)
      self._built[key] = step if skip_jit else jax.jit(step)
    return self._built[key]

  def _layout(self) -> tuple[Any, Any] | None:
    """Shardings of (params, opt_state); None where all is on one device."""
    if self.mesh is None and not self._offloads:
      return None
    arrays = (self.module.params, self.opt_state)
    return jax.tree.map(lambda x: x.sharding, arrays)

  # On disk.

  def to_run_state(self, **more: Any) -> RunState:
    """What is saved of it, and of the run besides."""
    self.module.refresh()
    return RunState(
      model_params=self.module.params,
      model_rest=self.module.rest,
      optimizer_state=flatten_optimizer(self.opt_state),
      **more,
    )

  def load(self, saved: RunState) -> None:
    """Takes the arrays of a checkpoint; the caller's module holds them at once."""
    self.module.replace(saved.model_params or {}, saved.model_rest or {})
    self.hand_back()
    self.opt_state = unflatten_optimizer(saved.optimizer_state or {}, self.opt_state)
