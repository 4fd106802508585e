"""PartitionSpecs of the decoder's weights and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from tunix.models.transformer.config import ShardingRules
from tunix.utils import mesh as mesh_lib

# Along which of a weight's last two dimensions each axis lies.
_KINDS = {
  "in_out": lambda dim, tp: (dim, tp),  # q, k, v, gate, up, lm_head: [D, out]
  "out_in": lambda dim, tp: (tp, dim),  # o, down: [in, D]; embedding: [V, D]
  "router": lambda dim, tp: (dim, None),  # [D, E]: every device routes
  "norm": lambda dim, tp: (None,),
}


def weight_spec(
  kind: str, rules: ShardingRules, stacked: bool, *, experts: bool = False
) -> tuple[Any, ...]:
  """PartitionSpec entries of a weight; stacked layers are never split along L."""
  lead = ((None,) if stacked else ()) + ((rules.ep,) if experts else ())
  dim = tuple(a for a in rules.weight_axes if not (experts and a == rules.ep))
  return lead + _KINDS[kind](dim, rules.tp)


def pin_activations(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Pins [B, T, D] to the batch axes, and T to cp, on the current mesh.

  Without it XLA may replicate the batch and split D instead, which multiplies the
  temporary memory of a sharded step (1033 MB a device against 373 at 8-way FSDP of a
  58M model).
  """
  return mesh_lib.constrain(x, _rows(x, rules), rules.cp)


def pin_lookup(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Pins token ids [B, T], and then their rows [B, T, D] of the embedding table, to how
  the table lies: D along fsdp and ep, which are the batch's as well, and cp.

  So ids are gathered, which are small, and the rows' batch axes move from D to B in one
  exchange, and cp from D to T in another. Left to itself, XLA replicates all rows on a
  mesh of dp, fsdp and tp ("Involuntary full rematerialization"), and their gradient
  once more. In a step whose products are split, the table lies by words, and what they
  give is added up.
  """
  if _splits_products(x, rules):
    return pin_activations(x, rules)
  rows = tuple(axis for axis in batch_axes(rules) if axis not in rules.weight_axes)
  x = mesh_lib.constrain(x, *(rows, None, rules.weight_axes)[: x.ndim])
  if x.ndim == 3 and token_axis(rules) is not None:  # one axis after the other
    others = tuple(axis for axis in rules.weight_axes if axis != rules.cp)
    x = mesh_lib.constrain(x, rows, rules.cp, others)
  return x


def pin_rows(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Pins queries, keys, values or logits [B, T, _] to the rows of the cache, which is
  too large to move, where a step's products are split; otherwise nothing is said. This
  is done before they are cut into heads: devices may share one."""
  if not _splits_products(x, rules):
    return x
  return mesh_lib.constrain(x, batch_axes(rules), None, rules.tp)


def pin_features(x: jax.Array, rules: ShardingRules) -> jax.Array:
  """Pins [B, T, _] as a product gives it or takes it where a step's products are split;
  otherwise nothing is said. Between products and rows both sides are pinned, or XLA has
  one reach across and gathers the kernel, or the cache."""
  if not _splits_products(x, rules):
    return x
  return mesh_lib.constrain(x, _rows(x, rules), None, (rules.tp, *rules.step))


def _splits_products(x: jax.Array, rules: ShardingRules) -> bool:
  """Whether moving these activations is cheaper than moving weights: one token a row,
  of a model that was laid out for it."""
  return bool(rules.step) and x.shape[1] == 1


def _rows(x: jax.Array, rules: ShardingRules) -> tuple[str, ...]:
  """The axes that split the rows of activations between products."""
  axes = batch_axes(rules)
  if not _splits_products(x, rules):
    return axes
  return tuple(axis for axis in axes if axis not in rules.step)


def batch_axes(rules: ShardingRules) -> tuple[str, ...]:
  """The batch axes that the context's mesh has."""
  mesh = mesh_lib.context_mesh()
  return tuple(a for a in rules.batch_axes if mesh is not None and a in mesh.shape)


def token_axis(rules: ShardingRules) -> str | None:
  """The axis of each row's tokens, if the context's mesh has it."""
  mesh = mesh_lib.context_mesh()
  return rules.cp if mesh is not None and rules.cp in mesh.shape else None


def tokens_everywhere(
  shape: tuple[int, ...], mesh: Mesh | AbstractMesh, rules: ShardingRules
) -> PartitionSpec:
  """Spec of [B, T, ...] by which no two devices work on one token, as far as the axes
  divide: rows along the batch axes, the tokens of a row along cp and all others."""
  batch = batch_axes(rules)
  rows = mesh_lib.fit_spec((batch,), shape, mesh)[0]
  others, parts = [], 1
  for axis in sorted(mesh.shape, key=lambda axis: axis != rules.cp):
    size = mesh.shape[axis]
    if axis not in batch and shape[1] % (parts * size) == 0:
      others.append(axis)
      parts *= size
  return PartitionSpec(rows, tuple(others) or None)


def named_shardings(state: Any, mesh: Mesh) -> Any:
  """NamedShardings for a state, from the `out_sharding` metadata of its variables."""

  def one(variable):
    spec = variable.get_metadata().get("out_sharding")
    shape = variable.get_value().shape
    return variable.replace(mesh_lib.sharding_of_spec(spec, shape, mesh))

  return jax.tree.map(one, state, is_leaf=lambda x: hasattr(x, "get_metadata"))


def on_users_mesh(model: Any, given: Mesh | None = None) -> Any:
  """A model that was laid out on an Auto mesh, as arrays on the mesh that the user
  gave, or has set, if its axes are Explicit: inside it no others are computed with."""
  home = mesh_lib.explicit_mesh(()) if given is None else given
  if home is not None and mesh_lib.is_explicit(home):
    nnx.update(model, mesh_lib.onto(nnx.state(model), home))
  return model


def abstract(build: Callable[[], nnx.Module]) -> tuple[Any, Any]:
  """(graph, state of shapes) of a model that is not built.

  `nnx.eval_shape` would check every spec against the context's mesh, which may lack
  some of the axes.
  """
  graphs = []

  def split():
    graph, state = nnx.split(build())
    graphs.append(graph)
    return state

  state = jax.eval_shape(split)
  return graphs[0], state
