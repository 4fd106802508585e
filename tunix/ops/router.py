"""Losses and statistics of the routers of a mixture of experts.

With E experts, let f_e be the number of choices of expert e per token (their sum is k),
and p_e the mean of its softmax probability, both over the tokens of all layers. With
router logits z of one token:

- balance loss: E sum_e f_e p_e (Switch Transformer, Fedus et al. 2021,
  arXiv:2101.03961, equations 4 to 6). It is k if all experts are used equally. The
  gradient is that of p_e; f_e is a constant.
- z-loss: the mean of log(sum exp z)^2 (ST-MoE, Zoph et al. 2022, arXiv:2202.08906,
  equation 5). It keeps the logits small.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.ops.reductions import WeightedSum, safe_divide


class RouterSums(NamedTuple):
  """Sums over the tokens of some layers and calls.

  Attributes:
    choices: number of choices of each expert.
    probabilities: sum of each expert's probability.
    squares: sum of log(sum exp z)^2.
    entropy: sum of the entropies of the router's softmax, in nats.
    largest: sum over layers of (largest share of the choices that one expert has)
      times the layer's tokens.
    tokens: number of tokens; a token counts once in each layer.
    replaced: number of these whose experts were replayed, and are others than the
      router's choice.
  """

  choices: Float[Array, " E"]
  probabilities: Float[Array, " E"]
  squares: Float[Array, ""]
  entropy: Float[Array, ""]
  largest: Float[Array, ""]
  tokens: Float[Array, ""]
  replaced: Float[Array, ""]

  def plus(self, other: RouterSums) -> RouterSums:
    """Returns the sums over the tokens of both."""
    return jax.tree.map(jnp.add, self, other)

  def balance_loss(self) -> jax.Array:
    """Returns the load-balancing loss, see the module."""
    used = jax.lax.stop_gradient(safe_divide(self.choices, self.tokens))
    mean = safe_divide(self.probabilities, self.tokens)
    return self.choices.shape[0] * jnp.sum(used * mean)

  def z_loss(self) -> jax.Array:
    """Returns the z-loss, see the module."""
    return safe_divide(self.squares, self.tokens)

  def statistics(self) -> dict[str, WeightedSum]:
    """Returns means over the tokens of all layers.

    `entropy`: entropy of the router's softmax in nats, log E for uniform
    probabilities. `max_share`: largest share of a layer's choices that one expert has,
    between 1 / E and 1. `replaced`: share of the tokens whose experts were replayed,
    and are others than the router's choice.
    """
    stop = jax.lax.stop_gradient
    return {
      "entropy": WeightedSum(stop(self.entropy), self.tokens),
      "max_share": WeightedSum(self.largest, self.tokens),
      "replaced": WeightedSum(self.replaced, self.tokens),
    }


def empty(experts: int) -> RouterSums:
  """Returns the sums over no tokens."""
  vector, zero = jnp.zeros(experts, jnp.float32), jnp.zeros((), jnp.float32)
  return RouterSums(vector, vector, zero, zero, zero, zero, zero)


def sums(
  logits: Float[Array, "B T E"],
  chosen: Int[Array, "B T k"],
  weights: Float[Array, "B T"],
  replaced: Float[Array, "B T"] | None = None,
) -> RouterSums:
  """Returns the sums over the tokens of one layer.

  Args:
    logits: logits of the router, float32.
    chosen: numbers of the experts that each token uses.
    weights: 1 for tokens that count and 0 for padding.
    replaced: 1 for tokens whose experts are not the router's choice, else 0; None: 0.
  """
  experts = jnp.arange(logits.shape[-1])
  # A comparison for each expert, which XLA fuses into the sum.
  hits = jnp.sum(chosen[..., None] == experts, axis=-2, dtype=jnp.float32)
  choices = jnp.einsum("bte,bt->e", hits, weights)
  logps = jax.nn.log_softmax(logits, axis=-1)
  probabilities = jnp.exp(logps)
  entropy = -jnp.sum(probabilities * logps, axis=-1)
  squares = jax.nn.logsumexp(logits, axis=-1) ** 2
  tokens = jnp.sum(weights)
  share = safe_divide(jnp.max(choices), jnp.sum(choices))
  return RouterSums(
    choices=choices,
    probabilities=jnp.einsum("bte,bt->e", probabilities, weights),
    squares=jnp.sum(squares * weights),
    entropy=jnp.sum(entropy * weights),
    largest=share * tokens,
    tokens=tokens,
    replaced=jnp.zeros(()) if replaced is None else jnp.sum(replaced * weights),
  )
