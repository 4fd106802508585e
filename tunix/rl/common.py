"""The two containers of RL data: `Rollouts` (sampled) and `TrainExample` (trained on).

An engine returns a `RolloutOutput`. `rollouts_of` turns it into `Rollouts`, arrays with
the rewards of their rows, and `Experience.example` turns these into a `TrainExample`,
which has what a loss needs.

Axes: P prompts, G completions of each prompt, B = P * G rows, T prompt tokens, R
completion tokens. The rows of one prompt (a group) are adjacent. A completion may be an
episode of several turns, and an episode may have K rows instead of one; B is then
P * G * K.

`completion_mask` is True on tokens that the policy drew. The mask is False on the
tokens of observations between them, which the model reads and which are not trained,
and on the padding after the last drawn token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate.sizes import batching
from tunix.rl import row_arrays
from tunix.rl.env.episode import Episode
from tunix.rl.pipeline import PromptBatch
from tunix.rl.reward.rewards import RewardOutput
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.sft import inference
from tunix.utils.setting import known_values

TOKEN_ARRAYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainExample:
  """A batch of rollouts with everything that an update needs.

  Attributes:
    prompt_ids, prompt_mask: int32 and bool [B, T], padded on the left.
    completion_ids, completion_mask: int32 and bool [B, R], padded on the right. The
      mask is True on tokens that are trained.
    advantages: float32 [B] or [B, R].
    ref_per_token_logps: float32 [B, R] log-probabilities of the reference model, or
      None.
    old_per_token_logps: float32 [B, R] log-probabilities of the policy before the
      update. None: the policy does not change between the rollouts and the update.
    rollout_per_token_logps: float32 [B, R] log-probabilities that the engine reported,
      or None.
    returns, old_values: float32 [B, R], for a critic.
    prompt_routes, completion_routes: experts of the tokens, see `Rollouts`; or None.
    head_ids, head_probs: see `Rollouts`; if they are given, the loss is centered.
    images: images of the prompts, the argument `images` of the model. Without
      environments the first axis has an element for each prompt, whose rows are
      adjacent, with environments one for each row. None without images.
    group_size: number of adjacent rows with the same prompt that are computed together.
    episode_rows: number of adjacent rows that belong to one episode.
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
  prompt_routes: Any = None
  completion_routes: Any = None
  head_ids: Any = None
  head_probs: Any = None
  images: Any = None
  group_size: int = dataclasses.field(default=1, metadata={"static": True})
  episode_rows: int = dataclasses.field(default=1, metadata={"static": True})

  @property
  def rows(self) -> int:
    """The number of rows, B."""
    return self.completion_ids.shape[0]

  def take(self, rows: Sequence[int] | np.ndarray) -> TrainExample:
    """Returns the given rows as NumPy arrays; with images, of whole prompts."""
    return inference.take(self, np.asarray(rows), self.rows)

  def padded_to(self, rows: int) -> TrainExample:
    """Adds copies of the first row with empty masks, which have no weight in a loss."""
    if (missing := rows - self.rows) <= 0:
      return self
    out = self.take(np.concatenate([np.arange(self.rows), np.zeros(missing, int)]))
    mask = np.array(out.completion_mask)
    mask[self.rows :] = False
    return dataclasses.replace(out, completion_mask=mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """The completions of a batch of prompts, with their rewards.

  Attributes:
    batch: the P prompts and their columns.
    text: P * G completions.
    finish_reasons: P * G values: "eos", "stop" or "length", or those of `Episode`.
    prompt_ids, prompt_mask: int32 and bool [B, T], padded on the left.
    completion_ids, completion_mask: int32 and bool [B, R], padded on the right.
    rollout_logps: float32 [B, R] log-probabilities that the engine reported, 0 on
      padding.
    versions: int32 [B, R], optimizer updates of the weights that drew each token, 0 on
      padding; None if the current weights drew all of them.
    prompt_routes, completion_routes: experts of the tokens, [B, T, M, k] and [B, R, M,
      k], as recorded while they were sampled (see experts/route_records.py), 0 on
      padding; None without `RolloutConfig.replay_routes`.
    head_ids, head_probs: int32 and float32 [B, R, k], the most likely tokens of the
      distribution that each token was drawn from, and their probabilities, 0 on
      padding; None without `RolloutConfig.center_scores`.
    images: the argument `images` of the model, [P, ...]; with environments [B, ...];
      None without images.
    group_size: G.
    episodes: the P * G episodes; empty if completions were drawn without environments.
    episode_rows: K.
    turn_rewards: float32 [B, R], the reward of an action at its last token; None
      without environments.
    rewards: rewards of the P * G completions by function; empty before they are
      computed.
    scores: float64 [P, G], the rewards that the algorithm learns from: totals, plus
      what the algorithm adds to them. NaN for a row without a reward.
  """

  batch: PromptBatch
  text: list[str]
  finish_reasons: list[str]
  prompt_ids: np.ndarray
  prompt_mask: np.ndarray
  completion_ids: np.ndarray
  completion_mask: np.ndarray
  rollout_logps: np.ndarray
  versions: np.ndarray | None = None
  prompt_routes: np.ndarray | None = None
  completion_routes: np.ndarray | None = None
  head_ids: np.ndarray | None = None
  head_probs: np.ndarray | None = None
  images: Any = None
  group_size: int = 1
  episodes: list[Episode] = dataclasses.field(default_factory=list)
  episode_rows: int = 1
  turn_rewards: np.ndarray | None = None
  rewards: RewardOutput = dataclasses.field(default_factory=RewardOutput)
  scores: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 1)))

  @property
  def lengths(self) -> np.ndarray:
    """Tokens that were drawn of each completion, int64 [P * G]."""
    return self.completion_mask.reshape(len(self.text), -1).sum(1)

  @property
  def truncated(self) -> np.ndarray:
    """Bool [P * G]: True for a completion that a limit has cut."""
    return np.array([reason in _CUT for reason in self.finish_reasons])

  def by_row(self, values: np.ndarray) -> np.ndarray:
    """Returns values [P * G, ...] of completions for each of their rows, [B, ...]."""
    return np.repeat(values, self.episode_rows, axis=0)

  @functools.cached_property
  def shares_prompts(self) -> bool:
    """True if all rows of each group begin with the same prompt."""
    if not self.episodes:
      return True
    if self.episode_rows > 1 or self.images is not None:
      return False
    ids = np.where(self.prompt_mask, self.prompt_ids, -1)
    groups = ids.reshape(-1, self.group_size, ids.shape[1])
    return bool((groups == groups[:, :1]).all())

  @property
  def valid(self) -> np.ndarray:
    """Bool [P, G]: True for a row that has a reward."""
    return np.isfinite(self.scores)

  @property
  def totals(self) -> np.ndarray:
    """Float64 [P, G]: total rewards, without what the algorithm adds to them."""
    return self.rewards.total.reshape(self.scores.shape)

  @property
  def row_prompts(self) -> PromptBatch:
    """The prompt and the columns of each of the P * G completions."""
    return self.batch.take(
      np.repeat(np.arange(len(self.batch.prompts)), self.group_size)
    )

  def reward_parts(self) -> tuple[list[np.ndarray], list[float]]:
    """Returns the summands of `scores`, float64 [P, G] each, and their weights.

    The last summand is what the algorithm added to the total rewards, if it is not 0.
    """
    shape, weights = self.scores.shape, self.rewards.weights
    named = self.rewards.by_function
    parts = [np.nan_to_num(values).reshape(shape) for values in named.values()]
    factors = [weights.get(name, 1.0) for name in named]
    shaping = np.nan_to_num(self.scores - self.totals)
    if shaping.any():
      parts, factors = [*parts, shaping], [*factors, 1.0]
    return parts, factors

  def take(self, groups: Sequence[int] | np.ndarray) -> Rollouts:
    """Returns the given groups, in that order."""
    groups = np.asarray(groups, int)
    taken = _members(groups, self.group_size)  # completions
    rows = _members(taken, self.episode_rows)
    return dataclasses.replace(
      self,
      batch=self.batch.take(groups),
      text=[self.text[i] for i in taken],
      finish_reasons=[self.finish_reasons[i] for i in taken],
      episodes=[self.episodes[i] for i in taken] if self.episodes else [],
      rewards=self.rewards.take(taken),
      scores=self.scores[groups],
      images=jax.tree.map(lambda x: x[rows if self.episodes else groups], self.images),
      **{name: x[rows] for name, x in self._row_arrays().items()},
    )

  def _row_arrays(self) -> dict[str, np.ndarray]:
    return known_values(self, row_arrays.NAMES)

  def with_episode_rows(self, count: int) -> Rollouts:
    """Adds rows of weight 0, so that each episode has `count` rows."""
    if count == self.episode_rows:
      return self

    def padded(name: str, x: np.ndarray) -> np.ndarray:
      parts = x.reshape(len(self.text), self.episode_rows, *x.shape[1:])
      added = np.repeat(parts[:, :1], count - self.episode_rows, axis=1)
      # A row needs a prompt. Nothing of its completion counts.
      added = added if name in row_arrays.PROMPTS else np.zeros_like(added)
      return np.concatenate([parts, added], axis=1).reshape(-1, *x.shape[1:])

    arrays = {name: padded(name, x) for name, x in self._row_arrays().items()}
    prompts = row_arrays.PROMPTS[0]
    seen = jax.tree.map(functools.partial(padded, prompts), self.images)
    return dataclasses.replace(self, episode_rows=count, images=seen, **arrays)


