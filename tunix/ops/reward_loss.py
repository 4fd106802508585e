"""The loss of a reward model on preference pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.ops.pair_losses import PairLoss
from tunix.ops.preference import accuracy
from tunix.utils.metric import Metric

METRICS = (
  Metric("rewards/chosen", "of the score", "score of the chosen completion"),
  Metric("rewards/rejected", "of the score", "score of the rejected completion"),
  Metric("rewards/margin", "of the score", "rewards/chosen - rewards/rejected"),
  Metric(
    "rewards/accuracy",
    "share",
    "pairs with a positive margin; a margin of 0 counts half",
  ),
)


def bradley_terry(
  chosen: Float[Array, " B"],
  rejected: Float[Array, " B"],
  margin: Float[Array, " B"] | None = None,
  centering: float = 0.0,
) -> PairLoss:
  """Returns -log s(chosen - rejected - margin) + centering (chosen + rejected)^2.

  s is the logistic function. The first term is the negative Bradley-Terry
  log-likelihood of a preference (arXiv:2203.02155, equation 1). Its margin is larger
  for clearer preferences (Llama 2, arXiv:2307.09288, equation 2). A constant that is
  added to both rewards does not change the first term; the second term moves the mean
  of the rewards toward 0 (arXiv:2312.09244).

  Args:
    chosen, rejected: rewards of the responses, differentiated.
    margin: required difference of the rewards, not differentiated; None for 0.
    centering: weight >= 0 of the second term; 0.01 is usual.

  Returns:
    Values and metrics [B]: rewards/chosen, rewards/rejected, rewards/margin (their
    difference), rewards/accuracy (1/2 on a tie).

  Raises:
    ValueError: centering < 0.
  """
  if centering < 0:
    raise ValueError(
      f"centering={centering} is the weight of a loss term; expected >= 0"
    )
  wide = jnp.promote_types(chosen.dtype, jnp.float32)
  chosen, rejected = chosen.astype(wide), rejected.astype(wide)
  gap = chosen - rejected
  shift = 0.0 if margin is None else jax.lax.stop_gradient(margin)
  values = -jax.nn.log_sigmoid(gap - shift)
  values += centering * jnp.square(chosen + rejected)
  metrics = {
    "rewards/chosen": chosen,
    "rewards/rejected": rejected,
    "rewards/margin": gap,
    "rewards/accuracy": accuracy(gap),
  }
  return PairLoss(values, jax.lax.stop_gradient(metrics))
