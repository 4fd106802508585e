"""What a trainer trains: a module, its optimizer state, the mesh they lie on, and the
steps that are built for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from tunix.sft import train_step
from tunix.sft.module_state import ModuleState, Skeleton
from tunix.sft.run_state import (
  RunState,
  flatten_optimizer,
  init_optimizer,
  optimizer_shardings,
  unflatten_optimizer,
)
from tunix.utils import mesh as mesh_lib


class TrainState:
  """The arrays of a run between two steps.

  Attributes:
    module: the caller's module and its arrays.
    tx: the optimizer.
    opt_state: its state, laid out like the parameters.
    mesh: the mesh all of it lies on; None: one device.
  """

  def __init__(self, model: nnx.Module, tx: optax.GradientTransformation):
    self.module = ModuleState(model)
    self.tx = tx
    self.mesh: mesh_lib.Mesh | None = None
    self.opt_state: Any = None
    self.place()

  def place(self) -> bool:
    """Lays everything out on the mesh that is current, or that it lies on; returns
    whether something changed."""
    module = self.module
    mesh = mesh_lib.current_mesh() or mesh_lib.mesh_of((module.params, module.frozen))
    if self.opt_state is not None and mesh == self.mesh:
      return False
    with mesh_lib.use_mesh(mesh):
      if mesh is not None:
        module.place(mesh)
      if self.opt_state is None:
        self.opt_state = init_optimizer(self.tx, module.params, mesh)
      elif mesh is not None:
        layout = optimizer_shardings(self.opt_state, module.params, mesh)
        self.opt_state = jax.device_put(self.opt_state, layout)
    self.mesh = mesh
    return True

  def devices(self) -> list[Any]:
    """What the run computes on."""
    if self.mesh is not None:
      return list(self.mesh.devices.flat)
    leaves = jax.tree.leaves((self.module.params, self.module.frozen))
    return list(leaves[0].devices()) if leaves else jax.devices()[:1]

  def layout(self) -> tuple[Any, Any] | None:
    """Shardings of (params, opt_state); None without a mesh."""
    if self.mesh is None:
      return None
    arrays = (self.module.params, self.opt_state)
    return jax.tree.map(lambda x: x.sharding, arrays)

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
    self.module.hand_back()
    self.opt_state = unflatten_optimizer(saved.optimizer_state or {}, self.opt_state)


class BuiltSteps:
  """The steps of a trainer, each built once, until something they rest on changes.

  Args:
    train_loss, eval_loss: traced on a merged module and one micro-batch.
  """

  def __init__(self, train_loss: train_step.BatchLoss, eval_loss: train_step.BatchLoss):
    self._losses = {"train": train_loss, "eval": eval_loss}
    self._built: dict[tuple[str, bool], Callable[..., Any]] = {}

  def clear(self) -> None:
    """The loss or the layout of the arrays has changed."""
    self._built.clear()

  def train(self, state: TrainState, skip_jit: bool) -> Callable[..., Any]:
    """`make_train_step` for the arrays of `state`."""
    build = train_step.make_train_step if skip_jit else train_step.jit_train_step
    more = () if skip_jit else (state.layout(),)
    return self._once("train", skip_jit, build, state, state.tx, *more)

  def eval(self, state: TrainState, skip_jit: bool) -> Callable[..., Any]:
    """`make_eval_step` for the arrays of `state`."""
    build = train_step.make_eval_step if skip_jit else _jit_eval_step
    return self._once("eval", skip_jit, build, state)

  def _once(self, kind, skip_jit, build, state, *more) -> Callable[..., Any]:
    key = (kind, skip_jit)
    if key not in self._built:
      self._built[key] = build(state.module.skeleton, self._losses[kind], *more)
    return self._built[key]


def _jit_eval_step(
  skeleton: Skeleton, loss: train_step.BatchLoss
) -> Callable[..., Any]:
  return jax.jit(train_step.make_eval_step(skeleton, loss))
