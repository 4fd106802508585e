"""Critics and reward models: a language model's body under a head of scores.

`AutoModel.from_pretrained(folder, num_scores=1)` loads one; `with_scores` makes one of
a model in memory, tied embeddings or not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models.transformer import sharding
from tunix.models.transformer.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib


def with_scores(
  model: Transformer, num_scores: int = 1, *, seed: int = 0
) -> Transformer:
  """A model whose call gives float32 scores [B, T, num_scores] instead of logits.

  It shares the weights of `model` besides the unembedding, and its adapters.

  Args:
    model: a language model; unchanged.
    num_scores: 1 for a critic or a reward model.
    seed: of the head, drawn like every other weight.

  Raises:
    ValueError: `num_scores` is below 1, or the model has such a head already.
  """
  if model.score is not None:
    raise ValueError(
      f"the model has a head of {model.config.num_scores} score(s) already"
    )
  out = nnx.clone(model)
  out.config = dataclasses.replace(model.config, num_scores=num_scores)
  c = out.config
  make = lambda: Linear(
    c.embed_dim,
    num_scores,
    spec=sharding.weight_spec("router", c.sharding, False),
    param_dtype=c.param_dtype,
    rngs=nnx.Rngs(seed),
  )
  # Of a model of shapes the head is one too: its devices may not be there.
  head = nnx.merge(*sharding.abstract(make)) if programs.are_noted() else make()
  mesh = mesh_lib.mesh_of(nnx.state(model))
  if mesh is not None:
    state = nnx.state(head)
    where = sharding.named_shardings(state, mesh)
    nnx.update(head, jax.tree.map(mesh_lib.put, state, where))
  out.lm_head, out.score = nnx.data(None), nnx.data(head)
  return out


def last_scores(
  scores: Float[Array, "B T n"], mask: Int[Array, "B T"] | Bool[Array, "B T"]
) -> Float[Array, "B n"]:
  """The scores at each row's last valid token: what a reward model says of the row.

  Rows without a valid token get the scores of their first position.
  """
  length = mask.shape[1]
  last = jnp.max(jnp.where(mask.astype(bool), jnp.arange(length), 0), axis=1)
  return jnp.take_along_axis(scores, last[:, None, None], axis=1)[:, 0]
