"""How far the log-probs of decoding are from those of scoring the same tokens.

Decoding goes token by token through a cache, scoring over whole rows: the same function
in another order of additions. The difference is what an RL update mistakes for a change
of the policy; a large one means that one of the two is broken.
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
from tunix.generate.sampler import Sampler
from tunix.ops.reductions import safe_divide


def mismatch(
  logps: Float[Array, "B R"],
  rollout_logps: Float[Array, "B R"],
  mask: Bool[Array, "B R"],
  *,
  threshold: float = 0.1,
) -> dict[str, Any]:
  """What separates two sets of log-probs of the same tokens; float32 scalars.

  Args:
    logps: of the policy that is trained, nats.
    rollout_logps: of the engine that sampled.
    mask: true on the tokens that count.
    threshold: nats beyond which a token is counted as apart.

  Returns: by name, with d = logps - rollout_logps over the tokens that count:
    "max_abs" and "mean_abs" of d, "share_apart" (of tokens with |d| > threshold), and
    "mean_ratio" (of exp(d): 1 if the tokens come from what they are weighted against).
    Values that are not finite count as they are: they must show. 0 without a token.
  """
  mask = mask.astype(bool)
  apart = jnp.where(mask, (logps - rollout_logps).astype(jnp.float32), 0.0)
  tokens = jnp.sum(mask, dtype=jnp.float32)
  size = jnp.abs(apart)
  mean = lambda x: safe_divide(jnp.sum(jnp.where(mask, x, 0.0)), tokens)
  return {
    "max_abs": jnp.max(size, initial=0.0),
    "mean_abs": mean(size),
    # "not within", so that NaN is apart.
    "share_apart": mean((~(size <= threshold)).astype(jnp.float32)),
    "mean_ratio": mean(jnp.exp(apart)),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
  """What `measure` found.

  Attributes:
    tokens: sampled tokens compared.
    max_abs, mean_abs, share_apart, mean_ratio: see `mismatch`.
    greedy_tokens: greedily decoded tokens looked at.
    top1_flips: how many of them scoring does not rank first.
    threshold: nats.
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
    """Whether no token differs by more than the threshold, or is not a number."""
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
  sampler: Sampler,
  prompts: Sequence[Any],
  *,
  tokens: int,
  seed: int,
  threshold: float,
) -> Parity:
  """Samples at temperature 1 and greedily, and scores what came.

  Args:
    sampler: holds the model.
    prompts: strings or sequences of token ids.
    tokens: to generate a prompt; end-of-sequence tokens end nothing.
    seed: of the sampled tokens.
    threshold: nats that no sampled token may differ by.

  Raises:
    ValueError: see `Sampler`; or a threshold that is negative.
  """
  if not threshold >= 0:
    raise ValueError(f"threshold is {threshold}, it must not be negative")

  def decode(temperature: float) -> Any:
    return sampler(
      prompts,
      max_generation_steps=tokens,
      temperature=temperature,
      seed=seed,
      eos_tokens=(),
      return_logprobs=True,
      pad_output=True,
    )

  lengths = np.array([len(sampler.tokenize(prompt)) for prompt in prompts])
  drawn, greedy = decode(1.0), decode(0.0)
  graph, state = nnx.split(sampler.transformer)

  @jax.jit
  def check(state, drawn_rows, greedy_rows, rollout_logps):
    model = nnx.merge(graph, state)
    model.eval()
    scores = scoring.score_completions(model, *drawn_rows)
    apart = mismatch(scores.logps, rollout_logps, drawn_rows[-1], threshold=threshold)
    best = _most_likely(model, *greedy_rows)
    return apart, jnp.sum(best != greedy_rows[2])

  rows = [_rows(out, lengths) for out in (drawn, greedy)]
  apart, flips = jax.device_get(check(state, *rows, np.asarray(drawn.logprobs)))
  count = len(lengths) * tokens
  return Parity(
    tokens=count,
    greedy_tokens=count,
    top1_flips=int(flips),
    threshold=threshold,
    **{name: float(value) for name, value in apart.items()},
  )


def _rows(out: Any, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
  """A sampler's output as `scoring` takes it; all its tokens count."""
  prompts, tokens = out.padded_prompt_tokens, np.asarray(out.tokens)
  width = prompts.shape[1]
  mask = np.arange(width) >= width - lengths[:, None]
  return prompts, mask, tokens, np.ones(tokens.shape, bool)


def _most_likely(model: Any, *rows: Any) -> jax.Array:
  """int32 [B, R]: the token that scoring would choose in each one's place.

  Row by row, so that the logits of one row are alive.
  """

  def one(row):
    logits = scoring.completion_logits(model, *(x[None] for x in row))
    return jnp.argmax(logits[0], axis=-1).astype(jnp.int32)

  return jax.lax.map(one, rows)
