"""The losses of a policy and a critic on one micro-batch, traced by the trainer."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.generate import scored_rows, scoring
from tunix.ops import importance, kl, policy_gradient
from tunix.ops.policy_gradient import PolicyLoss
from tunix.ops.reductions import WeightedSum, aggregate, keep
from tunix.rl.algorithm_config import AlgorithmConfig, RolloutCorrection, resolve
from tunix.rl.common import TrainExample
from tunix.utils.metric import SAME, Metric

Aux = dict[str, WeightedSum]

# Means over tokens that `derived` turns into the effective sample size.
_WEIGHT, _SQUARE = "rollout_correction/weight", "rollout_correction/mean_square"
_SIZE = "rollout_correction/effective_sample_size"
_CORRECTED = "if `algorithm.rollout_correction` is set and not off"
METRICS = (
  Metric(
    "pg_clipfrac", "share", "tokens whose ratio was clipped", "train", known_as=SAME
  ),
  Metric(
    "kl",
    "nats",
    "estimated divergence from the reference, by `algorithm.kl_method`",
    "train",
    "if `algorithm.beta` is not 0 and the loss has the divergence",
    SAME,
  ),
  Metric(
    "entropy",
    "nats",
    "entropy of the policy's distribution of the next token",
    "train",
    "if `algorithm.entropy_coef` is not 0",
    "`entropy`, in PPO `loss/entropy`",
  ),
  Metric(
    "observation_loss",
    "nats",
    "cross-entropy of the tokens that environments wrote between actions",
    "train",
    "if `algorithm.observation_weight` is not 0",
  ),
  Metric(
    "parity/abs_diff",
    "nats",
    "absolute difference of the engine's and the trainer's log-probabilities",
    "train",
    "if the rollout engine returns log-probabilities",
  ),
  Metric(
    "parity/ratio",
    "1",
    "exp(trainer's - engine's log-probability). With top_p, top_k or min_p the "
    "engine's is that among the kept tokens, so the ratio is their share, below 1",
    "train",
    "if the rollout engine returns log-probabilities",
    "`is_ratio/*`",
  ),
  Metric(
    "parity/kl",
    "nats",
    "estimated divergence of the engine's policy from the trainer's before the update, "
    "KL(engine, trainer) by k3: r - 1 - log r, where r is `parity/ratio`",
    "train",
    "if the rollout engine returns log-probabilities",
  ),
  Metric(
    "score_centering/head",
    "share",
    "probability that the sampler drew one of the recorded tokens; raise "
    "`rollout.center_scores` if it is far below 1",
    "train",
    "if `rollout.center_scores` is above 0",
  ),
  Metric(
    "rollout_correction/weight",
    "1",
    "importance weight that corrects the difference",
    "train",
    _CORRECTED,
    "`sampler_is/*`",
  ),
  Metric(
    "rollout_correction/effective_sample_size",
    "share",
    "(sum w)^2 / (n sum w^2) over the importance weights w of n tokens",
    "train",
    _CORRECTED,
  ),
  Metric(
    "rollout_correction/truncated",
    "share",
    "tokens whose weight is at its upper bound",
    "train",
    "if `algorithm.rollout_correction.kind` is truncate or cispo",
  ),
  Metric(
    "rollout_correction/masked",
    "share",
    "tokens that the bounds leave out of the loss; their weight is 0",
    "train",
    "if `algorithm.rollout_correction.kind` is mask, dppo-tv or dppo-kl",
  ),
)
CRITIC_METRICS = (
  Metric("vpred_mean", "of the reward", "predicted value", "train", known_as=SAME),
  Metric(
    "vf_clipfrac", "share", "tokens whose value was clipped", "train", known_as=SAME
  ),
)

# The level of the ratio by `loss_algo`; all other algorithms use "token".
_LEVELS = {"gspo": "sequence", "rloo": "sequence-product"}


def policy_loss(
  model: nnx.Module,
  example: TrainExample,
  config: AlgorithmConfig,
  *,
  temperature: float,
  max_tokens: int,
) -> tuple[WeightedSum, Aux]:
  """Computes the loss that every learner minimizes.

  Args:
    model: the policy.
    example: rollouts with advantages.
    config: ratio, clip, KL divergence and reduction.
    temperature: sampling temperature of the rollouts; log-probabilities are those of
      softmax(logits / temperature).
    max_tokens: the most tokens of a completion, for reductions that divide by it.

  Returns:
    The loss, and metrics as means over tokens.
  """
  scored = example.completion_mask
  if config.observation_weight:
    scored = scored_rows.extent(scored)
  scores = scoring.score_completions(
    model,
    example.prompt_ids,
    example.prompt_mask,
    example.completion_ids,
    scored,
    group_size=example.group_size,
    temperature=temperature,
    entropy=bool(config.entropy_coef),
    tile_rows=config.exact_tile_rows,
    prompt_routes=example.prompt_routes,
    completion_routes=example.completion_routes,
    head_ids=example.head_ids,
    images=example.images,
  )
  logps, mask = scores.logps, example.completion_mask.astype(jnp.float32)
  if config.observation_weight:
    logps = keep(logps, mask)
  old = example.old_per_token_logps
  # Without old log-probabilities, the policy has not changed since the rollouts. The
  # ratio is then exactly 1, and its gradient is that of the log-probability.
  old = jax.lax.stop_gradient(logps) if old is None else old
  reported = example.rollout_per_token_logps
  loss, watched = corrected_surrogate(
    logps, old, reported, example.advantages, mask, config
  )
  values = loss.values
  if isinstance(scores, scoring.HeadScores):
    probs = keep(example.head_probs, mask[..., None])
    values += policy_gradient.centering_loss(
      scores.head, probs, example.advantages, expected_weight(config)
    )
    watched["score_centering/head"] = jnp.sum(probs, axis=-1)
  if config.beta and example.ref_per_token_logps is not None:
    estimate = resolve("kl_method", config.kl_method, kl.ESTIMATORS)
    divergence = estimate(logps, example.ref_per_token_logps)
    # The gradient of the plain k1 estimate is 0 in expectation. Multiplied by the
    # importance ratio, its expected gradient is that of the KL divergence.
    if config.kl_corrected:
      ratio = policy_gradient.log_ratio(logps, old, mask, "token")
      divergence = kl.corrected(divergence, ratio)
    values, watched["kl"] = values + config.beta * divergence, divergence
  if scores.entropy is not None:
    values = values - config.entropy_coef * scores.entropy
    watched["entropy"] = scores.entropy
  # Dr. GRPO divides by the token limit. Dividing by the length of each completion would
  # weaken the penalty of long wrong completions.
  scaled = config.loss_agg_mode == "sequence-mean-token-scale"
  limit = max_tokens if scaled else None
  total = aggregate(values, mask, config.loss_agg_mode, max_tokens=limit)
  means = token_means(watched, mask)
  if config.observation_weight:
    # Observations are the holes of the mask. Their sum gets the weight of the actions',
    # so that the micro-batches of a step add up.
    written = scored.astype(jnp.float32) - mask
    parts = aggregate(-scores.logps, written, config.loss_agg_mode, max_tokens=limit)
    total = total._replace(total=total.total + config.observation_weight * parts.total)
    means |= token_means({"observation_loss": -scores.logps}, written)
  return total, means


def corrected_surrogate(
  logps: jax.Array,
  old: jax.Array,
  reported: jax.Array | None,
  advantages: jax.Array,
  mask: jax.Array,
  config: AlgorithmConfig,
) -> tuple[PolicyLoss, dict[str, jax.Array]]:
  """Computes the loss of each token with the correction of `config`, and its metrics.

  Args:
    logps: log-probabilities of the trained policy, [B, R].
    old: those of the policy before the update, the proximal policy.
    reported: those of the policy that sampled, which the engine reported, or None.
    advantages: [B] or [B, R].
    mask: float [B, R].
    config: ratio, clip and correction.

  Raises:
    ValueError: `config` has a correction and `reported` is None.
  """
  rule, shown = config.correction, {}
  if rule is None:
    loss = surrogate(logps, old, advantages, mask, config)
  elif reported is None:
    raise ValueError(
      f"rollout_correction.kind is {rule.kind!r} and the example has no "
      "log-probabilities of the engine: set TrainExample.rollout_per_token_logps, or "
      "leave rollout_correction out"
    )
  elif rule.is_loss:
    loss, weights = own_loss(logps, reported, advantages, mask, rule)
    shown = weight_metrics(weights, rule)
  else:
    loss = surrogate(logps, old, advantages, mask, config)
    weights = correction(old, reported, mask, rule)
    loss = PolicyLoss(loss.values * weights, loss.clipped)
    shown = weight_metrics(weights, rule)
  if reported is not None:
    shown |= parity_metrics(old, reported, mask)
  return loss, shown | {"pg_clipfrac": loss.clipped.astype(jnp.float32)}


def parity_metrics(
  old: jax.Array, reported: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """Compares the trainer before the update with the engine; [B, R] by name.

  They differ because the engine has other kernels and dtypes, or older weights.
  """
  # On padding only one of the two is 0, so the gap is masked before exp.
  gap = jnp.where(mask > 0, jax.lax.stop_gradient(old) - reported, 0.0)
  return {
    "parity/abs_diff": jnp.abs(gap),
    "parity/ratio": jnp.exp(gap),
    # Samples of the engine: its policy is the first argument of the divergence.
    "parity/kl": kl.k3(-gap, jnp.zeros_like(gap)),
  }


def surrogate(
  logps: jax.Array,
  old: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  config: AlgorithmConfig,
) -> PolicyLoss:
  """Computes the loss of each token, [B, R], with the ratio of `config.loss_algo`."""
  if config.loss_algo == "reinforce":
    values = policy_gradient.reinforce_loss(logps, advantages)
    return PolicyLoss(values, jnp.zeros(values.shape, bool))
  level = _LEVELS.get(config.loss_algo, "token")
  ratio = policy_gradient.log_ratio(logps, old, mask, level)
  clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
  if config.loss_algo == "cispo":
    return policy_gradient.cispo_loss(ratio, logps, advantages, **clips)
  if config.loss_algo == "sapo":
    return policy_gradient.sapo_loss(ratio, advantages, **config.gate_temperatures)
  return policy_gradient.clipped_loss(
    ratio, advantages, dual_clip=config.epsilon_c, **clips
  )


def correction(
  logps: jax.Array, reported: jax.Array, mask: jax.Array, config: RolloutCorrection
) -> jax.Array:
  """Returns the importance weights of the sampled tokens, [B, R], without gradient."""
  logps = jax.lax.stop_gradient(logps)
  arrays, level = (logps, reported, mask), config.level
  low, high = config.bounds
  if config.kind == "decoupled":
    return importance.unbounded(*arrays, level=level)
  if config.kind == "truncate":
    return importance.truncated(*arrays, level=level, cap=high)
  return importance.masked(*arrays, level=level, low=low, high=high)


def expected_weight(config: AlgorithmConfig) -> Callable[[jax.Array], jax.Array]:
  """Returns f of `policy_gradient.centering_loss`.

  It is the weight of a token with the ratio p / q while the ratio of the trained policy
  to the policy before the update is 1, in the first update on a batch of rollouts.
  """
  rule = config.correction
  if rule is None:
    return jnp.ones_like
  low, high = rule.bounds
  if rule.kind == "mask":
    return lambda ratio: jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)
  return lambda ratio: jnp.clip(ratio, low, high)


def own_loss(
  logps: jax.Array,
  reported: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  config: RolloutCorrection,
) -> tuple[PolicyLoss, jax.Array]:
  """Returns the loss of a kind that is a loss of its own, and the weights in it."""
  ratio = policy_gradient.log_ratio(logps, reported, mask, "token")
  weights = importance.unbounded(logps, reported, mask)
  low, high = config.bounds
  if config.kind == "cispo":
    loss = policy_gradient.cispo_loss(
      ratio, logps, advantages, clip_low=1 - low, clip_high=high - 1
    )
    return loss, keep(jnp.clip(weights, low, high), mask)
  loss = policy_gradient.dppo_loss(
    *(logps, reported, advantages, mask),
    divergence=config.kind.removeprefix("dppo-"),
    limit=config.limit,
  )
  return loss, jnp.where(loss.clipped, 0.0, weights)


def weight_metrics(
  weights: jax.Array, config: RolloutCorrection
) -> dict[str, jax.Array]:
  """Returns what is shown of the weights of tokens, [B, R] by name; see `METRICS`."""
  out = {_WEIGHT: weights, _SQUARE: jnp.square(weights)}
  if config.kind in ("truncate", "cispo"):
    bounded = weights >= config.bounds[1]
    out["rollout_correction/truncated"] = bounded.astype(jnp.float32)
  if config.kind in ("mask", "dppo-tv", "dppo-kl"):
    out["rollout_correction/masked"] = (weights == 0).astype(jnp.float32)
  return out


def derived(aux: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Replaces the mean square of the weights by their effective sample size.

  The size needs the means over the whole global batch, because those of micro-batches
  do not add up.
  """
  if _SQUARE not in (aux or {}):
    return aux
  rest = {name: value for name, value in aux.items() if name != _SQUARE}
  return {**rest, _SIZE: _effective_sample_size(aux[_WEIGHT], aux[_SQUARE])}


