"""The state of a run as one object, which a checkpoint holds and a resumed run loads.

State that a resumed run needs and that is missing here is a bug.
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
from tunix.sft.steps.module_state import Skeleton
from tunix.utils import attributes, mesh as mesh_lib, tree

Arrays = dict[str, Any]

# The fields of a RunState that hold arrays; each is an item of a checkpoint.
ARRAYS = ("model_params", "model_rest", "optimizer_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
  """The state of a run between two optimizer steps. A field that is None is not saved.

  Attributes:
    model_params: the trained parameters, nested by path.
    model_rest: the model's other variables (RNG counters, batch statistics).
    optimizer_state: the optimizer's arrays, nested by path.
    progress: counters, the place in the data of each process and the metrics logger's
      state, as JSON.
    custom_metadata: values that the user adds, as JSON.
  """

  model_params: Arrays | None = None
  model_rest: Arrays | None = None
  optimizer_state: Arrays | None = None
  progress: dict[str, Any] | None = None
  custom_metadata: dict[str, Any] | None = None

  def arrays(self) -> dict[str, Arrays]:
    """Returns the fields with at least one array, by name."""
    parts = attributes.of(self, ARRAYS)
    return {name: part for name, part in parts.items() if part}


@dataclasses.dataclass
class Position:
  """The counters and the place in the data that every kind of run has.

  Attributes:
    evaluated_at: step of the last evaluation; -1 before the first evaluation.
    calls: completed calls of `train`. A script that is started again repeats them, and
      they return at once.
    data_state: place in the data of the unfinished call of `train`; None before its
      first batch.
    best: the best evaluation, if `TrainingConfig.best` is set.
  """

  evaluated_at: int = -1
  calls: int = 0
  data_state: dict[str, Any] | None = None
  best: best_lib.Best | None = None

  def __post_init__(self):
    if isinstance(self.best, dict):  # read from a checkpoint
      self.best = best_lib.Best(**self.best)

  def rewind(self) -> None:
    """Makes the next call of `train` start from the beginning of the data."""
    self.data_state = None


@dataclasses.dataclass
class Progress(Position):
  """A trainer's position, saved as JSON; `data_state` is the one of this process.

  Attributes:
    train_steps: number of optimizer updates.
    iter_steps: number of consumed micro-batches.
    train_rows: rows of the largest micro-batch so far; smaller ones are padded to it.
  """

  train_steps: int = 0
  iter_steps: int = 0
  train_rows: int = 0

  def to_json(self, places: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Returns the position of all processes as JSON.

    Args:
      places: `data_state` of each process.
    """
    counts = dataclasses.asdict(self)
    del counts["data_state"]
    return {"data": list(places), "counts": counts}

  @classmethod
  def from_json(cls, saved: dict[str, Any]) -> Progress:
    """Returns the position of this process from that of all processes."""
    states = saved["data"]
    # The run may have had another number of processes.
    place = states[jax.process_index() % len(states)]
    return cls(**saved["counts"], data_state=place)


def init_optimizer(
  tx: optax.GradientTransformation, params: Arrays, mesh: Mesh | None
) -> Any:
  """Returns the initial optimizer state, sharded like the parameters."""
  if mesh is None:
    return jax.jit(tx.init)(params)
  shapes = jax.eval_shape(tx.init, params)
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
    where = optimizer_shardings(shapes, params, mesh)
    return jax.tree.map(mesh_lib.put, shapes, where)
  return jax.jit(tx.init, out_shardings=optimizer_shardings(shapes, params, mesh))(
    params
  )


def optimizer_shardings(opt_state: optax.OptState, params: Arrays, mesh: Mesh) -> Any:
  """Returns a sharding for each array of an optimizer state.

  An optax state repeats the tree of the parameters inside its own tree, once for each
  moment. An array whose path ends with a parameter's path, and which has that
  parameter's shape, takes that parameter's sharding. All other arrays (counters,
  factored moments) are replicated.
  """
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


def flatten_optimizer(opt_state: optax.OptState) -> Arrays:
  """Returns an optimizer state as nested dicts, without the classes of optax."""
  return tree.nest(tree.flatten(opt_state))


def unflatten_optimizer(saved: Arrays, like: object) -> Any:
  """Returns nested dicts of arrays in the structure of `like`."""
  flat = tree.flatten(saved)
  names = list(tree.flatten(like))
  return jax.tree.structure(like).unflatten([flat[name] for name in names])


def _optimizer_arrays(optimizer: object) -> Any:
  if isinstance(optimizer, (int, float, str)):
    raise TypeError(
      f"optimizer is {optimizer!r}; expected an nnx.Optimizer or the state of an optax "
      "transformation. Give a step number as step=."
    )
  if isinstance(optimizer, nnx.Optimizer):
    return nnx.to_pure_dict(nnx.state(optimizer))
  return optimizer


def of_module(model: nnx.Module, optimizer: object, only_lora: bool) -> RunState:
  """Returns the state of a module and, if it is given, of an optimizer.

  Args:
    model: any module.
    optimizer: an nnx.Optimizer, the state of an optax transformation, or None.
    only_lora: include only LoRA parameters.

  Raises:
    TypeError: `optimizer` is of another kind.
    ValueError: `only_lora` is True, and the module has no LoRA parameters.
  """
  skeleton = Skeleton(model)
  params, frozen, rest = skeleton.split(model)
  if only_lora:
    if skeleton.trained is not nnx.LoRAParam:
      raise ValueError(
        f"{type(model).__name__} has no LoRA parameters. Apply LoRA to it first, or "
        "save all parameters."
      )
    frozen, rest = {}, None
  both = tree.nest({**tree.flatten(frozen), **tree.flatten(params)})
  arrays = (
    None if optimizer is None else flatten_optimizer(_optimizer_arrays(optimizer))
  )
  return RunState(model_params=both, model_rest=rest, optimizer_state=arrays)


def load_into(
  model: nnx.Module, optimizer: nnx.Optimizer | None, state: RunState, only_lora: bool
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
