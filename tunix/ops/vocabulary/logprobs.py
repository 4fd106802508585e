"""Log-probabilities of tokens from hidden states, without logits of all tokens at once.

The functions iterate over chunks of tokens (chunks.py), so that memory grows
with the number of tokens and not with tokens times vocabulary.

`weighted_nll` returns one number, and the weights that its gradients need are known in
advance. The forward pass therefore computes the gradients too. A separate backward pass
would recompute the logits, one more product with the unembedding, which is about 9 % of
a step of a small model.

`token_logps` returns one value per token. The cotangents of these values are unknown
until the backward pass, which therefore recomputes the logits. It does not if the
unembedding is frozen (as in LoRA training). If all tokens fit one chunk, XLA merges the
two computations of the logits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.ops.vocabulary import chunks as vocab_chunks, softmax as vocab_softmax
from tunix.ops.vocabulary.softmax import ONE_DEVICE, Layout, Outputs, Pulls, Rule


def weighted_nll(
  hidden: Float[Array, "B T D"],
  unembed: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  weights: Float[Array, "B T"],
  layout: Layout = ONE_DEVICE,
) -> Float[Array, ""]:
  """Returns the sum over tokens of `weights * -log p(target | hidden)`, in nats.

  The result equals `weights * (logsumexp(hidden @ unembed) - logit of target)`. Logits
  and the sum are float32 for all input dtypes. It is differentiable in `hidden`,
  `unembed` and `weights`; the gradient in `unembed` is only computed if it is needed
  (it is not in LoRA training).

  Args:
    hidden: final hidden states.
    unembed: unembedding [D, V], or [V, D] with `layout.transposed`.
    targets: next token of each position, in [0, V).
    weights: weight of each token; 0 if the position predicts nothing. Chunks of tokens
      with weight 0 are not computed.
    layout: sharding and chunk size.
  """
  layout = vocab_chunks.for_batch(layout, hidden.shape)
  return _weighted_nll(hidden, unembed, targets, weights, layout)


# With `symbolic_zeros`, each input of the forward function has the attribute
# `perturbed`, which is True if it is differentiated. No other gradient is computed.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_nll(hidden, unembed, targets, weights, layout):
  needed = weights != 0
  part = vocab_chunks.run(hidden, unembed, targets, Pulls(), Rule(layout), needed)
  return jnp.sum(-part.logps * weights)


def _forward(hidden, unembed, targets, weights, layout):
  rule = Rule(layout, hidden=hidden.perturbed, unembed=unembed.perturbed)
  pulls = Pulls(-weights.value.astype(jnp.float32))
  # The derivative in a weight is the token's log-probability, also where it is 0.
  needed = None if weights.perturbed else weights.value != 0
  arrays = hidden.value, unembed.value, targets.value
  part = vocab_chunks.run(*arrays, pulls=pulls, rule=rule, needed=needed)
  return jnp.sum(-part.logps * weights.value), part


def _backward(layout, part: Outputs, cotangent):
  del layout
  cotangent = vocab_softmax.materialised(cotangent)
  d_hidden, d_unembed = (
    vocab_softmax.scaled(x, cotangent) for x in (part.d_hidden, part.d_unembed)
  )
  return d_hidden, d_unembed, None, -part.logps * cotangent


_weighted_nll.defvjp(_forward, _backward, symbolic_zeros=True)


class TokenScores(NamedTuple):
  """Log-probability and entropy of each token, float32, in nats.

  Attributes:
    logps: log-probability of the target, [B, T].
    entropy: entropy of the distribution over the vocabulary, [B, T], or None.
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
  needed: Bool[Array, "B T"] | None = None,
) -> TokenScores:
  """Returns log softmax(logits / temperature)[target] and the entropy of every token.

  With logits = hidden @ unembed and p their softmax, the entropy is -sum p log p. The
  results are float32 for all input dtypes and differentiable in `hidden` and `unembed`;
  a gradient is only computed if it is needed. The backward pass recomputes the logits
  of each chunk, unless `unembed` is not differentiated and `entropy` is False.

  Args:
    hidden: final hidden states.
    unembed: unembedding [D, V], or [V, D] with `layout.transposed`.
    targets: token to score at each position, in [0, V).
    layout: sharding and chunk size.
    temperature: temperature of the softmax, above 0.
    entropy: True computes the entropy, False returns None for it.
    needed: True on the tokens whose scores are used. Chunks of other tokens are not
      computed. Results of other tokens are 0 and have no gradient. None: all are used.

  Raises:
    ValueError: the temperature is not a positive number.
  """
  _check_temperature(temperature)
  layout = vocab_chunks.for_batch(layout, hidden.shape)
  out: Any = _scores(
    hidden, unembed, targets, needed, Rule(layout, temperature, entropy)
  )
  if needed is None:
    return out
  # Cotangents of other tokens become 0 here, which skipped chunks need.
  return jax.tree.map(lambda x: jnp.where(needed, x, 0.0), out)


