"""The loss that a reward model learns preferences with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.ops.pair_losses import PairLoss
from tunix.ops.preference import accuracy


def bradley_terry(
  chosen: Float[Array, " B"],
  rejected: Float[Array, " B"],
  margin: Float[Array, " B"] | None = None,
  centering: float = 0.0,
) -> PairLoss:
  """-log s(chosen - rejected - margin) + centering (chosen + rejected)^2.

  The Bradley-Terry likelihood of a preference (arXiv:2203.02155, equation 1), with a
  margin that grows with how clear the preference is (Llama 2, arXiv:2307.09288,
  equation 2) and a term that draws the rewards, which the first leaves free up to a
  constant, to a mean of 0 (arXiv:2312.09244).

  Args:
    chosen, rejected: rewards of the responses, differentiated.
    margin: how far apart they should be, a constant; None: 0.
    centering: weight >= 0 of the last term; 0.01 is usual.

  Returns:
    Values and metrics [B]: rewards/chosen, rewards/rejected, rewards/margin (their
    difference), rewards/accuracy (1/2 on a tie).

  Raises:
    ValueError: centering < 0.
  """
  if centering < 0:
    raise ValueError(f"centering={centering} must be >= 0: it weighs a square")
  wide = jnp.promote_types(chosen.dtype, jnp.float32)
  chosen, rejected = chosen.astype(wide), rejected.astype(wide)
  gap = chosen - rejected
  wanted = 0.0 if margin is None else jax.lax.stop_gradient(margin)
  values = -jax.nn.log_sigmoid(gap - wanted)
  values += centering * jnp.square(chosen + rejected)
  metrics = {
    "rewards/chosen": chosen,
    "rewards/rejected": rejected,
    "rewards/margin": gap,
    "rewards/accuracy": accuracy(gap),
  }
  return PairLoss(values, jax.lax.stop_gradient(metrics))
