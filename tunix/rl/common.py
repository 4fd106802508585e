"""What passes between rollouts and updates: examples, and how they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate import batching
from tunix.rl.rewards import RewardOutput
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainExample:
  """Rollouts with what an update needs; B rows, group by group.

  Attributes:
    prompt_ids, prompt_mask: int32 and bool [B, P], padded on the left.
    completion_ids, completion_mask: int32 and bool [B, R], padded on the right; the
      mask is on the tokens that are trained.
    advantages: float32 [B] or [B, R].
    ref_per_token_logps: float32 [B, R] of the reference model, or None.
    old_per_token_logps: of the policy before the update; None: it is the policy itself.
    rollout_per_token_logps: as the sampler reported them, or None.
    returns, old_values: float32 [B, R], for a critic.
    group_size: rows that have one prompt and stand together.
  """

  prompt_ids: Any
  prompt_mask: Any
  completion_ids: Any
  completion_mask: Any
  advantages: Any
  ref_per_token_logps: Any = None
  old_per_token_logps: Any = None
  rollout_per_token_logps: Any = None
  returns: Any = None
  old_values: Any = None
  group_size: int = dataclasses.field(default=1, metadata={"static": True})

  @property
  def rows(self) -> int:
    """B."""
    return self.completion_ids.shape[0]

  def take(self, rows: Sequence[int] | np.ndarray) -> TrainExample:
    """Some of the rows, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], self)

  def padded_to(self, rows: int) -> TrainExample:
    """With rows that weigh nothing (copies of the first whose masks are empty)."""
    if (missing := rows - self.rows) <= 0:
      return self
    out = self.take(np.concatenate([np.arange(self.rows), np.zeros(missing, int)]))
    mask = np.array(out.completion_mask)
    mask[self.rows :] = False
    return dataclasses.replace(out, completion_mask=mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """The rows of rollouts as arrays; see TrainExample.

  Attributes:
    truncated: bool [B], completions that met their limit.
    rollout_logps: float32 [B, R], 0 behind a completion's end.
    group_size: G, completions of each prompt; they stand together.
  """

  prompt_ids: np.ndarray
  prompt_mask: np.ndarray
  completion_ids: np.ndarray
  completion_mask: np.ndarray
  rollout_logps: np.ndarray
  truncated: np.ndarray
  group_size: int = 1

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of each completion, int64 [B]."""
    return self.completion_mask.sum(1)

  def arrays(self) -> dict[str, Any]:
    """The fields that have a row a completion."""
    fields = dataclasses.fields(self)
    return {f.name: getattr(self, f.name) for f in fields if f.name != "group_size"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """Completions of a batch of prompts, with their rewards.

  Attributes:
    batch: the prompts, P of them (see pipeline.PromptBatch).
    text: B = P * G completions, group by group.
    finish_reasons: B of "eos", "stop", "length".
    tokens: the completions as arrays.
    rewards: by function and in total; a total is NaN where a function gave no value.
    scores: float64 [P, G], the totals, shaped if the algorithm shapes them.
  """

  batch: Any
  text: list[str]
  finish_reasons: list[str]
  tokens: Tokens
  rewards: RewardOutput
  scores: np.ndarray

  @property
  def valid(self) -> np.ndarray:
    """bool [P, G]: rows that have a reward."""
    return np.isfinite(self.scores)

  @property
  def raw(self) -> np.ndarray:
    """float64 [P, G]: the totals, before any shaping."""
    return self.rewards.total.reshape(self.scores.shape)

  def reward_parts(self) -> tuple[list[np.ndarray], list[float]]:
    """The functions' rewards, float64 [P, G] each, and their weights; last what the
    algorithm added to their sum, if it did."""
    shape, weights = self.scores.shape, self.rewards.weights
    named = self.rewards.by_function
    parts = [np.nan_to_num(values).reshape(shape) for values in named.values()]
    factors = [weights.get(name, 1.0) for name in named]
    shaping = np.nan_to_num(self.scores - self.raw)
    if shaping.any():
      parts, factors = [*parts, shaping], [*factors, 1.0]
    return parts, factors

  def take(self, groups: Sequence[int] | np.ndarray) -> Rollouts:
    """Some of the groups, in that order."""
    size, groups = self.tokens.group_size, np.asarray(groups, int)
    rows = (groups[:, None] * size + np.arange(size)).ravel()
    tokens: dict[str, Any] = {name: x[rows] for name, x in self.tokens.arrays().items()}
    return Rollouts(
      batch=self.batch.take(groups),
      text=[self.text[row] for row in rows],
      finish_reasons=[self.finish_reasons[row] for row in rows],
      tokens=dataclasses.replace(self.tokens, **tokens),
      rewards=self.rewards.take(rows),
      scores=self.scores[groups],
    )


def joined(parts: Sequence[Rollouts]) -> Rollouts:
  """Several batches of rollouts as one, at the widths of the widest."""
  arrays = [part.tokens.arrays() for part in parts]
  merged: dict[str, Any] = {}
  for name in arrays[0]:
    pieces = [piece[name] for piece in arrays]
    if pieces[0].ndim == 2:
      width = max(piece.shape[1] for piece in pieces)
      left = name.startswith("prompt")
      pieces = [_widened(piece, width, left) for piece in pieces]
    merged[name] = np.concatenate(pieces)
  return Rollouts(
    batch=parts[0].batch.joined([part.batch for part in parts[1:]]),
    text=[text for part in parts for text in part.text],
    finish_reasons=[reason for part in parts for reason in part.finish_reasons],
    tokens=dataclasses.replace(parts[0].tokens, **merged),
    rewards=parts[0].rewards.joined([part.rewards for part in parts[1:]]),
    scores=np.concatenate([part.scores for part in parts]),
  )


def _widened(x: np.ndarray, width: int, left: bool) -> np.ndarray:
  missing = width - x.shape[1]
  return np.pad(x, ((0, 0), (missing, 0) if left else (0, missing)))


def repeated(batch: Any, copies: int) -> tuple[list[Any], dict[str, list[Any]]]:
  """(prompts, columns) of a PromptBatch, each value `copies` times in a row."""
  again = lambda values: [value for value in values for _ in range(copies)]
  return again(batch.prompts), {name: again(x) for name, x in batch.columns.items()}


def tokens_of(
  out: RolloutOutput, config: RolloutConfig, *, group_size: int, bucketed: bool
) -> Tokens:
  """Rollouts as arrays of fixed widths.

  Args:
    out: the rollouts.
    config: its maxima are the widths.
    group_size: completions of each prompt.
    bucketed: powers of two that hold the longest instead, where they are smaller.
  """
  width = _width(out.prompt_tokens, config.max_prompt_length, bucketed)
  space = _width(out.tokens, config.max_tokens_to_generate, bucketed)
  rows = len(out.tokens)
  prompt_ids, prompt_mask = batching.left_padded(out.prompt_tokens, rows, width, 0)
  lengths = np.array([len(row) for row in out.tokens])
  return Tokens(
    prompt_ids=prompt_ids,
    prompt_mask=prompt_mask,
    completion_ids=batching.right_padded(out.tokens, space, np.int32),
    completion_mask=np.arange(space) < lengths[:, None],
    rollout_logps=batching.right_padded(out.logprobs, space, np.float32),
    truncated=np.array([reason == "length" for reason in out.finish_reasons]),
    group_size=group_size,
  )


def _width(rows: Sequence[np.ndarray], most: int, bucketed: bool) -> int:
  longest = max(map(len, rows))
  if longest > most:
    raise ValueError(
      f"the engine returned a row of {longest} tokens where at most {most} were asked "
      "for: it does not honour the limits of RolloutConfig"
    )
  return min(most, batching.bucket(longest, batching.MIN_TOKENS)) if bucketed else most