def _members(groups: np.ndarray, size: int) -> np.ndarray:
  """Returns the numbers of the members of groups of `size`."""
  return (groups[:, None] * size + np.arange(size)).ravel()


# Finish reasons of completions and episodes that a limit has cut.
_CUT = ("length", "turns", "tokens", "observation", "seconds")


# The containers that models score: both have TOKEN_ARRAYS and a group size.
Rows = Rollouts | TrainExample


def joined(parts: Sequence[Rollouts]) -> Rollouts:
  """Concatenates batches of rollouts, padded to the longest of them."""
  most = max(part.episode_rows for part in parts)
  parts = [part.with_episode_rows(most) for part in parts]
  each = [part._row_arrays() for part in parts]
  names = dict.fromkeys(name for arrays in each for name in arrays)
  arrays = {name: _stacked([x.get(name) for x in each], parts, name) for name in names}
  first, others = parts[0], parts[1:]
  return dataclasses.replace(
    first,
    batch=first.batch.joined([part.batch for part in others]),
    text=[text for part in parts for text in part.text],
    finish_reasons=[reason for part in parts for reason in part.finish_reasons],
    episodes=[episode for part in parts for episode in part.episodes],
    rewards=first.rewards.joined([part.rewards for part in others]),
    scores=np.concatenate([part.scores for part in parts]),
    images=jax.tree.map(lambda *x: np.concatenate(x), *[p.images for p in parts]),
    **arrays,
  )


