"""Critics and reward models: language models with a score head.

`AutoModel.from_pretrained(folder, num_scores=1)` loads one. `with_scores` makes one
from a model in memory, with or without tied embeddings.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib


def with_scores(
  model: Transformer, num_scores: int = 1, *, seed: int = 0
) -> Transformer:
  """Returns a model whose call gives float32 scores [B, T, num_scores], not logits.

  It shares all weights of `model` except the unembedding, and its adapters.

  Args:
    model: a language model. It is unchanged.
    num_scores: scores per position; 1 for a critic or a reward model.
    seed: seed of the head, which is drawn like every other weight.

  Raises:
    ValueError: `num_scores` is below 1, or the model has a score head already.
  """
  if model.score is not None:
    raise ValueError(
      f"the model has a head of {model.config.num_scores} score(s) already"
    )
  out = nnx.clone(model)
  out.config = dataclasses.replace(model.config, num_scores=num_scores)
  c = out.config

  def make() -> Linear:
    rngs, invariant = nnx.Rngs(seed), c.batch_invariant
    layers = LayerMaker(c.sharding, c.param_dtype, rngs, invariant=invariant)
    return layers.linear(c.embed_dim, num_scores, "router")

  # If the model has shapes instead of arrays, the head gets shapes too, because its
  # devices may not exist on this machine.
  head = nnx.merge(*sharding.abstract(make)) if programs.is_recording() else make()
  mesh = mesh_lib.mesh_of(nnx.state(model))
  if mesh is not None:
    state = nnx.state(head)
    where = sharding.named_shardings(state, mesh)
    nnx.update(head, jax.tree.map(mesh_lib.put, state, where))
  out.lm_head, out.score = nnx.data(None), nnx.data(head)
  if out.token_rows is not None:
    out.token_rows.lora_output = nnx.data(None)
  return out


def last_scores(
  scores: Float[Array, "B T n"], mask: Int[Array, "B T"] | Bool[Array, "B T"]
) -> Float[Array, "B n"]:
  """Returns the scores at each row's last valid token: a reward model's output.

  A row without a valid token gets the scores of its first position.
  """
  length = mask.shape[1]
  last = jnp.max(jnp.where(mask.astype(bool), jnp.arange(length), 0), axis=1)
  return jnp.take_along_axis(scores, last[:, None, None], axis=1)[:, 0]
