"""The arrays of a module while a trainer owns them, and how they get back.

Training donates its arrays, so the caller's module would be left with dead ones. A
`ModuleState` takes the trained leaves out (as copies, one leaf at a time, so that the
originals live on for whoever else holds them and are freed otherwise), and hands the
current ones back when asked. Frozen leaves are never copied and never donated.

Every hand-back costs one copy of the trained leaves at the next step. Reference counts
cannot tell whether that is needed: `jax.device_put(x, x.sharding)` gives another array
object over the same buffer, and donating one kills both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from tunix.utils import mesh as mesh_lib, tree

Arrays = dict[str, Any]


def is_lora(model: nnx.Module) -> bool:
  """Whether the module has LoRA parameters."""
  return any(isinstance(node, nnx.LoRAParam) for _, node in nnx.iter_graph(model))


class FrozenParam(nnx.Param):
  """A parameter that a trainer neither trains nor saves: a part of the module that is
  given from outside, such as a teacher's unembedding."""


def trained_kind(model: nnx.Module) -> type[nnx.Param]:
  """What a trainer trains of a module, FrozenParam apart: its LoRA parameters if there
  are any, else all parameters."""
  return nnx.LoRAParam if is_lora(model) else nnx.Param


def trained_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
  """The Variables that a trainer changes, by their dotted paths."""
  kind = trained_kind(model)
  return {
    ".".join(map(str, path)): node
    for path, node in nnx.iter_graph(model)
    if isinstance(node, kind) and not isinstance(node, FrozenParam)
  }


class Skeleton:
  """A module without its arrays: how three nested dicts of arrays make it up.

  `params` are trained (LoRA parameters if there are any, else all `nnx.Param` that are
  no FrozenParam),
  `frozen` are the other parameters, `rest` is everything else (RNG counters, batch
  statistics), which a step may change.
  """

  def __init__(self, model: nnx.Module):
    self.trained = trained_kind(model)
    trained = nnx.All(self.trained, nnx.Not(FrozenParam))
    self._filters = (trained, nnx.All(nnx.Param, nnx.Not(trained)), ...)
    self._graph, *states = nnx.split(model, *self._filters)
    self._forms = [
      (list(tree.flatten(state)), jax.tree.structure(state)) for state in states
    ]

  def split(self, model: nnx.Module) -> tuple[Arrays, Arrays, Arrays]:
    """(params, frozen, rest) of a module of this form."""
    _, *states = nnx.split(model, *self._filters)
    params, frozen, rest = (tree.nest(tree.flatten(state)) for state in states)
    return params, frozen, rest

  def states(self, *parts: Arrays) -> list[Any]:
    """The nnx states that hold the given arrays."""
    out = []
    for (names, structure), part in zip(self._forms, parts):
      flat = tree.flatten(part)
      out.append(structure.unflatten([flat[name] for name in names]))
    return out

  def merge(self, params: Arrays, frozen: Arrays, rest: Arrays) -> Any:
    """A module made of the arrays."""
    return nnx.merge(self._graph, *self.states(params, frozen, rest))

  def rest_of(self, model: nnx.Module) -> Arrays:
    """The `rest` of a module after it ran; what it sowed beyond that is dropped."""
    names, _ = self._forms[2]
    flat = tree.flatten(nnx.split(model, *self._filters)[3])
    return tree.nest({name: flat[name] for name in names})


def _check_trainable(model: nnx.Module, params: Arrays) -> None:
  if not params:
    raise ValueError(
      f"{type(model).__name__} has no parameters to train: keep them in nnx.Param, or "
      "apply LoRA to the model"
    )
  for name, leaf in tree.flatten(params).items():
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise ValueError(
        f"parameter {name} holds {leaf.dtype}, which has no gradient: a quantised base "
        "is not trained; add adapters to it (lora.apply), or dequantise it"
      )


def _check_alive(arrays: Any) -> None:
  if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arrays)):
    raise RuntimeError(
      "the model's arrays are gone: an update failed on the device after it had taken "
      "them (they are donated); make the model and the trainer anew: it resumes from "
      "the last checkpoint"
    )


class ModuleState:
  """The caller's module and the arrays that training works on.

  Raises:
    ValueError: there is nothing to train, or a parameter that would be trained holds no
      floating-point numbers.

  Attributes:
    model: the caller's object.
    skeleton: its form.
    params, frozen, rest: its arrays, see Skeleton.
  """

  def __init__(self, model: nnx.Module):
    self.model = model
    self.skeleton = Skeleton(model)
    self.params, self.frozen, self.rest = self.skeleton.split(model)
    _check_trainable(model, self.params)
    self._handed_back = True  # whether the module holds them

  def refresh(self) -> None:
    """Takes what the module holds now: its owner may have set other weights.

    Raises:
      RuntimeError: a failed update has taken its arrays.
    """
    if self._handed_back:
      _check_alive(parts := mesh_lib.on_auto(self.skeleton.split(self.model)))
      self.params, self.frozen, self.rest = parts

  def own(self) -> None:
    """Takes the module's arrays as `refresh` does, the trained ones as copies that
    nobody else can hold; call before donating."""
    if not self._handed_back:
      return
    self.refresh()
    for name, variable in self._trained_variables().items():
      parent, last = self._place(name)
      parent[last] = jnp.copy(parent[last])
      variable.set_value(parent[last])

  def replace(self, params: Arrays, rest: Arrays) -> None:
    """What a step returned; the module's own arrays are dead from here on."""
    self.params, self.rest = params, rest
    self._handed_back = False

  def hand_back(self) -> nnx.Module:
    """Gives the module the current arrays; returns it."""
    if not self._handed_back:
      params, _, rest = self.skeleton.states(self.params, self.frozen, self.rest)
      nnx.update(self.model, params, rest)
      self._handed_back = True
    return self.model

  def show_on(self, mesh: Mesh) -> None:
    """Hands the module its arrays, frozen ones too, as arrays on `mesh`, which differs
    from the one they lie on in the kinds of its axes alone."""
    self.hand_back()
    self.refresh()
    parts = mesh_lib.onto((self.params, self.frozen, self.rest), mesh)
    nnx.update(self.model, *self.skeleton.states(*parts))

  def place(self, mesh: Mesh) -> None:
    """Lays the module's arrays out on a mesh, as their `out_sharding` metadata says;
    what is split over that mesh already stays as it is."""
    model = self.hand_back()
    for _, node in nnx.iter_graph(model):
      if not isinstance(node, nnx.Variable):
        continue
      spec = node.get_metadata().get("out_sharding")
      value = node.get_value()
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
    """The innermost dict of `params` that holds a leaf, and its key there."""
    *parents, last = name.split(".")
    node = self.params
    for part in parents:
      node = node[part]
    return node, last


def _on_mesh(x: jax.Array, spec: Any, mesh: Mesh) -> jax.Array:
  """An array on the mesh. One that is split over it keeps its layout; one that was
  made there whole, as eager operations under a mesh do, is split as `spec` says."""
  if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
    here = mesh_lib.auto(x.sharding.mesh) == mesh
    if here and (spec is None or not x.sharding.is_fully_replicated):
      spec = x.sharding.spec
  return mesh_lib.put(x, mesh_lib.sharding_of_spec(spec, x.shape, mesh))