# Small operations between programs are jitted, so that they run on the global arrays of
# several processes.
_effective_sample_size = jax.jit(importance.effective_sample_size)


def critic_loss(
  critic: nnx.Module, example: TrainExample, *, clip: float | None
) -> tuple[WeightedSum, Aux]:
  """Computes the squared error between the critic's values and the returns.

  Args:
    critic: a model with one score per position.
    example: rollouts with returns and `old_values`.
    clip: bound of the change of a value, see `policy_gradient.value_loss`; None for no
      clip.

  Returns:
    The loss as a mean over tokens, and metrics as means over tokens.
  """
  values = scoring.score_values(
    critic,
    example.prompt_ids,
    example.prompt_mask,
    example.completion_ids,
    example.completion_mask,
    images=example.images,
  )
  old = None if clip is None else example.old_values
  loss = policy_gradient.value_loss(values, example.returns, old, clip)
  mask = example.completion_mask.astype(jnp.float32)
  watched = {"vpred_mean": values, "vf_clipfrac": loss.clipped.astype(jnp.float32)}
  return aggregate(loss.values, mask), token_means(watched, mask)


def token_means(watched: dict[str, jax.Array], mask: jax.Array) -> Aux:
  """Returns means over tokens as sums and weights, so that micro-batches add up."""
  return {
    name: aggregate(jax.lax.stop_gradient(value), mask)
    for name, value in watched.items()
  }
