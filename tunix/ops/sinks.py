"""Softmax with a sink: one more logit per head that takes weight and has no value.

The weights of a query's keys are exp(s_j) / (exp(sink) + sum_i exp(s_i)), so their sum
is below 1 (gpt-oss, arXiv:2508.10925, section 2; Xiao et al. 2023, arXiv:2309.17453,
section 3, "softmax-off-by-one" for the sink 0).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def softmax(
  scores: Float[Array, "... S"], sinks: Float[Array, "..."] | None
) -> Float[Array, "... S"]:
  """Returns the weights of the keys, float32.

  Args:
    scores: scores of the keys in float32; hidden keys have a large negative score.
    sinks: logit of the sink, broadcast to `scores` without its last axis. None for the
      ordinary softmax.
  """
  if sinks is None:
    return jax.nn.softmax(scores, axis=-1)
  sinks = sinks.astype(scores.dtype)[..., None]
  # The weights do not depend on the number that is subtracted, so it has no gradient.
  top = jax.lax.stop_gradient(
    jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
  )
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top)
  return weights / total
