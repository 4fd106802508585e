"""Models that share weights: an adapted model and the base model below its adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models.adapters import lora_modules, whole_modules
from tunix.models.transformer.model import Transformer
from tunix.utils import tree


def share_backbone(adapted: nnx.Module, reference: nnx.Module) -> bool:
  """Returns True if the two models hold the same arrays, adapters left out.

  Arrays are the same if they share memory; equal numbers do not count.
  """
  first, second = _frozen(adapted), _frozen(reference)
  return first.keys() == second.keys() and all(
    same_memory(x, second[path]) for path, x in first.items()
  )


def share_variables(variables: Iterable[nnx.Variable], model: nnx.Module) -> bool:
  """Returns True if a module holds one of the Variables, and so changes with it.

  Other Variables of the same arrays do not count.
  """
  held = {
    id(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)
  }
  return any(id(variable) in held for variable in variables)


def _frozen(model: nnx.Module) -> dict[str, jax.Array]:
  return tree.flatten(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))


def same_memory(a: jax.Array, b: jax.Array) -> bool:
  """Returns True if two `jax.Array` objects refer to the same buffers."""
  if a is b:
    return True
  if isinstance(a, jax.ShapeDtypeStruct):  # a plan's, which has no buffers
    return False
  places = [
    {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
    for x in (a, b)
  ]
  alike = a.shape == b.shape and a.dtype == b.dtype
  return alike and bool(places[0]) and places[0] == places[1]


def reference_of(model: nnx.Module) -> Any:
  """Returns the base model below a model's adapters, which shares its arrays.

  The result is a separate module in eval mode that costs no memory. Training `model`
  does not change it, because frozen arrays are never donated. Adapters that this
  package did not attach (qwix's, on any module) are replaced by zeros of their size.

  Args:
    model: an adapted model. It is unchanged.

  Raises:
    ValueError: the model has no adapters, so training would change the reference too.
      Or some modules are trained whole, and their original weights are not kept.
  """
  if not nnx.state(model, nnx.LoRAParam):
    raise ValueError(
      "the model has no adapters, so all of its weights are trained. Pass a separate "
      "reference model, or adapt the model (lora.apply)"
    )
  if isinstance(model, Transformer) and (whole := whole_modules.of(model)):
    raise ValueError(
      f"{', '.join(whole)} is trained whole (modules_to_save), so this model does not "
      "have the original weights. Pass a separate reference model"
    )
  out = nnx.clone(model)
  if isinstance(out, Transformer):
    for linear in lora_modules.adapted(out).values():
      lora_modules.detach(linear)
    out.token_rows = nnx.data(None)
  for _, node in nnx.iter_graph(out):
    if isinstance(node, nnx.LoRAParam):
      node.set_value(jax.tree.map(jnp.zeros_like, node.get_value()))
  out.eval()
  return out
