"""ModuleState: ownership of a module's arrays during training.

A train step donates its input arrays, which deletes them. The caller's module would
then hold deleted arrays. A `ModuleState` therefore copies the trained arrays before the
first step, one array at a time: the originals stay alive if other objects hold them,
and are freed otherwise. `hand_back` gives the module the current arrays. Frozen arrays
are never copied and never donated.

After a hand-back the module and the trainer hold the same arrays, so the next step
copies them again. The copy cannot be avoided by counting references:
`jax.device_put(x, x.sharding)` returns another array object with the same buffer, and
donating one of the two deletes both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from tunix.models.transformer.dense.layers import FrozenParam as FrozenParam
from tunix.sft.steps.shared_steps import graph_parts
from tunix.utils import mesh as mesh_lib, tree

Arrays = dict[str, Any]


def is_lora(model: nnx.Module) -> bool:
  """Returns True if the module has LoRA parameters."""
  return any(isinstance(node, nnx.LoRAParam) for _, node in nnx.iter_graph(model))


def trained_kind(model: nnx.Module) -> type[nnx.Param]:
  """Returns the kind of parameters that a trainer trains, without FrozenParam.

  They are the LoRA parameters if there are any, else all parameters.
  """
  return nnx.LoRAParam if is_lora(model) else nnx.Param


def trained_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
  """Returns the Variables that a trainer changes, by dotted path."""
  kind = trained_kind(model)
  return {
    ".".join(map(str, path)): node
    for path, node in nnx.iter_graph(model)
    if isinstance(node, kind) and not isinstance(node, FrozenParam)
  }


class Skeleton:
  """The structure of a module, which merges three nested dicts of arrays into one.

  `params` are the trained parameters (see `trained_kind`), `frozen` the other
  parameters, and `rest` the other variables (RNG counters, batch statistics), which a
  step may change.
  """

  def __init__(self, model: nnx.Module):
    self.trained = trained_kind(model)
    trained = nnx.All(self.trained, nnx.Not(FrozenParam))
    self._filters = (trained, nnx.All(nnx.Param, nnx.Not(trained)), ...)
    self._graph, *states = nnx.split(model, *self._filters)
    self._forms = [
      (list(tree.flatten(state)), jax.tree.structure(state)) for state in states
    ]

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Skeleton) and self._key == other._key

  def __hash__(self) -> int:
    return self._hash

  @functools.cached_property
  def _hash(self) -> int:
    return hash(self._key)

  @property
  def _key(self) -> tuple[Any, ...]:
    forms = tuple((tuple(names), structure) for names, structure in self._forms)
    return self.trained, self._graph, forms

  def comparable_parts(self) -> list[Any]:
    """Returns the values that the trace of a merged module can depend on."""
    return graph_parts(self._graph)

  def split(self, model: nnx.Module) -> tuple[Arrays, Arrays, Arrays]:
    """Returns (params, frozen, rest) of a module with this structure."""
    _, *states = nnx.split(model, *self._filters)
    params, frozen, rest = (tree.nest(tree.flatten(state)) for state in states)
    return params, frozen, rest

  def states(self, *parts: Arrays) -> list[Any]:
    """Returns the nnx states of (params, frozen, rest)."""
    out = []
    for (names, structure), part in zip(self._forms, parts):
      flat = tree.flatten(part)
      out.append(structure.unflatten([flat[name] for name in names]))
    return out

  def merge(self, params: Arrays, frozen: Arrays, rest: Arrays) -> Any:
    """Returns a module with the given arrays."""
    return nnx.merge(self._graph, *self.states(params, frozen, rest))

  def rest_of(self, model: nnx.Module) -> Arrays:
    """Returns `rest` of a module after a forward pass, without sown variables."""
    names, _ = self._forms[2]
    flat = tree.flatten(nnx.split(model, *self._filters)[3])
    return tree.nest({name: flat[name] for name in names})


def _check_trainable(model: nnx.Module, params: Arrays) -> None:
  if not params:
    raise ValueError(
      f"{type(model).__name__} has no parameters to train. Store them in nnx.Param, or "
      "apply LoRA to the model."
    )
  for name, leaf in tree.flatten(params).items():
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise ValueError(
        f"parameter {name} holds {leaf.dtype}, which has no gradient: a quantized base "
        "is not trained. Add adapters (lora.apply), or dequantize it."
      )


def _check_alive(arrays: object) -> None:
  if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arrays)):
    raise RuntimeError(
      "the model's arrays are gone: an update failed on the device after the arrays "
      "were donated to it. Build the model and the trainer again; the run resumes from "
      "the last checkpoint."
    )


class ModuleState:
  """The caller's module and the arrays that are trained.

  Args:
    model: the caller's module.

  Raises:
    ValueError: The module has nothing to train, or a trained parameter has a dtype
      without gradient.

  Attributes:
    model: the caller's module.
    skeleton: its structure.
    params, frozen, rest: the current arrays; see Skeleton.
  """

  def __init__(self, model: nnx.Module):
    self.model = model
    self.skeleton = Skeleton(model)
    self.params, self.frozen, self.rest = self.skeleton.split(model)
    _check_trainable(model, self.params)
    # True while the caller's module holds the current arrays. It becomes False with the
    # first step, which deletes the arrays of the module.
    self._handed_back = True

  def refresh(self) -> None:
    """Takes the module's arrays if it holds the current ones.

    The caller may have set other weights since the hand-back.

    Raises:
      RuntimeError: A failed update has deleted the arrays.
    """
    if self._handed_back:
      _check_alive(parts := mesh_lib.on_auto(self.skeleton.split(self.model)))
      self.params, self.frozen, self.rest = parts

  def own(self) -> None:
    """Takes the module's arrays, and copies the trained ones; called before a step.

    A step may donate the copies, because no other object holds them.
    """
    if not self._handed_back:
      return
    self.refresh()
    # One array at a time: its original can be freed before the next one is copied.
    for name, variable in self._trained_variables().items():
      parent, last = self._place(name)
      parent[last] = jnp.copy(parent[last])
      variable.set_value(parent[last])

  def replace(self, params: Arrays, rest: Arrays) -> None:
    """Takes the results of a step, which has deleted the module's arrays."""
    self.params, self.rest = params, rest
    self._handed_back = False

  def hand_back(self) -> nnx.Module:
    """Gives the module the current arrays, and returns it."""
    if not self._handed_back:
      params, _, rest = self.skeleton.states(self.params, self.frozen, self.rest)
      nnx.update(self.model, params, rest)
      self._handed_back = True
    return self.model

  def show_on(self, mesh: Mesh) -> None:
    """Gives the module all its arrays, frozen ones too, on another form of its mesh.

    Args:
      mesh: the mesh of the arrays, with other kinds of axes (Auto or Explicit).
    """
    self.hand_back()
    self.refresh()
    parts = mesh_lib.onto((self.params, self.frozen, self.rest), mesh)
    nnx.update(self.model, *self.skeleton.states(*parts))

  def place(self, mesh: Mesh) -> None:
    """Shards the module's arrays over a mesh by their `out_sharding` metadata.

    Arrays that are already sharded over that mesh keep their sharding.
    """
    model = self.hand_back()
    for _, node in nnx.iter_graph(model):
      if not isinstance(node, nnx.Variable):
        continue
      spec, value = mesh_lib.declared_spec(node), node.get_value()
      placed = jax.tree.map(lambda x, spec=spec: _on_mesh(x, spec, mesh), value)
      if any(
        a is not b for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(placed))
      ):
        node.set_value(placed)
    self.refresh()

  def _trained_variables(self) -> dict[str, nnx.Variable]:
    variables = trained_variables(self.model)
    return {name: variables[name] for name in tree.flatten(self.params)}

  def _place(self, name: str) -> tuple[dict[str, Any], str]:
    """Returns the innermost dict of `params` with the named array, and its key."""
    *parents, last = name.split(".")
    node = self.params
    for part in parents:
      node = node[part]
    return node, last


def _on_mesh(x: jax.Array, spec: object, mesh: Mesh) -> jax.Array:
  """Returns an array on the mesh, sharded by `spec`.

  An array that is already sharded over the mesh keeps its sharding. An array that is
  replicated on it is sharded by `spec`: eager operations under a mesh replicate.
  """
  if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
    here = mesh_lib.auto(x.sharding.mesh) == mesh
    if here and (spec is None or not x.sharding.is_fully_replicated):
      spec = x.sharding.spec
  return mesh_lib.put(x, mesh_lib.sharding_of_spec(spec, x.shape, mesh))
