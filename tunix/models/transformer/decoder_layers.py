"""The layers of a decoder, and the ways to run them.

The weights of all layers are stacked ([L, ...]), in one stack for each structure (see
structures.py). The layers run in `lax.scan` or unrolled, and always unrolled with a
cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.models.transformer import structures
from tunix.models.transformer.attention import kv_sharing
from tunix.models.transformer.config import (
  LAYER_INPUT,
  REMAT_POLICIES,
  TransformerConfig,
)
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.models.transformer.dense import qwix_seam
from tunix.utils import mesh as mesh_lib


class DecoderLayers(nnx.Module):
  """The layers of a decoder.

  Attributes:
    config: shape and options.
    layers: one module of stacked weights, or a dictionary of them by structure (see
      `TransformerConfig.structures`), or a list with one module per layer.
  """

  config: TransformerConfig
  layers: DecoderLayer | nnx.Dict | Sequence[DecoderLayer]

  def run(self, x, angles, visible, routes, vectors, deepstack=None) -> jax.Array:
    """Runs all layers without a cache, and finishes the routes.

    Args:
      x: the residual stream.
      angles, visible: see `DecoderLayer`.
      routes: the routes of the call, or None.
      vectors: [L, B, T, P], see layer_inputs.py, or None.
      deepstack: see `Transformer.__call__`.
    """
    kinds = self.config.layer_kinds
    sources = kv_sharing.empty_sources(self.config, x)
    qwix_adds = qwix_seam.is_initialising(self)
    if qwix_adds and self.is_stacked:
      return self._initialise_qwix(x, angles, visible, vectors, sources)

    offloads = self.config.remat == "offload"
    if offloads:
      _check_offload()

    def one(layer, kind, own_inputs, stream):
      (vector, number), (x, carried, sources) = own_inputs, stream
      own = None if routes is None else routes.layer(carried)
      name = self.config.kind_name(kind)
      source = kv_sharing.source_of(sources, name)
      x, written = layer(
        x, angles, visible, None, kind, own, vector=vector, source=source
      )
      sources = kv_sharing.after(sources, name, written)
      return _deepened(x, deepstack, number), own and own.carried(), sources

    def call(graph, kind, state, stream):
      stream = checkpoint_name(stream, LAYER_INPUT) if offloads else stream
      state, own_inputs = state
      return one(nnx.merge(graph, state), kind, own_inputs, stream)

    # A scanned layer's kind is traced if one stack has several kinds; the graph, and
    # other layers' kinds, are static.
    is_scanned = self.is_stacked and self.config.scanned
    traced = is_scanned and isinstance(self.layers, DecoderLayer)
    if self.config.remat != "none":
      policy = REMAT_POLICIES[self.config.remat]
      static = (0,) if traced else (0, 1)
      call = jax.checkpoint(call, policy=policy, static_argnums=static)
    stream = x, routes and routes.start, sources
    numbers = None if deepstack is None else np.arange(self.config.num_layers)
    inputs = vectors, numbers
    if is_scanned:
      with jax.named_scope("layers"):
        stream = self._scan(call, stream, inputs)
    else:
      calls_module = qwix_adds or self.config.remat == "none"
      for i, layer in enumerate(self._layer_list()):
        own_inputs = jax.tree.map(lambda each, i=i: each[i], inputs)
        with jax.named_scope(f"layer_{i}"):
          if calls_module:  # qwix adds its parameters to this module, not to a copy
            stream = one(layer, kinds[i], own_inputs, stream)
          else:
            graph, state = nnx.split(layer)
            stream = call(graph, kinds[i], (state, own_inputs), stream)
    x, carried, _ = stream
    if routes is not None:
      routes.finish(carried)
    return x

  def _initialise_qwix(self, x, angles, visible, vectors, sources):
    """Runs all stacked layers, of which only the shapes matter."""
    c = self.config
    for name, stack in self._stacks().items():
      numbers = c.stacks[name]
      kind = c.layer_kinds[numbers[0]]
      source = kv_sharing.source_of(sources, c.kind_name(kind))
      vector = None if vectors is None else vectors[numbers[0]]

      def first(layer, x, kind=kind, source=source, vector=vector):
        return layer(x, angles, visible, kind=kind, vector=vector, source=source)[0]

      x = qwix_seam.run_apart(stack, len(numbers), first, x)
    return x

  def _scan(self, call, stream, inputs):
    """Runs stacked layers in `lax.scan`.

    Args:
      call: runs one layer, (graph, kind, (state, own inputs), stream) -> stream.
      stream: the input of the first layer.
      inputs: arrays [L, ...] of the layers' own inputs.
    """
    names, kinds = self.config.structures, self.config.layer_kinds
    split = {name: nnx.split(stack) for name, stack in self._stacks().items()}
    if isinstance(self.layers, DecoderLayer):
      ((graph, state),) = split.values()
      kinds = jnp.asarray(kinds, jnp.int32) if any(kinds) else None
      stream, _ = jax.lax.scan(
        lambda x, xs: (call(graph, 0 if xs[0] is None else xs[0], xs[1], x), None),
        stream,
        (kinds, (state, jax.tree.map(jnp.asarray, inputs))),
      )
      return stream

    def one(name, kind, state, x):
      return call(split[name][0], kind, state, x)

    stacks = self.config.stacks

    def of(name):
      at = jnp.asarray(stacks[name])
      return jax.tree.map(lambda each: jnp.asarray(each)[at], inputs)

    states = {name: (state, of(name)) for name, (_, state) in split.items()}
    return structures.scan(one, stream, states, names, kinds)

  @property
  def is_stacked(self) -> bool:
    """True if layers of one structure are one module; False after `unstack`."""
    return isinstance(self.layers, DecoderLayer | nnx.Dict)

  def _stacks(self) -> Mapping[str, DecoderLayer]:
    """Returns the stacks by structure; the model must be stacked."""
    layers: Any = self.layers
    # Not `layers.items()`: qwix adds attributes of its own to the dictionary.
    stacks = self.config.stacks
    return {name: layers[name] if name else layers for name in stacks}

  def layer_modules(self) -> list[DecoderLayer]:
    """Returns the module that each layer belongs to: its own one, or its stack."""
    if not self.is_stacked:
      return list(cast(Any, self.layers))
    stacks = self._stacks()
    return [stacks[name] for name in self.config.structures]

  def run_cached(self, x, angles, visible, cache, routes, vectors, deepstack=None):
    """Runs all layers unrolled; each one writes its buffers of the cache."""
    carried = None if routes is None else routes.start
    written, visible = [], dataclasses.replace(visible, slots=cache.size)
    sources: dict[str, Any] = {}
    for i, layer in enumerate(self._layer_list()):
      with jax.named_scope(f"layer_{i}"):
        kind, name = self.config.layer_kinds[i], self.config.kind_names[i]
        own = None if routes is None else routes.layer(carried)
        x, one = layer(
          x,
          angles,
          visible,
          cache.layer(i),
          kind,
          own,
          vector=None if vectors is None else vectors[i],
          source=kv_sharing.source_of(sources, name),
        )
        x = _deepened(x, deepstack, i)
        if not name[1]:
          sources[name[0]] = one
        carried = None if own is None else own.carried()
        written.append(one)
    if routes is not None:
      routes.finish(carried)
    return x, cache.replaced(written, x.shape[1])

  def _layer_list(self) -> list[DecoderLayer]:
    """Returns one module per layer, with slices of the stack."""
    if not self.is_stacked:
      return self.layer_modules()
    names = self.config.structures
    split = {name: nnx.split(stack) for name, stack in self._stacks().items()}
    states = {name: state for name, (_, state) in split.items()}
    each = zip(names, structures.in_order(states, names))
    return [nnx.merge(split[name][0], state) for name, state in each]


def _deepened(x: jax.Array, deepstack: jax.Array | None, number: Any) -> jax.Array:
  """Adds the vectors of layer `number`, an integer or a traced one, if it has some."""
  if deepstack is None:
    return x
  if not isinstance(number, jax.Array):
    return x + deepstack[number].astype(x.dtype) if number < len(deepstack) else x
  own = deepstack[jnp.minimum(number, len(deepstack) - 1)].astype(x.dtype)
  return x + jnp.where(number < len(deepstack), own, 0)


def _check_offload() -> None:
  """Refuses a backend that cannot keep arrays in pinned host memory.

  A platform that this process does not run on (a topology of a plan) is not checked:
  its compiler raises an error itself.
  """
  platform = mesh_lib.context_platform()
  if platform != jax.default_backend():
    return
  kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
  if "pinned_host" not in kinds:
    raise ValueError(
      f"remat is 'offload', which needs pinned host memory, and the {platform} devices "
      f"have only {', '.join(sorted(kinds))}: use remat 'block'"
    )
