"""All that a resumed run needs, as one object.

Checkpointing is "save that object". Anything stateful that is not in it is a bug.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.sft import best as best_lib
from tunix.sft.module_state import Skeleton
from tunix.utils import mesh as mesh_lib, tree

Arrays = dict[str, Any]

# The parts of a RunState that hold arrays: an item of a checkpoint each.
ARRAYS = ("model_params", "model_rest", "optimizer_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
  """A run between two optimizer steps. A part that is None is not saved.

  Attributes:
    model_params: what is saved of the model's parameters, nested by path.
    model_rest: the model's other variables (RNG counters, batch statistics).
    optimizer_state: the optimizer's arrays, nested by path.
    progress: JSON: counters, data-iterator state of every process, metrics position.
    custom_metadata: JSON: what the user adds.
  """

  model_params: Arrays | None = None
  model_rest: Arrays | None = None
  optimizer_state: Arrays | None = None
  progress: dict[str, Any] | None = None
  custom_metadata: dict[str, Any] | None = None

  def arrays(self) -> dict[str, Arrays]:
    """The parts that hold arrays and are there (an empty dict of arrays is not)."""
    parts = {name: getattr(self, name) for name in ARRAYS}
    return {name: part for name, part in parts.items() if part}


@dataclasses.dataclass
class Position:
  """Where a run stands between two updates, as far as every kind of run knows it.

  Attributes:
    evaluated_at: the step of the last evaluation, -1 before the first.
    calls: calls of `train` that are over; a script that is run again makes them again.
    data_state: the place in the data of the call that is not; None before it.
    best: the best evaluation, where `TrainingConfig.best` asks for it.
  """

  evaluated_at: int = -1
  calls: int = 0
  data_state: dict[str, Any] | None = None
  best: best_lib.Best | None = None

  def __post_init__(self):
    if isinstance(self.best, dict):  # as a checkpoint has it
      self.best = best_lib.Best(**self.best)

  def rewind(self) -> None:
    """The next call starts the data anew."""
    self.data_state = None


@dataclasses.dataclass
class Progress(Position):
  """A trainer's position, `data_state` being this process's; JSON in a checkpoint.

  Attributes:
    train_steps: optimizer updates done.
    iter_steps: micro-batches consumed.
    train_rows: rows of the largest micro-batch so far; smaller ones are padded to it.
  """

  train_steps: int = 0
  iter_steps: int = 0
  train_rows: int = 0

  def to_json(self, places: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """For all processes: `places` in the data are theirs."""
    counts = dataclasses.asdict(self)
    del counts["data_state"]
    return {"data": list(places), "counts": counts}

  @classmethod
  def from_json(cls, saved: dict[str, Any]) -> Progress:
    """Of this process."""
    states = saved["data"]
    place = states[jax.process_index() % len(states)]
    return cls(**saved["counts"], data_state=place)


def init_optimizer(
  tx: optax.GradientTransformation, params: Arrays, mesh: Mesh | None
) -> Any:
  """Optimizer state laid out like the parameters it belongs to."""
  if mesh is None:
    return jax.jit(tx.init)(params)
  shapes = jax.eval_shape(tx.init, params)
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
    where = optimizer_shardings(shapes, params, mesh)
    return jax.tree.map(mesh_lib.put, shapes, where)
  return jax.jit(tx.init, out_shardings=optimizer_shardings(shapes, params, mesh))(
    params
  )


def optimizer_shardings(opt_state: Any, params: Arrays, mesh: Mesh) -> Any:
  """A moment takes the sharding of the parameter whose path ends its own path and
  whose shape it has; everything else (counters, factored moments) is replicated."""
  flat = tree.flatten(params)
  replicated = NamedSharding(mesh, PartitionSpec())

  def one(path, leaf):
    parts = tree.path_name(path).split(".")
    for start in range(len(parts)):
      owner = flat.get(".".join(parts[start:]))
      if owner is not None and owner.shape == leaf.shape:
        return owner.sharding
    return replicated

  return jax.tree_util.tree_map_with_path(one, opt_state)


def flatten_optimizer(opt_state: Any) -> Arrays:
  """Optimizer state as nested dicts of arrays, whatever classes optax uses."""
  return tree.nest(tree.flatten(opt_state))


def unflatten_optimizer(saved: Arrays, like: Any) -> Any:
  """Nested dicts of arrays back into the structure of `like`."""
  flat = tree.flatten(saved)
  names = list(tree.flatten(like))
  return jax.tree.structure(like).unflatten([flat[name] for name in names])


def _optimizer_arrays(optimizer: Any) -> Any:
  if isinstance(optimizer, (int, float, str)):
    raise TypeError(
      f"optimizer is {optimizer!r}: expected an nnx.Optimizer or the state of an optax "
      "transformation; give a step number as step="
    )
  if isinstance(optimizer, nnx.Optimizer):
    return nnx.to_pure_dict(nnx.state(optimizer))
  return optimizer


def of_module(model: nnx.Module, optimizer: Any, only_lora: bool) -> RunState:
  """The state of a module, and of an nnx.Optimizer or optax state if one is given.

  Raises:
    TypeError: `optimizer` is neither.
    ValueError: only LoRA parameters are asked for, and there are none.
  """
  skeleton = Skeleton(model)
  params, frozen, rest = skeleton.split(model)
  if only_lora:
    if skeleton.trained is not nnx.LoRAParam:
      raise ValueError(
        f"{type(model).__name__} has no LoRA parameters: apply LoRA to it first, or "
        "save all parameters"
      )
    frozen, rest = {}, None
  both = tree.nest({**tree.flatten(frozen), **tree.flatten(params)})
  arrays = (
    None if optimizer is None else flatten_optimizer(_optimizer_arrays(optimizer))
  )
  return RunState(model_params=both, model_rest=rest, optimizer_state=arrays)


def load_into(
  model: nnx.Module, optimizer: Any, state: RunState, only_lora: bool
) -> None:
  """Sets the variables of a module, and of an nnx.Optimizer, in place."""
  skeleton = Skeleton(model)
  params, frozen, rest = skeleton.split(model)
  saved = tree.flatten(state.model_params or {})
  params = tree.nest({name: saved[name] for name in tree.flatten(params)})
  if not only_lora:
    frozen = tree.nest({name: saved[name] for name in tree.flatten(frozen)})
    rest = state.model_rest or rest
  nnx.update(model, *skeleton.states(params, frozen, rest))
  if isinstance(optimizer, nnx.Optimizer) and state.optimizer_state is not None:
    like = nnx.state(optimizer)
    arrays = unflatten_optimizer(state.optimizer_state, _optimizer_arrays(optimizer))
    nnx.replace_by_pure_dict(like, arrays)
    nnx.update(optimizer, like)
