"""Support for `qwix.apply_lora_to_model` on stacked layers; it does not import qwix.

qwix traces one call of the model and adds parameters to each module whose method
multiplies by a weight. Inside a scan or a remat such a module is a temporary copy, and
added parameters would be lost. qwix marks all modules during this one call
(`is_initialising`). The layers then run one by one as separate modules, and their added
parameters are stacked and stored in the stacked module. Later calls scan as usual: the
slice of each layer includes its slice of the added parameters, where qwix expects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Additions = dict[tuple[tuple[Any, ...], str], Any]


def is_initialising(model: nnx.Module) -> bool:
  """Returns True during the call in which qwix adds its parameters."""
  return bool(getattr(model, "disable_quant_stats_update", False))


def is_wrapped(model: nnx.Module) -> bool:
  """Returns True if qwix has wrapped the model, and adds to its products."""
  return hasattr(model, "qwix_path")


def run_apart(
  stack: nnx.Module,
  layers: int,
  call: Callable[[Any, jax.Array], jax.Array],
  x: jax.Array,
) -> jax.Array:
  """Runs the layers of a stack one by one, and stacks the parameters added to them.

  Args:
    stack: a module whose arrays have a leading axis of `layers`. It is changed.
    layers: number of layers.
    call: runs one layer, (layer, x) -> x.
    x: input of the first layer.

  Returns:
    The output of the last layer.
  """
  rngs = getattr(stack, "qwix_rngs", None)
  # qwix stores its random streams on every module. They have no layer axis to slice, so
  # they are removed from the stack and given to each layer whole.
  stack.set_attributes(qwix_rngs=None, raise_if_not_found=False)
  graph, state = nnx.split(stack)
  added: list[Additions] = []
  for i in range(layers):
    layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
    drop_layer_axis(layer)
    layer.set_attributes(qwix_rngs=rngs, raise_if_not_found=False)
    # Attributes that are new, or were replaced by another object, are qwix's.
    before = _attributes(layer)
    x = call(layer, x)
    after = _attributes(layer)
    added.append({k: v for k, v in after.items() if v is not before.get(k)})
  # All layers have the same structure, so the additions of the first layer have the
  # same paths and names in every other layer.
  modules = dict(nnx.iter_modules(stack))
  for path, name in added[0]:
    values = [additions[path, name] for additions in added]
    setattr(modules[path], name, _stacked(values))
  return x


def drop_layer_axis(layer: Any) -> None:
  """Removes the layer axis from the specs of variables that were sliced, in place."""
  for _, variable in nnx.iter_graph(layer):
    if isinstance(variable, nnx.Variable):
      spec = variable.get_metadata("out_sharding")
      variable.set_metadata(out_sharding=spec[1:])


def _attributes(layer: nnx.Module) -> Additions:
  """Returns the attributes of all modules by (path, name).

  Sub-modules and the bookkeeping of nnx and qwix are left out.
  """
  return {
    (path, name): value
    for path, module in nnx.iter_modules(layer)
    for name, value in vars(module).items()
    if not name.startswith(("_", "qwix_")) and not isinstance(value, nnx.Module)
  }


def _stacked(values: list[Any]) -> Any:
  """Returns the attribute of the stack from the values that it has in the layers.

  Args:
    values: the value of one attribute in each layer.
  """
  if isinstance(values[0], nnx.Variable):
    return _stacked_variable(*values)
  # Options such as a rank are equal in all layers and are stored once.
  if isinstance(values[0], str | int | float | bool | tuple | None):
    return values[0]

  def is_variable(x):
    return isinstance(x, nnx.Variable)

  return nnx.data(jax.tree.map(_stacked_variable, *values, is_leaf=is_variable))


def _stacked_variable(*variables: nnx.Variable) -> nnx.Variable:
  value = jnp.stack([variable.get_value() for variable in variables])
  spec = variables[0].get_metadata().get("out_sharding")
  spec = (None, *spec) if spec is not None else (None,) * value.ndim
  return type(variables[0])(value, out_sharding=spec, eager_sharding=False)
