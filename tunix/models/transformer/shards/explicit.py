"""Calls of the decoder inside a mesh with Explicit axes, as `jax.make_mesh` makes.

Under Explicit axes an operation must state the sharding of its result if the sharding
does not follow from its arguments. The operations of the decoder state none. Under Auto
axes XLA chooses the shardings, guided by those of the weights and a few constraints. A
call under Explicit axes therefore runs with the same axes switched to Auto, and only
its result gets an explicit sharding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib, tree

Method = Callable[..., Any]


class Configured(Protocol):
  """A module with the configuration of a decoder."""

  config: TransformerConfig


def auto_inside(specs: Callable[..., Any]) -> Callable[[Method], Method]:
  """Lets a module's method be called, jitted and differentiated under Explicit axes.

  Args:
    specs: called with the module and the method's arguments by name; returns the
      PartitionSpecs of the method's result.
  """

  def decorate(method: Method) -> Method:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: nnx.Module, *args: object, **kwargs: object) -> Any:
      mesh = jax.sharding.get_abstract_mesh()
      if mesh.empty or not mesh_lib.is_explicit(mesh):
        return method(self, *args, **kwargs)
      return _run(method, specs, self, signature.bind(self, *args, **kwargs))

    return call

  return decorate


def _run(
  method: Method,
  specs: Callable[..., Any],
  module: nnx.Module,
  bound: inspect.BoundArguments,
) -> Any:
  graph, params, rest = nnx.split(module, nnx.Param, ...)
  leaves, form = jax.tree.flatten((bound.args[1:], bound.kwargs))
  # Leaves without a shape are options (numbers, strings, booleans). They must stay
  # Python values, so only the arrays are arguments of the traced call.
  places = [i for i, leaf in enumerate(leaves) if tree.is_array(leaf)]

  def inside(params, rest, arrays):
    inputs = list(leaves)
    for place, array in zip(places, arrays):
      inputs[place] = array
    args, kwargs = form.unflatten(inputs)
    inner = nnx.merge(graph, params, rest)
    result = method(inner, *args, **kwargs)
    # State other than parameters changes during a call and is returned too: dropout
    # counts the rows of its calls.
    return result, nnx.split(inner, nnx.Param, ...)[2]

  out = specs(module, **{k: v for k, v in bound.arguments.items() if k != "self"})
  auto_axes: Any = jax.sharding.auto_axes  # its type allows only the use as a decorator
  call = auto_axes(inside, out_sharding=(out, PartitionSpec()))
  result, rest = call(params, rest, [leaves[place] for place in places])
  nnx.update(module, rest)
  return result


def row_spec(model: Configured, *shape: int, last: str | None = None) -> PartitionSpec:
  """Returns the spec of an array [B, T, ...] that is split as activations are.

  Args:
    model: the decoder, whose sharding rules apply.
    shape: shape of the array; axes that do not divide it are dropped.
    last: mesh axis of the last dimension.
  """
  mesh, rules = jax.sharding.get_abstract_mesh(), model.config.sharding
  return mesh_lib.fit_spec((sharding.batch_axes(rules), rules.cp, last), shape, mesh)


def hidden_spec(model: Configured, tokens: jax.Array) -> PartitionSpec:
  """Returns the spec of hidden states [B, T, D] for tokens [B, T]."""
  return row_spec(model, *tokens.shape[:2], model.config.embed_dim)


def logits_spec(model: Configured, hidden: jax.Array) -> PartitionSpec:
  """Returns the spec of logits [B, T, V], or of scores [B, T, n].

  The vocabulary is split like the unembedding's, over tp.
  """
  c = model.config
  if c.num_scores is not None:
    return row_spec(model, *hidden.shape[:2], c.num_scores)
  return row_spec(model, *hidden.shape[:2], c.vocab_size, last=c.sharding.tp)


def call_specs(model: Configured, input_tokens: jax.Array, **arguments: Any) -> Any:
  """Returns the specs of the result of a decoder's `__call__`: (output, cache)."""
  # `inspect.signature` binds the keyword arguments of `**options` under that name.
  arguments |= arguments.pop("options", {})
  output_spec = hidden_spec if arguments.get("return_hidden") else logits_spec
  cache = arguments.get("cache")
  if cache is None:
    return output_spec(model, input_tokens), None
  mesh, rules = jax.sharding.get_abstract_mesh(), model.config.sharding
  # Buffers of the cache are [B, K, S, H]; its index is a scalar, which is replicated.
  entries = (sharding.batch_axes(rules), rules.tp, None, None)
  split = mesh_lib.fit_spec(entries, cache.k[0].shape, mesh)
  specs = jax.tree.map(lambda x: split if x.ndim else PartitionSpec(), cache)
  return output_spec(model, input_tokens), specs
