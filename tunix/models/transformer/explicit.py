"""Our decoder inside a mesh with Explicit axes, as `jax.make_mesh` makes them.

There every operation has to say how its result is laid out where that does not follow
from its arguments, which the decoder's do not: XLA lays them out (Auto axes), guided by
the weights' layouts and a few pins. So a call under Explicit axes runs under the same
axes as Auto ones, and what it returns is laid out as stated here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from tunix.models.transformer import sharding
from tunix.utils import mesh as mesh_lib

Method = Callable[..., Any]


def auto_inside(layout: Callable[..., Any]) -> Callable[[Method], Method]:
  """Lets a module's method be called, jitted and differentiated under Explicit axes.

  Args:
    layout: (module, *the method's arguments by name) -> PartitionSpecs of its result.
  """

  def decorate(method: Method) -> Method:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
      mesh = jax.sharding.get_abstract_mesh()
      if mesh.empty or not mesh_lib.is_explicit(mesh):
        return method(self, *args, **kwargs)
      return _run(method, layout, self, signature.bind(self, *args, **kwargs))

    return call

  return decorate


def _run(
  method: Method,
  layout: Callable[..., Any],
  module: nnx.Module,
  bound: inspect.BoundArguments,
) -> Any:
  graph, params, rest = nnx.split(module, nnx.Param, ...)
  leaves, form = jax.tree.flatten((bound.args[1:], bound.kwargs))
  # What is no array is an option, and stays outside of the traced call.
  places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

  def inside(params, rest, arrays):
    given = list(leaves)
    for place, array in zip(places, arrays):
      given[place] = array
    args, kwargs = form.unflatten(given)
    inner = nnx.merge(graph, params, rest)
    result = method(inner, *args, **kwargs)
    return result, nnx.split(inner, nnx.Param, ...)[2]  # dropout counts its calls

  where = layout(module, **{k: v for k, v in bound.arguments.items() if k != "self"})
  auto_axes: Any = jax.sharding.auto_axes  # typed as a decorator alone
  call = auto_axes(inside, out_sharding=(where, PartitionSpec()))
  result, rest = call(params, rest, [leaves[place] for place in places])
  nnx.update(module, rest)
  return result


def rows(model: Any, *shape: int, last: str | None = None) -> PartitionSpec:
  """An array [B, T, ...] of that shape, split as activations are, and `last` along its
  end."""
  mesh, rules = jax.sharding.get_abstract_mesh(), model.config.sharding
  return mesh_lib.fit_spec((sharding.batch_axes(rules), rules.cp, last), shape, mesh)


def of_hidden(model: Any, tokens: Any) -> PartitionSpec:
  """Of [B, T, D] for tokens [B, T]."""
  return rows(model, *tokens.shape[:2], model.config.embed_dim)


def of_logits(model: Any, hidden: Any) -> PartitionSpec:
  """Of [B, T, V], or of scores [B, T, n]: the vocabulary is split as its matrix is."""
  c = model.config
  if c.num_scores is not None:
    return rows(model, *hidden.shape[:2], c.num_scores)
  return rows(model, *hidden.shape[:2], c.vocab_size, last=c.sharding.tp)


def of_call(model: Any, input_tokens: Any, **arguments: Any) -> Any:
  """Of what a decoder's `__call__` returns."""
  arguments |= arguments.pop("options", {})
  wanted = of_hidden if arguments.get("return_hidden") else of_logits
  cache = arguments.get("cache")
  if cache is None:
    return wanted(model, input_tokens), None
  mesh, rules = jax.sharding.get_abstract_mesh(), model.config.sharding
  entries = (sharding.batch_axes(rules), rules.tp, None, None)
  split = mesh_lib.fit_spec(entries, cache.k[0].shape, mesh)
  specs = jax.tree.map(lambda x: split if x.ndim else PartitionSpec(), cache)
  return wanted(model, input_tokens), specs
