"""Difference between the log-probs of decoding and of scoring the same tokens.

Decoding runs token by token through a cache, and scoring runs over whole rows. Both
compute the same function, but add numbers in another order. An RL update treats the
difference as a change of the policy. A large difference means that decoding or scoring
is broken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from tunix.generate import scoring
from tunix.generate.engine_sampler import EngineSampler
from tunix.generate.sampler import Sampler
from tunix.models.images.prompt_images import PromptImages, stacked
from tunix.ops.reductions import safe_divide


def mismatch(
  logps: Float[Array, "B R"],
  rollout_logps: Float[Array, "B R"],
  mask: Bool[Array, "B R"],
  *,
  threshold: float = 0.1,
) -> dict[str, Any]:
  """Compares two sets of log-probs of the same tokens.

  Args:
    logps: log-probs under the policy that is trained, in nats.
    rollout_logps: log-probs from the engine that sampled, in nats.
    mask: True on the tokens that count.
    threshold: bound of the difference in nats; tokens above it are in "share_apart".

  Returns:
    float32 scalars by name, of d = logps - rollout_logps over the tokens that count:
    "max_abs" and "mean_abs" of d; "share_apart", share of tokens with |d| > threshold;
    "mean_ratio", mean of exp(d), which is 1 if the tokens are drawn from the policy.
    NaN and infinity are not left out. All are 0 without a token.
  """
  mask = mask.astype(bool)
  apart = jnp.where(mask, (logps - rollout_logps).astype(jnp.float32), 0.0)
  tokens = jnp.sum(mask, dtype=jnp.float32)
  size = jnp.abs(apart)

  def mean(x):
    return safe_divide(jnp.sum(jnp.where(mask, x, 0.0)), tokens)

  return {
    "max_abs": jnp.max(size, initial=0.0),
    "mean_abs": mean(size),
    # NaN <= threshold is False, so NaN counts as a large difference.
    "share_apart": mean((~(size <= threshold)).astype(jnp.float32)),
    "mean_ratio": mean(jnp.exp(apart)),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
  """The result of `measure`.

  Attributes:
    tokens: number of sampled tokens that are compared.
    max_abs: see `mismatch`.
    mean_abs: see `mismatch`.
    share_apart: see `mismatch`.
    mean_ratio: see `mismatch`.
    greedy_tokens: number of greedily decoded tokens.
    top1_flips: number of greedy tokens that scoring does not rank first.
    threshold: nats, see `passed`.
  """

  tokens: int
  max_abs: float
  mean_abs: float
  share_apart: float
  mean_ratio: float
  greedy_tokens: int
  top1_flips: int
  threshold: float

  @property
  def passed(self) -> bool:
    """True if every sampled token differs by at most the threshold (NaN does not)."""
    return self.max_abs <= self.threshold

  def __str__(self) -> str:
    return (
      f"{self.tokens} sampled tokens: |difference| max {self.max_abs:.3g}, mean "
      f"{self.mean_abs:.3g} nats; beyond {self.threshold:g}: {self.share_apart:.2%}; "
      f"mean ratio {self.mean_ratio:.6f}\n"
      f"{self.greedy_tokens} greedy tokens: {self.top1_flips} that scoring does not "
      "rank first"
    )


def measure(
  sampler: Sampler | EngineSampler,
  prompts: Sequence[Any],
  *,
  tokens: int,
  seed: int,
  threshold: float,
  images: Sequence[PromptImages | None] = (),
) -> Parity:
  """Samples at temperature 1 and greedily, and scores both completions.

  Args:
    sampler: sampler of the model.
    prompts: strings or sequences of token ids.
    tokens: tokens to generate for each prompt; end-of-sequence tokens end no row.
    seed: seed of the sampled tokens.
    threshold: largest allowed difference of a sampled token in nats.
    images: those of each prompt, whose ids have their tokens; empty without images.

  Raises:
    ValueError: `threshold` is negative; or see `Sampler`.
  """
  if not threshold >= 0:
    raise ValueError(f"threshold is {threshold}, expected at least 0 nats")

  def decode(temperature: float) -> Any:
    return sampler(
      prompts,
      max_generation_steps=tokens,
      temperature=temperature,
      seed=seed,
      eos_tokens=(),
      return_logprobs=True,
      pad_output=True,
      images=images,
    )

  lengths = np.array([len(sampler.tokenize(prompt)) for prompt in prompts])
  drawn, greedy = decode(1.0), decode(0.0)
  graph, state = nnx.split(sampler.transformer)

  @jax.jit
  def check(state, drawn_rows, greedy_rows, rollout_logps, images):
    model = nnx.merge(graph, state)
    model.eval()
    scores = scoring.score_completions(model, *drawn_rows, images=images)
    apart = mismatch(scores.logps, rollout_logps, drawn_rows[-1], threshold=threshold)
    best = _most_likely(model, greedy_rows, images)
    return apart, jnp.sum(best != greedy_rows[2])

  rows = [_rows(out, lengths) for out in (drawn, greedy)]
  found = check(state, *rows, np.asarray(drawn.logprobs), stacked(images))
  apart, flips = jax.device_get(found)
  count = len(lengths) * tokens
  return Parity(
    tokens=count,
    greedy_tokens=count,
    top1_flips=int(flips),
    threshold=threshold,
    **{name: float(value) for name, value in apart.items()},
  )


def _rows(out: Any, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
  """Returns a sampler's output as the arrays of `scoring`; all tokens count."""
  prompts, tokens = out.padded_prompt_tokens, np.asarray(out.tokens)
  width = prompts.shape[1]
  mask = np.arange(width) >= width - lengths[:, None]
  return prompts, mask, tokens, np.ones(tokens.shape, bool)


def _most_likely(
  model: nnx.Module, rows: tuple[np.ndarray, ...], images: Any
) -> jax.Array:
  """Returns int32 [B, R], the token that scoring ranks first at each place.

  Rows run one after the other, so that only one row's logits [R, V] are in memory.
  """

  def one(row):
    arrays, images = jax.tree.map(lambda x: x[None], row)
    logits = scoring.completion_logits(model, *arrays, images=images)
    return jnp.argmax(logits[0], axis=-1).astype(jnp.int32)

  return jax.lax.map(one, (rows, images))
