"""What layers of a type put out, kept while the model runs.

`capture` is what the strategies use: it works inside a traced step, on stacked layers
too, and leaves the model as it was. The other functions are its parts, for models whose
layers are modules of their own.

nnx's own `sow` is deprecated outside of `nnx.capture`, which functions of a user's
cannot be wrapped with one by one: a `SowedModule` keeps its outputs itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models.transformer import dropout
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.models.transformer.model import Transformer

_TAG = "intermediate_output"


class SowedOutput(nnx.Intermediate):
  """The outputs of one module, one a call."""


class SowedModule(nnx.Module):
  """A module that keeps what it puts out; of a tuple the first entry.

  Attributes:
    wrapped_model: the module itself.
  """

  def __init__(self, model_to_wrap: nnx.Module):
    self.wrapped_model = model_to_wrap

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    out = self.wrapped_model(*args, **kwargs)
    kept = out[0] if isinstance(out, tuple) else out
    before = getattr(self, _TAG, None)
    before = () if before is None else before.get_value()
    setattr(self, _TAG, SowedOutput((*before, kept)))
    return out


def wrap_model_with_sowed_modules(
  model: nnx.Module, modules_to_capture: Sequence[type[nnx.Module]]
) -> None:
  """Wraps every module of these types inside `model`, in place.

  Raises:
    ValueError: the model itself is of such a type, has none of them, or runs them where
      outputs cannot be kept (stacked or rematerialised layers).
  """
  types = tuple(modules_to_capture)
  names = ", ".join(kind.__name__ for kind in types)
  if isinstance(model, types):
    raise ValueError(
      f"the model itself is a {type(model).__name__}: capture layers inside it, or put "
      "it into a module"
    )
  paths = [path for path, m in nnx.iter_modules(model) if isinstance(m, types)]
  if not paths:
    raise ValueError(f"{type(model).__name__} has no layer of type {names}")
  _check_runs_alone(model)
  for path in sorted(paths, key=len, reverse=True):  # inner ones first
    _replace(model, path, SowedModule)


def unwrap_sowed_modules(model: nnx.Module) -> None:
  """Puts the wrapped modules back, in place."""
  paths = [path for path, m in nnx.iter_modules(model) if isinstance(m, SowedModule)]
  for path in sorted(paths, key=len, reverse=True):
    _replace(model, path, lambda sowed: sowed.wrapped_model)


def pop_sowed_intermediate_outputs(model: nnx.Module) -> nnx.State:
  """Takes out what the wrapped modules have kept: tuples, one entry a call, under the
  modules' paths."""
  return nnx.pop(model, SowedOutput)


def stacked_outputs(model: nnx.Module) -> jax.Array:
  """What the wrapped modules have kept, taken out, as [B, L, ...]: the batch first, as
  in every array that travels; L counts layers in the order of the model.

  Raises:
    ValueError: nothing was kept, or layers put out arrays of different shapes.
  """
  # Numbers of layers are sorted as numbers: nnx keeps them so.
  kept = jax.tree.leaves(pop_sowed_intermediate_outputs(model))
  if not kept:
    raise ValueError(
      f"the layers of {type(model).__name__} kept no outputs: they were not called, or "
      "inside jax.checkpoint, nnx.remat or a scan, where copies of them run"
    )
  shapes = {x.shape for x in kept}
  if len(shapes) > 1:
    raise ValueError(
      f"layers of one type put out arrays of shapes {sorted(shapes)}, which cannot be "
      "stacked: capture a type whose outputs are alike"
    )
  return jnp.stack(kept, axis=1)


def capture(
  model: nnx.Module,
  layer: type[nnx.Module],
  forward: Callable[[Any], Any],
) -> tuple[Any, jax.Array]:
  """`forward(model)` and what the layers of a type put out on the way, [B, L, ...].

  Our decoder, whose layers are stacked, runs as a copy with one module a layer,
  unrolled and without rematerialisation: call it inside `jax.jit`, where the copy is a
  view of the weights. What is captured is kept in memory for the backward pass.

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
  if run is not model and isinstance(model, Transformer):
    dropout.advance(model.layers, features.shape[0])
  return out, features


def _unrolled(model: nnx.Module) -> Any:
  if not isinstance(model, Transformer):
    return model
  stacked = isinstance(model.layers, DecoderLayer)
  out = model.unstack() if stacked else nnx.clone(model)
  out.config = dataclasses.replace(model.config, remat="none")
  return out


def _check_runs_alone(model: Any) -> None:
  if not isinstance(model, Transformer):
    return
  stacked = isinstance(model.layers, DecoderLayer)
  if stacked or model.config.remat != "none":
    why = "stacked, one module for all" if stacked else "rematerialised as copies"
    raise ValueError(
      f"the layers of this {type(model).__name__} are {why}, so that a wrapper inside "
      "cannot keep their outputs: use sowed_module.capture (as the feature and "
      "attention strategies do), or wrap model.unstack() with config.remat 'none'"
    )


def _replace(model: Any, path: tuple[Any, ...], make: Callable[[Any], Any]) -> None:
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
