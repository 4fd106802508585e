"""PartitionSpecs of the decoder's weights, and constraints on its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from tunix.models.transformer.config import ShardingRules
from tunix.utils import mesh as mesh_lib

# Maps each kind of weight to the mesh axes of its last dimensions. `dim` holds the axes
# of the model dimension D (fsdp, ep, cp), and `tp` is the axis of heads, hidden units
# and vocabulary.
_KINDS = {
  "in_out": lambda dim, tp: (dim, tp),  # q, k, v, gate, up, lm_head: [D, out]
  "out_in": lambda dim, tp: (tp, dim),  # o, down: [in, D]; embedding: [V, D]
  "router": lambda dim, tp: (dim, None),  # [D, E]: every device routes
  "heads": lambda dim, tp: (tp,),  # one number per head: sinks
  "norm": lambda dim, tp: (None,),
}


def weight_spec(
  kind: str, rules: ShardingRules, stacked: bool, *, experts: bool = False
) -> tuple[Any, ...]:
  """Returns the PartitionSpec entries of a weight.

  The axis L of stacked layers is never split.

  Args:
    kind: "in_out", "out_in", "router", "heads" or "norm", see `_KINDS`.
    rules: mesh axes.
    stacked: True if the weight has a leading axis of layers.
    experts: True if the weight has an axis of experts, which ep splits.
  """
  # Experts are split by ep along E, so ep cannot split their model dimension too.
  lead = ((None,) if stacked else ()) + ((rules.ep,) if experts else ())
  dim = tuple(a for a in rules.weight_axes if not (experts and a == rules.ep))
  return lead + _KINDS[kind](dim, rules.tp)


def pin_activations(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Constrains [B, T, D] to the batch axes, and T to cp, on the current mesh.

  Without the constraint XLA may replicate the batch and split D instead. With 8-way
  FSDP of a 58M model that took 1033 MB of temporary memory per device instead of 373.
  """
  return mesh_lib.constrain(x, _rows(x, rules), rules.cp)


