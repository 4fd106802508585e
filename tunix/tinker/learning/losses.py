"""Losses of the protocol: a value per token, summed over all tokens of a request.

With log-probabilities log p of the trained model, log q of the model that sampled (the
input `logprobs`), advantages A and the ratio r = p / q:

  cross_entropy         -w log p, with the weights w
  importance_sampling   -r A
  ppo                   -min(r A, clip(r, low, high) A) (Schulman et al. 2017,
                        arXiv:1707.06347)
  cispo                 -stop_gradient(clip(r, low, high)) A log p (MiniMax 2025,
                        arXiv:2506.13585)
  dro                   -(A log p - beta / 2 (log p - log q)^2) (Richemond et al. 2024,
                        arXiv:2405.19107)
  gspo                  -min(s A, clip(s, low, high) A) in the token form of Zheng et
                        al. 2025 (arXiv:2507.18071): the value of s is exp of the mean
                        of log r over the tokens of a row where `sequence_ratio_mask`
                        is not 0, and its gradient at a token is that of the token's r
                        at value s

The losses of reinforcement learning take `weights` too, as a factor; without them it
is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.ops import policy_gradient
from tunix.ops.reductions import keep, safe_divide, safe_exp
from tunix.tinker.errors import NotServedError, TinkerError

_MOST = 1e30  # of a bound of the ratio, and of beta
RATIO_MASK = "sequence_ratio_mask"  # of gspo
Inputs = Mapping[str, jax.Array]
Config = Mapping[str, float]


class Loss(NamedTuple):
  """One loss.

  Attributes:
    function: (log p, inputs, configuration) -> values per token, all [B, T].
    inputs: names of the inputs it needs besides `target_tokens`.
    defaults: its configuration; a NaN has no default and must be given.
  """

  function: Callable[[jax.Array, Inputs, Config], jax.Array]
  inputs: tuple[str, ...]
  defaults: Mapping[str, float]


def _cross_entropy(logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  return -logps  # the weights are applied to every loss, see `weighted`


def _importance_sampling(logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  return -safe_exp(logps - inputs["logprobs"]) * inputs["advantages"]


def _ppo(logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  return policy_gradient.clipped_loss(
    logps - inputs["logprobs"], inputs["advantages"], **_distances(config)
  ).values


def _cispo(logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  return policy_gradient.cispo_loss(
    logps - inputs["logprobs"], logps, inputs["advantages"], **_distances(config)
  ).values


def _dro(logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  square = jnp.square(logps - inputs["logprobs"])
  return -(inputs["advantages"] * logps - 0.5 * config["beta"] * square)


def _gspo(logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  log_ratio = logps - inputs["logprobs"]
  in_mean = inputs[RATIO_MASK] != 0
  mean = safe_divide(
    jnp.sum(keep(log_ratio, in_mean), axis=1, keepdims=True),
    jnp.sum(in_mean, axis=1, keepdims=True).astype(logps.dtype),
  )
  # `policy_gradient.log_ratio` gives ratio 1 outside the mask; the protocol's is s.
  only_gradient = logps - jax.lax.stop_gradient(logps)
  return policy_gradient.clipped_loss(
    jax.lax.stop_gradient(mean) + only_gradient,
    inputs["advantages"],
    **_distances(config),
  ).values


def _distances(config: Config) -> dict[str, float]:
  """Converts the bounds of the ratio to distances from 1."""
  return {
    "clip_low": 1 - config["clip_low_threshold"],
    "clip_high": config["clip_high_threshold"] - 1,
  }


_RL = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
  "cross_entropy": Loss(_cross_entropy, (), {}),
  "importance_sampling": Loss(_importance_sampling, _RL, {}),
  "ppo": Loss(_ppo, _RL, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
  "cispo": Loss(_cispo, _RL, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
  "dro": Loss(_dro, _RL, {"beta": float("nan")}),
  # The bounds of the paper, section 5.1, and of our own GSPO.
  "gspo": Loss(
    _gspo,
    (*_RL, RATIO_MASK),
    {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
  ),
}
_NOT_SERVED = {  # name -> why
  "stable_reinforce": "we know no published formula of it",
  "custom": "it runs functions of clients",
}


def loss_named(name: str) -> Loss:
  """Returns a loss.

  Raises:
    NotServedError: the protocol has the loss, but the service does not.
    TinkerError: the name is unknown.
  """
  if name in LOSSES:
    return LOSSES[name]
  names = ", ".join(LOSSES)
  if name in _NOT_SERVED:
    raise NotServedError(
      f"loss_fn is {name!r}, which this service does not have, because "
      f"{_NOT_SERVED[name]}; expected one of {names}. Use one of them, or "
      "forward_backward_custom with a function of Python"
    )
  raise TinkerError(f"loss_fn is {name!r}; expected one of {names}. Correct the name")


def configured(name: str, values: Mapping[str, object] | None) -> dict[str, float]:
  """Returns the whole configuration of a loss.

  Raises:
    TinkerError: an unknown key, a value that is no number, a missing value, or bounds
      on the wrong side of 1.
  """
  config = dict(loss_named(name).defaults)
  if values is not None and not isinstance(values, Mapping):
    raise TinkerError(
      f"loss_fn_config is {str(values)[:80]!r}; expected an object. Correct it"
    )
  for key, value in (values or {}).items():
    if key not in config:
      keys = ", ".join(config) or "no key"
      raise TinkerError(
        f"loss_fn_config has {key!r}; expected {keys} for {name}. Remove the key"
      )
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise TinkerError(
        f"loss_fn_config.{key} is {value!r}; expected a number. Correct the value"
      )
    config[key] = value
  for key, value in config.items():
    if not 0 <= value <= _MOST:
      raise TinkerError(
        f"loss_fn_config.{key} is {str(value)[:80]}; expected a number from 0 to "
        f"{_MOST:g}. Give {name} one"
      )
  low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
  if low is not None and high is not None and not 0 <= low <= 1 <= high:
    raise TinkerError(
      f"clip_low_threshold is {low} and clip_high_threshold {high}; expected 0 <= low "
      "<= 1 <= high, bounds of the ratio p / q. Correct them"
    )
  return {key: float(value) for key, value in config.items()}


def weighted(name: str, logps: jax.Array, inputs: Inputs, config: Config) -> jax.Array:
  """Returns the weighted losses per token, 0 where the weight is 0.

  Args:
    name: a name from `LOSSES`.
    logps: log-probabilities of the targets in nats, float [B, T], or [B, T, K] with K
      targets for each position.
    inputs: the loss's inputs and `weights`, each of the shape of `logps`.
    config: the whole configuration, see `configured`.
  """
  weights = inputs["weights"]
  # Padding has weight 0. Nothing that is computed there may reach the gradient. The
  # ratio of a sequence counts tokens of its mask with weight 0 too.
  is_used = weights != 0
  if RATIO_MASK in LOSSES[name].inputs:
    is_used |= inputs[RATIO_MASK] != 0
  finite = jnp.where(is_used, logps, 0.0)
  return LOSSES[name].function(finite, inputs, config) * weights
