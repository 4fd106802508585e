"""Models that share their weights: an adapted one and what lies below its adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models import lora_modules, whole_modules
from tunix.models.transformer.model import Transformer
from tunix.utils import tree


def share_backbone(adapted: nnx.Module, reference: nnx.Module) -> bool:
  """Whether all parameters of `adapted` but its adapters are, array for array, those of
  `reference`: the same memory, not the same numbers."""
  ours, theirs = _frozen(adapted), _frozen(reference)
  return ours.keys() == theirs.keys() and all(
    same_memory(x, theirs[path]) for path, x in ours.items()
  )


def share_variables(variables: Iterable[nnx.Variable], model: nnx.Module) -> bool:
  """Whether a module holds one of the Variables: it then changes as they do, whatever
  object stands around it. Other Variables of the same arrays are not the same."""
  held = {
    id(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)
  }
  return any(id(variable) in held for variable in variables)


def _frozen(model: nnx.Module) -> dict[str, jax.Array]:
  return tree.flatten(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))


def same_memory(a: jax.Array, b: jax.Array) -> bool:
  """Whether two arrays are one, whatever the objects that stand for it."""
  if a is b:
    return True
  places = [
    {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
    for x in (a, b)
  ]
  alike = a.shape == b.shape and a.dtype == b.dtype
  return alike and bool(places[0]) and places[0] == places[1]


def reference_of(model: Any) -> Any:
  """The model below a model's adapters, as a module of its own that shares its arrays.

  It costs no memory, in eval mode, and stays what it is while that one trains: frozen
  arrays are never donated. Adapters that this package did not attach (qwix's, on any
  module) are replaced by zeros, which adds their size.

  Args:
    model: an adapted model; unchanged.

  Raises:
    ValueError: it has no adapters, so that training would change the reference too; or
      modules that are trained whole, below which nothing is kept.
  """
  if not nnx.state(model, nnx.LoRAParam):
    raise ValueError(
      "the model has no adapters, all of its weights are trained: pass a reference "
      "model of its own, or adapt the model (lora.apply)"
    )
  if isinstance(model, Transformer) and (whole := whole_modules.of(model)):
    raise ValueError(
      f"{', '.join(whole)} is trained whole (modules_to_save), so that the model below "
      "the adapters is not in this one: pass a reference model of its own"
    )
  out = nnx.clone(model)
  if isinstance(out, Transformer):
    for linear in lora_modules.adapted(out).values():
      lora_modules.detach(linear)
  for _, node in nnx.iter_graph(out):
    if isinstance(node, nnx.LoRAParam):
      node.set_value(jax.tree.map(jnp.zeros_like, node.get_value()))
  out.eval()
  return out
