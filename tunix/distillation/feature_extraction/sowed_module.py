"""Captures the outputs of all layers of a type while the model runs.

The strategies call `capture`. It works inside a traced step, also on stacked layers,
and does not change the model. The other functions are its parts, for models whose
layers are separate modules.

A `SowedModule` stores its outputs itself. nnx's `sow` is deprecated outside of
`nnx.capture`, which cannot wrap a user's forward function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models.transformer.dense import dropout
from tunix.models.transformer.model import Transformer
from tunix.utils import checks

_TAG = "intermediate_output"


class SowedOutput(nnx.Intermediate):
  """The outputs of one module, one per call."""


class SowedModule(nnx.Module):
  """A module that stores its outputs; of a tuple it stores the first entry.

  Attributes:
    wrapped_model: the wrapped module.
  """

  def __init__(self, model_to_wrap: nnx.Module):
    self.wrapped_model = model_to_wrap

  def __call__(self, *args: object, **kwargs: object) -> Any:
    out = self.wrapped_model(*args, **kwargs)
    stored = out[0] if isinstance(out, tuple) else out
    earlier = getattr(self, _TAG, None)
    earlier = () if earlier is None else earlier.get_value()
    setattr(self, _TAG, SowedOutput((*earlier, stored)))
    return out


def wrap_model_with_sowed_modules(
  model: nnx.Module, modules_to_capture: Sequence[type[nnx.Module]]
) -> None:
  """Wraps every module of the given types inside `model`, in place.

  Raises:
    ValueError: the model itself has one of the types, has no module of them, or its
      layers are stacked or rematerialized, so that outputs cannot be stored.
  """
  types = tuple(modules_to_capture)
  names = ", ".join(kind.__name__ for kind in types)
  if isinstance(model, types):
    raise ValueError(
      f"the model itself is {checks.type_of(model)}: capture layers inside it, or "
      "wrap it in a module"
    )
  paths = [path for path, m in nnx.iter_modules(model) if isinstance(m, types)]
  if not paths:
    raise ValueError(
      f"{type(model).__name__} has no layer of type {names}: give a type of its layers"
    )
  _check_runs_alone(model)
  for path in sorted(paths, key=len, reverse=True):  # inner ones first
    _replace(model, path, SowedModule)


def unwrap_sowed_modules(model: nnx.Module) -> None:
  """Puts the wrapped modules back, in place."""
  paths = [path for path, m in nnx.iter_modules(model) if isinstance(m, SowedModule)]
  for path in sorted(paths, key=len, reverse=True):
    _replace(model, path, lambda sowed: sowed.wrapped_model)


def pop_sowed_intermediate_outputs(model: nnx.Module) -> nnx.State:
  """Removes and returns the stored outputs: a tuple of one entry per call for each
  module path."""
  return nnx.pop(model, SowedOutput)


def stacked_outputs(model: nnx.Module) -> jax.Array:
  """Removes the stored outputs and returns them as one array, [B, L, ...].

  L counts the layers in the order of the model.

  Raises:
    ValueError: no output was stored, or the outputs have different shapes.
  """
  # nnx sorts layer numbers as numbers, so layer 10 follows layer 9.
  stored = jax.tree.leaves(pop_sowed_intermediate_outputs(model))
  if not stored:
    raise ValueError(
      f"the layers of {type(model).__name__} stored no outputs: they were not called, "
      "or copies of them ran inside jax.checkpoint, nnx.remat or a scan"
    )
  shapes = {x.shape for x in stored}
  if len(shapes) > 1:
    raise ValueError(
      f"the outputs of the layers have shapes {sorted(shapes)}, which cannot be "
      "stacked: capture a type whose outputs have one shape"
    )
  return jnp.stack(stored, axis=1)


def capture(
  model: nnx.Module,
  layer: type[nnx.Module],
  forward: Callable[[Any], Any],
) -> tuple[Any, jax.Array]:
  """Returns `forward(model)` and the outputs of all layers of a type, [B, L, ...].

  Our decoder has stacked layers. It runs as a copy with one module per layer, unrolled
  and without rematerialization. Call it inside `jax.jit`, where the copy needs no
  memory for weights. The outputs stay in memory for the backward pass.

  Raises:
    ValueError: see `wrap_model_with_sowed_modules` and `stacked_outputs`.
  """
  run = _unrolled(model)
  wrap_model_with_sowed_modules(run, [layer])
  try:
    out = forward(run)
    features = stacked_outputs(run)
  finally:
    unwrap_sowed_modules(run)
  # Dropout masks follow from counters of rows. The copy advanced its own counters; the
  # model's must advance too, or the next step would drop the same units.
  if run is not model and isinstance(model, Transformer):
    dropout.advance(model.layers, features.shape[0])
  return out, features


def _unrolled(model: nnx.Module) -> Any:
  if not isinstance(model, Transformer):
    return model
  out = model.unstack() if model.is_stacked else nnx.clone(model)
  out.config = dataclasses.replace(model.config, remat="none")
  return out


def _check_runs_alone(model: nnx.Module) -> None:
  if not isinstance(model, Transformer):
    return
  stacked = model.is_stacked
  if stacked or model.config.remat != "none":
    why = "stacked, one module for all" if stacked else "rematerialized as copies"
    raise ValueError(
      f"the layers of this {type(model).__name__} are {why}, so a wrapped layer cannot "
      "store its outputs: use sowed_module.capture (as the feature and attention "
      "strategies do), or wrap model.unstack() with config.remat 'none'"
    )


def _replace(
  model: nnx.Module, path: tuple[Any, ...], make: Callable[[Any], Any]
) -> None:
  parent = model
  for key in path[:-1]:
    parent = _child(parent, key)
  new = make(_child(parent, path[-1]))
  if isinstance(parent, list | dict | nnx.List | nnx.Dict):
    parent[path[-1]] = new
  else:
    setattr(parent, path[-1], new)


def _child(parent: Any, key: Any) -> Any:
  has_items = isinstance(parent, list | tuple | dict | nnx.List | nnx.Dict)
  return parent[key] if has_items else getattr(parent, key)