def _stacked(
  arrays: Sequence[np.ndarray | None], parts: Sequence[Rollouts], name: str
) -> np.ndarray:
  like = next(x for x in arrays if x is not None)

  # No routes are recorded of a part whose environments all failed.
  def none(part):
    return np.zeros((len(part.prompt_ids), 0, *like.shape[2:]), like.dtype)

  arrays = [none(part) if x is None else x for x, part in zip(arrays, parts)]
  width = max(x.shape[1] for x in arrays)
  # Prompts are padded on the left, so that every prompt ends where completions start.
  sides = (1, 0) if name in row_arrays.PROMPTS else (0, 1)
  padding = [[side * (width - x.shape[1]) for side in sides] for x in arrays]

  def pad(x, p):
    return np.pad(x, ((0, 0), p, *((0, 0),) * (x.ndim - 2)))

  return np.concatenate([pad(x, p) for x, p in zip(arrays, padding)])


def token_rewards(
  rollouts: Rollouts, divergence: np.ndarray | None = None, beta: float = 0.0
) -> np.ndarray:
  """Returns the reward of each token, float32 [B, R]; scores that are NaN count as 0.

  The sum over the tokens of a completion is its score, minus `beta` times the sum of
  `divergence` [B, R] if it is given. The score is at the last token; in an episode each
  action has its own reward at its last token, and what is left of the score is at the
  last token of all. If an episode has several rows, the last token of a row also has
  the rewards of the rows after it: they are what follows from it, and a row knows
  nothing of the others.
  """
  mask, scores = rollouts.completion_mask, np.nan_to_num(rollouts.scores.reshape(-1))
  turns = rollouts.turn_rewards
  out = np.zeros(mask.shape, np.float32) if turns is None else turns.copy()
  last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
  each = rollouts.episode_rows
  left = (scores - out.reshape(len(scores), -1).sum(1)).astype(np.float32)
  sums = out.reshape(len(scores), each, -1).sum(2)
  drawn = mask.any(1)
  for row in np.flatnonzero(drawn):
    episode, number = divmod(row, each)
    out[row, last[row]] += left[episode] + sums[episode, number + 1 :].sum()
  return out if divergence is None else out - beta * divergence


