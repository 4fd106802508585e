"""Log-probabilities of tokens whose memory follows the tokens, not the vocabulary.

Both functions go over chunks of tokens (vocab_chunks.py). `weighted_nll` knows its
cotangents beforehand and computes the gradients in the forward pass: a backward pass
that recomputes the logits would cost one more product with the unembedding (about 9 %
of the step of a small model). `token_logps` hands out every token's value, so that its
cotangents come later: it recomputes, unless the unembedding is frozen (as in LoRA
training). Where all tokens are one chunk, XLA finds that the logits are computed twice
and merges them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.ops import vocab_chunks
from tunix.ops.vocab_chunks import ONE_DEVICE, Layout, Outputs, Pulls, Rule


def weighted_nll(
  hidden: Float[Array, "B T D"],
  unembed: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  layout: Layout = ONE_DEVICE,
) -> Float[Array, ""]:
  """Sum over tokens of `weights * -log p(target | hidden)`, in nats.

  Equals the plain form `weights * (logsumexp(hidden @ unembed) - logit of target)`;
  logits and the sum are float32 whatever the inputs are. Differentiable in `hidden`,
  `unembed` and `weights`; the gradient in `unembed` is only computed when asked for
  (not in LoRA training).

  Args:
    hidden: final hidden states.
    unembed: [D, V], or [V, D] with `layout.transposed`.
    targets: the token to predict at each position, in [0, V).
    weights: 0 where nothing is predicted.
    layout: sharding and chunk size.
  """
  layout = vocab_chunks.for_batch(layout, hidden.shape)
  return _weighted_nll(hidden, unembed, targets, weights, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_nll(hidden, unembed, targets, weights, layout):
  part = vocab_chunks.run(hidden, unembed, targets, Pulls(), Rule(layout))
  return jnp.sum(-part.logps * weights)


def _forward(hidden, unembed, targets, weights, layout):
  rule = Rule(layout, hidden=hidden.perturbed, unembed=unembed.perturbed)
  pulls = Pulls(-weights.value.astype(jnp.float32))
  part = vocab_chunks.run(hidden.value, unembed.value, targets.value, pulls, rule)
  return jnp.sum(-part.logps * weights.value), part


def _backward(layout, part: Outputs, cotangent):
  del layout
  cotangent = _materialised(cotangent, ())

  def scaled(gradient):
    return None if gradient is None else (gradient * cotangent).astype(gradient.dtype)

  return scaled(part.d_hidden), scaled(part.d_unembed), None, -part.logps * cotangent


_weighted_nll.defvjp(_forward, _backward, symbolic_zeros=True)


class TokenScores(NamedTuple):
  """What `token_logps` says of each token, float32, in nats.

  Attributes:
    logps: [B, T] log-probability of the target.
    entropy: [B, T] of the distribution that the target is drawn from, or None.
  """

  logps: Any
  entropy: Any


def token_logps(
  hidden: Float[Array, "B T D"],
  unembed: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  layout: Layout = ONE_DEVICE,
  *,
  temperature: float = 1.0,
  entropy: bool = False,
) -> TokenScores:
  """log softmax(logits / temperature)[target] of every token, and the entropy
  -sum p log p of that distribution, with logits = hidden @ unembed.

  Float32 whatever the inputs are. Differentiable in `hidden` and `unembed`; only the
  gradients asked for are computed. The backward pass computes a chunk's logits again
  unless `unembed` is not differentiated and no entropy is wanted.

  Args:
    hidden: final hidden states.
    unembed: [D, V], or [V, D] with `layout.transposed`.
    targets: the token to score at each position, in [0, V).
    layout: sharding and chunk size.
    temperature: above 0.
    entropy: whether to compute it.

  Raises:
    ValueError: the temperature is not a positive number.
  """
  _check_temperature(temperature)
  layout = vocab_chunks.for_batch(layout, hidden.shape)
  return _scores(hidden, unembed, targets, Rule(layout, temperature, entropy))


def logits_logps(
  logits: Float[Array, "B T V"],
  targets: Int[Array, "B T"],
  *,
  temperature: float = 1.0,
  entropy: bool = False,
) -> TokenScores:
  """`token_logps` of logits that exist already, such as those of a model that gives
  nothing else."""
  _check_temperature(temperature)
  every = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
  logps = jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]
  return TokenScores(
    logps, -jnp.sum(jnp.exp(every) * every, axis=-1) if entropy else None
  )


def _check_temperature(temperature: float) -> None:
  if not (math.isfinite(temperature) and temperature > 0):
    raise ValueError(
      f"temperature is {temperature}, it must be a positive number; what was chosen "
      "greedily is scored at 1"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scores(hidden, unembed, targets, rule: Rule):
  part = vocab_chunks.run(hidden, unembed, targets, Pulls(), rule)
  return TokenScores(part.logps, part.entropy)


class _Saved(NamedTuple):
  """What the backward pass of `_scores` goes on from; arrays or None only.

  Attributes:
    arrays: hidden, unembed, targets.
    wanted: () for each of hidden and unembed whose gradient is wanted, else None.
    slope: [B, T, D] gradient of each token's log-probability in its hidden state, where
      no other is wanted: what is left is to multiply it.
  """

  arrays: Any
  wanted: Any
  slope: Any


def _scores_forward(hidden, unembed, targets, rule: Rule):
  arrays = hidden.value, unembed.value, targets.value
  wanted = tuple(() if x.perturbed else None for x in (hidden, unembed))
  pulls = Pulls()
  if hidden.perturbed and not unembed.perturbed and not rule.entropy:
    pulls = Pulls(jnp.ones(targets.value.shape, jnp.float32))
    rule = rule._replace(hidden=True)
  part = vocab_chunks.run(*arrays, pulls=pulls, rule=rule)
  saved = _Saved(arrays, wanted, part.d_hidden)
  return TokenScores(part.logps, part.entropy), saved


def _scores_backward(rule: Rule, saved: _Saved, cotangents: TokenScores):
  hidden, unembed, targets = saved.arrays
  logps, entropy = cotangents
  pulls = Pulls(_materialised(logps, targets.shape), _array_or_none(entropy))
  if saved.slope is not None:
    pull = pulls.logps[..., None]
    # Not 0 * inf, where float16 cannot hold a slope that nobody asks for.
    d_hidden = jnp.where(pull == 0, 0.0, saved.slope * pull)
    return d_hidden.astype(hidden.dtype), None, None
  rule = rule._replace(
    entropy=False,
    hidden=saved.wanted[0] is not None,
    unembed=saved.wanted[1] is not None,
  )
  size = None
  if hidden.dtype == jnp.float16:
    # A mean over many tokens has cotangents below 6e-8, where float16 ends.
    size = functools.reduce(
      jnp.maximum, [jnp.max(jnp.abs(x)) for x in jax.tree.leaves(pulls)]
    )
    size = jnp.where(size > 0, size, 1.0)
    pulls = jax.tree.map(lambda x: x / size, pulls)
  part = vocab_chunks.run(hidden, unembed, targets, pulls, rule)

  def scaled(gradient):
    if gradient is None or size is None:
      return gradient
    return (gradient * size).astype(gradient.dtype)

  return scaled(part.d_hidden), scaled(part.d_unembed), None


_scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


def _array_or_none(cotangent: Any) -> Any:
  """None for a symbolic zero: nobody uses that output."""
  return cotangent if isinstance(cotangent, jax.Array) else None


def _materialised(cotangent: Any, shape: tuple[int, ...]) -> jax.Array:
  return cotangent if isinstance(cotangent, jax.Array) else jnp.zeros(shape)
