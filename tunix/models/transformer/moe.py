"""Mixture of experts: a router and E gated MLPs of which each token uses k.

(Shazeer et al. 2017, arXiv:1701.06538; softmax before top-k as in Qwen 3.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.transformer import sharding
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.layers import GatedMLP, Linear


def active_share(model: nnx.Module) -> float:
  """The share of its experts that a token meets, k / E; 1 without experts."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, MoE):
      return node.experts_per_token / node.router.kernel.shape[-1]
  return 1.0


class MoE(nnx.Module):
  """sum over the token's k experts of weight * expert(x).

  Attributes:
    router: [D, E]; its softmax in float32 gives the weights.
    experts: a gated MLP whose kernels carry the axis of the experts, [E, in, out].
  """

  def __init__(
    self,
    router: Linear,
    experts: GatedMLP,
    *,
    experts_per_token: int,
    normalise: bool,
    implementation: Literal["ragged", "dense"],
    rules: ShardingRules,
  ):
    self.router = router
    self.experts = experts
    self.experts_per_token = experts_per_token
    self.normalise = normalise
    self.implementation = implementation
    self.rules = rules

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    tokens = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
      weights, chosen = self.route(tokens)
    run = self._dense if self.implementation == "dense" else self._ragged
    with jax.named_scope("experts"):
      return run(tokens, weights, chosen).reshape(x.shape)

  def route(
    self, tokens: Float[Array, "M D"]
  ) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """(weights, numbers) of each token's experts, the most likely first."""
    probabilities = jax.nn.softmax(self.router(tokens).astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, self.experts_per_token)
    if self.normalise:
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights.astype(tokens.dtype), chosen

  def _dense(self, tokens, weights, chosen):
    """Every expert on every token; most of it is weighted with zero."""
    count = self.router.kernel.shape[-1]
    rows = jnp.arange(tokens.shape[0])[:, None]
    table = jnp.zeros((tokens.shape[0], count), weights.dtype)
    table = table.at[rows, chosen].set(weights)
    every = jnp.broadcast_to(tokens, (count, *tokens.shape))
    return jnp.einsum("emd,me->md", self._experts(every, Linear.per_expert), table)

  def _ragged(self, tokens, weights, chosen):
    """Rows sorted by expert, so that each expert's are one block of a product."""
    k = self.experts_per_token
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=self.router.kernel.shape[-1]).astype(jnp.int32)

    def product(linear: Linear, rows: jax.Array) -> jax.Array:
      return linear.grouped(rows, sizes)

    out = self._experts(tokens[order // k], product)
    back = jnp.argsort(order)  # by a gather: adding rows up by a scatter has no order
    # As they come out of the product; each token's row follows the batch after the sum.
    out = sharding.pin_lookup(out[back].reshape(*chosen.shape, -1), self.rules)
    return jnp.einsum("mkd,mk->md", out, weights)

  def _experts(
    self, x: jax.Array, product: Callable[[Linear, jax.Array], jax.Array]
  ) -> jax.Array:
    mlp = self.experts
    hidden = mlp.activation(product(mlp.gate_proj, x)) * product(mlp.up_proj, x)
    return product(mlp.down_proj, hidden)