def rollouts_of(
  out: RolloutOutput,
  batch: PromptBatch,
  config: RolloutConfig,
  *,
  group_size: int,
  bucketed: bool,
  images: Any = None,
) -> Rollouts:
  """Pads the output of an engine to arrays of fixed widths; rewards are still missing.

  Args:
    out: the completions.
    batch: the prompts that were sampled from.
    config: its token limits are the widths.
    group_size: completions of each prompt.
    bucketed: if True, the width is the smallest power of two that holds the longest
      row, but at most the limit.
    images: see `Rollouts`.

  Raises:
    ValueError: a prompt or completion is longer than the limit.
  """
  width = _width(out.prompt_tokens, config.max_prompt_length, bucketed)
  space = _width(out.tokens, config.max_tokens_to_generate, bucketed)
  return Rollouts(
    batch=batch,
    text=out.text,
    finish_reasons=out.finish_reasons,
    group_size=group_size,
    images=images,
    **row_arrays.of(out.completions(), width, space),
  )


def _width(rows: Sequence[np.ndarray], limit: int, bucketed: bool) -> int:
  """Returns the width of an array that holds the rows."""
  longest = max(map(len, rows))
  if longest > limit:
    raise ValueError(
      f"the engine returned a row of {longest} tokens; expected at most {limit}. The "
      "engine must respect max_prompt_length and max_tokens_to_generate of "
      "RolloutConfig"
    )
  if not bucketed:
    return limit
  return min(limit, batching.bucket(longest, batching.MIN_TOKENS))


def mini_batches(
  example: TrainExample,
  *,
  group: int,
  rows: int,
  iterations: int,
  shuffle: tuple[int, ...] | None,
) -> Iterator[TrainExample]:
  """Yields mini-batches of equal size, for each iteration over the same rollouts.

  The last mini-batch of an iteration is padded with rows of weight 0, so that no
  program is compiled again and no rollout is dropped. A mini-batch in which every row
  has weight 0 is skipped: its update would still move an optimizer that has momentum.

  Args:
    example: the rollouts, group by group.
    group: rows of a group; a group is never split.
    rows: rows of a mini-batch, a multiple of `group`.
    iterations: how many times the rollouts are used.
    shuffle: seed of the order of the groups, which differs in each iteration. None
      keeps the order of the prompts.
  """
  for iteration in range(iterations):
    order = np.arange(example.rows // group)
    if shuffle is not None:
      order = np.random.default_rng((*shuffle, iteration)).permutation(order)
    index = (order[:, None] * group + np.arange(group)).ravel()
    for start in range(0, len(index), rows):
      mini = example.take(index[start : start + rows]).padded_to(rows)
      if mini.completion_mask.any():
        yield mini
