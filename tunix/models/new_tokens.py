"""Rows of an embedding for tokens that were added to the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models.transformer.dense.layers import param
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.token_rows import written
from tunix.utils import mesh as mesh_lib


def with_rows(model: Transformer, ids: Iterable[int]) -> Transformer:
  """Returns a model with fresh embeddings of new tokens.

  Each one is the mean of the rows before the first new id, so that a new token has the
  probability of an average one (Hewitt 2021, "Initializing New Word Embeddings for
  Pretrained Language Models"). Rows that the embedding has already are used. Otherwise
  the embedding and an untied unembedding grow to the last new id. All other weights are
  shared.

  Args:
    model: the model. It is unchanged.
    ids: ids of the new tokens; none returns the model itself.

  Raises:
    ValueError: an id is 0 or less. Or the model has vectors of the tokens for each
      layer, which new tokens would lack.
  """
  new = sorted(ids)
  if not new:
    return model
  if new[0] < 1:
    raise ValueError(f"a new token has the id {new[0]}; expected an id above 0")
  c = model.config
  if model.layer_inputs is not None:
    raise ValueError(
      "this model has vectors of the tokens for each layer (layer_input_dim is "
      f"{c.layer_input_dim}), which new tokens lack. Use tokens of its vocabulary"
    )
  out = nnx.clone(model)
  out.config = dataclasses.replace(c, vocab_size=max(c.vocab_size, new[-1] + 1))
  size = out.config.vocab_size

  def extended(table):
    mean = jnp.mean(table[: new[0]].astype(jnp.float32), axis=0)
    room = jnp.zeros((size - table.shape[0], table.shape[1]), table.dtype)
    rows = jnp.broadcast_to(mean, (len(new), mean.shape[0]))
    return written(jnp.concatenate([table, room]), new, rows)

  change_embedding(out, extended)
  change_unembedding(out, extended)
  return sharding.on_users_mesh(out)


def change_embedding(
  model: Transformer, change: Callable[..., jax.Array], *arrays: jax.Array
) -> None:
  """Replaces the embedding by change(embedding [V, D], *arrays), in place."""
  table = model.embed_tokens.embedding
  spec = table.get_metadata("out_sharding")
  value = built(change, spec, table.get_value(), *arrays)
  model.embed_tokens.embedding = param(value, spec)


def change_unembedding(
  model: Transformer, change: Callable[..., jax.Array], *arrays: jax.Array
) -> None:
  """Replaces an untied unembedding by change(table [V, D], *arrays), in place."""
  if model.lm_head is None:
    return
  kernel: Any = model.lm_head.kernel  # only kernels of layers are quantized
  spec = kernel.get_metadata("out_sharding")
  value = built(lambda x, *a: change(x.T, *a).T, spec, kernel.get_value(), *arrays)
  model.lm_head.kernel = nnx.data(param(value, spec))


def built(build: Callable[..., jax.Array], spec: Any, *arrays: jax.Array) -> jax.Array:
  """Returns build(*arrays) with a PartitionSpec on the mesh of the arrays."""
  mesh = mesh_lib.mesh_of(arrays)
  if mesh is None:
    return jax.jit(build)(*arrays)
  # Explicit axes would ask for the sharding of each indexing.
  inputs = mesh_lib.onto(arrays, mesh)
  with mesh_lib.use_mesh(mesh):
    shape = jax.eval_shape(build, *inputs).shape
    where = mesh_lib.sharding_of_spec(spec, shape, mesh)
    return jax.jit(build, out_shardings=where)(*inputs)