def logps_at(
  hidden: Float[Array, "B T D"],
  unembed: Float[Array, "D V"],
  ids: Int[Array, "B T K"],
  layout: Layout = ONE_DEVICE,
  *,
  temperature: float = 1.0,
) -> Float[Array, "B T K"]:
  """Returns log softmax(logits / temperature) of K tokens for each position.

  The arguments and errors are those of `token_logps`. One product with the unembedding
  serves all K tokens, and the vocabulary is not split. The result is differentiable in
  `hidden` and `unembed`; the backward pass recomputes the logits of each chunk.
  """
  _check_temperature(temperature)
  vocab = vocab_softmax.vocabulary_size(unembed, layout)
  layout = vocab_chunks.for_batch(layout, hidden.shape)._replace(vocab_axis=None)

  def local(hidden, ids, unembed):
    @jax.checkpoint
    def chunk(hidden, ids):
      logits = vocab_softmax.chunk_logits(hidden, unembed, layout)
      every = jax.nn.log_softmax(logits / temperature, axis=-1)
      return jnp.take_along_axis(every, ids, axis=-1), None

    arrays, shape = (hidden, ids), hidden.shape[:2]
    return vocab_chunks.over_tokens(chunk, arrays, shape, vocab, None, layout)[0]

  specs = (layout.tokens, layout.tokens, vocab_chunks.table_spec(layout))
  return vocab_chunks.on_mesh(local, layout, specs, layout.tokens)(hidden, ids, unembed)


def logits_logps(
  logits: Float[Array, "B T V"],
  targets: Int[Array, "B T"],
  *,
  temperature: float = 1.0,
  entropy: bool = False,
) -> TokenScores:
  """Returns `token_logps` from whole logits, for models that return only logits."""
  _check_temperature(temperature)
  every = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
  logps = jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0]
  return TokenScores(
    logps, -jnp.sum(jnp.exp(every) * every, axis=-1) if entropy else None
  )


def _check_temperature(temperature: float) -> None:
  if not (math.isfinite(temperature) and temperature > 0):
    raise ValueError(
      f"temperature is {temperature}, it must be a positive number; use 1 for tokens "
      "that were chosen greedily"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores(hidden, unembed, targets, needed, rule: Rule):
  part = vocab_chunks.run(hidden, unembed, targets, Pulls(), rule, needed)
  return TokenScores(part.logps, part.entropy)


class _Saved(NamedTuple):
  """The input of the backward pass of `_scores`, a tree of arrays and None.

  Attributes:
    arrays: hidden, unembed, targets and the tokens that are needed.
    perturbed: () if the gradient in hidden, and in unembed, is needed; else None.
    slope: [B, T, D] gradient of each token's log-probability in its hidden state, if no
      other gradient is needed. The backward pass multiplies it by the cotangents.
  """

  arrays: Any
  perturbed: Any
  slope: Any


def _scores_forward(hidden, unembed, targets, needed, rule: Rule):
  arrays = hidden.value, unembed.value, targets.value
  tokens = None if needed is None else needed.value
  perturbed = tuple(() if x.perturbed else None for x in (hidden, unembed))
  pulls = Pulls()
  # The hidden state of a token only affects its own log-probability. Its gradient is
  # therefore computed now with cotangent 1, and the backward pass multiplies it by the
  # real cotangent.
  if hidden.perturbed and not unembed.perturbed and not rule.entropy:
    pulls = Pulls(jnp.ones(targets.value.shape, jnp.float32))
    rule = rule._replace(hidden=True)
  part = vocab_chunks.run(*arrays, pulls=pulls, rule=rule, needed=tokens)
  saved = _Saved((*arrays, tokens), perturbed, part.d_hidden)
  return TokenScores(part.logps, part.entropy), saved


def _scores_backward(rule: Rule, saved: _Saved, cotangents: TokenScores):
  hidden, unembed, targets, needed = saved.arrays
  logps, entropy = cotangents
  pulls = Pulls(
    vocab_softmax.materialised(logps, targets.shape),
    entropy if isinstance(entropy, jax.Array) else None,  # a symbolic zero: unused
  )
  if saved.slope is not None:
    pull = pulls.logps[..., None]
    # A slope beyond the range of float16 is inf. Its product with a cotangent 0 would
    # be NaN.
    d_hidden = jnp.where(pull == 0, 0.0, saved.slope * pull)
    return d_hidden.astype(hidden.dtype), None, None, None
  rule = rule._replace(
    entropy=False,
    hidden=saved.perturbed[0] is not None,
    unembed=saved.perturbed[1] is not None,
  )
  size = None
  if hidden.dtype == jnp.float16:
    # The mean over many tokens has cotangents below 6e-8, the smallest float16 above 0.
    # They are divided by the largest cotangent, and the gradients are multiplied by it.
    size = functools.reduce(
      jnp.maximum, [jnp.max(jnp.abs(x)) for x in jax.tree.leaves(pulls)]
    )
    size = jnp.where(size > 0, size, 1.0)
    pulls = jax.tree.map(lambda x: x / size, pulls)
  part = vocab_chunks.run(hidden, unembed, targets, pulls, rule, needed)
  d_hidden, d_unembed = (
    x if size is None else vocab_softmax.scaled(x, size)
    for x in (part.d_hidden, part.d_unembed)
  )
  return d_hidden, d_unembed, None, None


_scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)