def pin_lookup(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Constrains the input and output of an embedding lookup to the table's sharding.

  The table's dimension D is split over fsdp, ep and cp; fsdp and ep split the batch
  too. The lookup therefore all-gathers the token ids, which are small, and its result
  [B, T, D] is split along D. Afterwards one all-to-all moves the batch axes from D to
  B, and another one moves cp from D to T. Without the constraints XLA replicates the
  result and its gradient on a mesh of dp, fsdp and tp ("Involuntary full
  rematerialization").

  In a decode step whose products are split (`rules.step`), the table is split along the
  vocabulary. Each device looks up the ids that it holds, and XLA adds the partial
  results.

  Args:
    x: token ids [B, T], or the looked-up rows [B, T, D].
    rules: mesh axes.
  """
  if _splits_products(x, rules):
    return pin_activations(x, rules)
  rows = tuple(axis for axis in batch_axes(rules) if axis not in rules.weight_axes)
  x = mesh_lib.constrain(x, *(rows, None, rules.weight_axes)[: x.ndim])
  # The axes move in two steps, because XLA has no single exchange for both. This first
  # constraint moves cp to T and keeps the other axes on D; `pin_activations` then moves
  # the others to B.
  if x.ndim == 3 and token_axis(rules) is not None:
    others = tuple(axis for axis in rules.weight_axes if axis != rules.cp)
    x = mesh_lib.constrain(x, rows, rules.cp, others)
  return x


def pin_rows(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Constrains queries, keys, values or logits [B, T, _] to the rows of the cache.

  It applies only to a decode step whose products are split (`rules.step`). Otherwise
  `x` is returned unchanged. The cache is too large to move, so attention runs on the
  devices that hold its rows. The constraint is set before the split into heads, because
  several devices may share one head.
  """
  if not _splits_products(x, rules):
    return x
  return mesh_lib.constrain(x, batch_axes(rules), None, rules.tp)


def pin_features(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Constrains the input or output [B, T, _] of a split product to its features.

  It applies only to a decode step whose products are split (`rules.step`). Otherwise
  `x` is returned unchanged. `pin_rows` and this function are called in pairs. With only
  one of the two constraints, XLA extends it to the other array and all-gathers the
  kernel or the cache.
  """
  if not _splits_products(x, rules):
    return x
  return mesh_lib.constrain(x, _rows(x, rules), None, (rules.tp, *rules.step))


def _splits_products(x: jax.Array, rules: ShardingRules) -> bool:
  """Returns True for a decode step whose products are split over `rules.step`.

  A call with one token per row counts as a decode step. Moving its activations is
  cheaper than moving the weights.
  """
  return bool(rules.step) and x.shape[1] == 1


def _rows(x: jax.Array, rules: ShardingRules) -> tuple[str, ...]:
  """Returns the mesh axes that split the rows of activations between two products.

  In a split decode step, the axes `rules.step` split the features instead of the rows.
  """
  axes = batch_axes(rules)
  if not _splits_products(x, rules):
    return axes
  return tuple(axis for axis in axes if axis not in rules.step)


def batch_axes(rules: ShardingRules) -> tuple[str, ...]:
  """Returns the batch axes that the context's mesh has."""
  mesh = mesh_lib.context_mesh()
  return tuple(a for a in rules.batch_axes if mesh is not None and a in mesh.shape)


def token_axis(rules: ShardingRules) -> str | None:
  """Returns the mesh axis of the tokens of a row; None if the mesh lacks it."""
  mesh = mesh_lib.context_mesh()
  return rules.cp if mesh is not None and rules.cp in mesh.shape else None


def tokens_everywhere(
  shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: ShardingRules
) -> PartitionSpec:
  """Returns a spec of [B, T, ...] that gives every token to one device only.

  Rows are split over the batch axes, and the tokens of a row over cp and all other
  axes. An axis whose size does not divide the tokens is left out; the devices along it
  then hold the same tokens.
  """
  batch = batch_axes(rules)
  rows = mesh_lib.fit_spec((batch,), shape, mesh)[0]
  others, parts = [], 1
  # cp first, so that a device keeps tokens of its own shard of the row.
  for axis in sorted(mesh.shape, key=lambda axis: axis != rules.cp):
    size = mesh.shape[axis]
    if axis not in batch and shape[1] % (parts * size) == 0:
      others.append(axis)
      parts *= size
  return PartitionSpec(rows, tuple(others) or None)


def named_shardings(state: nnx.State, mesh: Mesh) -> Any:
  """Returns the NamedShardings of a state, from its variables' `out_sharding`."""

  def one(variable):
    spec, shape = mesh_lib.declared_spec(variable), variable.get_value().shape
    return variable.replace(mesh_lib.sharding_of_spec(spec, shape, mesh))

  return jax.tree.map(one, state, is_leaf=lambda x: hasattr(x, "get_metadata"))


def on_users_mesh(model: nnx.Module, given: Mesh | None = None) -> Any:
  """Returns the model with its arrays on the user's mesh if its axes are Explicit.

  Models are laid out on a mesh of Auto axes. Inside a mesh of Explicit axes JAX
  computes only with arrays of that mesh.

  Args:
    model: the model, updated in place.
    given: the mesh that the user gave; None for the mesh of the context.
  """
  home = mesh_lib.explicit_mesh(()) if given is None else given
  if home is not None and mesh_lib.is_explicit(home):
    nnx.update(model, mesh_lib.onto(nnx.state(model), home))
  return model


def abstract(build: Callable[[], nnx.Module]) -> tuple[Any, Any]:
  """Returns the graph definition and the abstract state of a model.

  The state has shapes in place of arrays, so no memory is allocated. `nnx.eval_shape`
  is not used, because it checks every spec against the context's mesh, which may lack
  some of the axes.
  """
  # `jax.eval_shape` can return only arrays, so the graph is passed out by this list.
  graphs = []

  def split():
    graph, state = nnx.split(build())
    graphs.append(graph)
    return state

  state = jax.eval_shape(split)
  return graphs[0], state
