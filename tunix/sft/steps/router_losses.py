"""The losses of routers that a train step adds to its loss, and their metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix.models.transformer.experts.routing import Logs
from tunix.ops.reductions import WeightedSum
from tunix.utils.metric import Metric

_MIXTURE = "the model has experts"

METRICS = (
  Metric(
    "router/balance_loss",
    "1",
    "load-balancing loss without its weight; the number of experts of a token if all "
    "experts are used equally",
    modes="train",
    condition=_MIXTURE,
  ),
  Metric(
    "router/z_loss",
    "nats^2",
    "router z-loss without its weight",
    modes="train",
    condition=_MIXTURE,
  ),
  Metric(
    "router/entropy",
    "nats",
    "mean entropy of the routers' softmax",
    modes="train",
    condition=_MIXTURE,
  ),
  Metric(
    "router/max_share",
    "share",
    "largest share of a layer's choices that one expert has, the mean over the layers",
    modes="train",
    condition=_MIXTURE,
  ),
  Metric(
    "router/replaced",
    "share",
    "tokens whose recorded experts are others than those that the router would choose, "
    "counted in each layer",
    modes="train",
    condition="if recorded routes are replayed (`rollout.replay_routes`)",
  ),
)


def added(loss: WeightedSum, logs: Logs) -> tuple[WeightedSum, dict[str, WeightedSum]]:
  """Adds the weighted losses of the routers to a loss.

  The losses are those of one micro-batch. As means over its tokens, they get the weight
  of its loss.

  Args:
    loss: the loss of a micro-batch.
    logs: the logs of the calls that computed it.

  Returns:
    The sum, and the metrics by name; no metrics if the model has no experts.
  """
  total, metrics = loss.total, {}
  for log in logs:
    sums = log.total.get_value()
    balance, z_loss = sums.balance_loss(), sums.z_loss()
    total = total + loss.weight * (log.balance_weight * balance + log.z_weight * z_loss)
    stop = jax.lax.stop_gradient
    statistics = sums.statistics()
    if not log.has_replay:
      del statistics["replaced"]
    metrics = {
      "router/balance_loss": _mean(stop(balance), loss.weight),
      "router/z_loss": _mean(stop(z_loss), loss.weight),
      **{f"router/{name}": value for name, value in statistics.items()},
    }
  return WeightedSum(total, loss.weight), metrics


def _mean(value: jax.Array, weight: object) -> WeightedSum:
  weight = jnp.asarray(weight, jnp.float32)
  return WeightedSum(value * weight, weight)
