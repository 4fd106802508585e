"""The arrays of a launch: slots, blocks of prompts, and results.

Letters in shapes:

    B  slots
    C  tokens that a slot can draw in one launch, at most
    D  width of an embedding
    E  stop ids of a slot, at most
    F  rows of the table of image vectors
    L  tokens of a completion, at most (`EngineConfig.max_tokens`)
    M  layers with experts
    N  blocks of a round
    P  pairs of rotary dimensions
    Q  tokens of a block (`EngineConfig.page_tokens`)
    R  rounds that prefill
    V  tokens of the vocabulary
    k  experts of a token
    n  groups of D columns of that table
    t  most likely tokens that are returned
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.generate.engine.device import token_sampling
from tunix.generate.engine.device.token_sampling import DrawnTokens
from tunix.models.transformer.experts.route_records import RouteForm

Leaf = Any  # a traced array inside a program, a host array where it is called


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """The completions in the slots.

  Attributes:
    last: int32 [B], the token that each slot runs next.
    position: int32 [B], its position.
    index: int32 [B], number of the next drawn token in its completion.
    limit: int32 [B], number of tokens at which a completion ends.
    active: bool [B], True for slots that decode.
    is_waiting: bool [B], True for slots that draw their first token in this launch
      and decode only after their pages are copied.
    stop_ids: int32 [B, E], ids that end the completion, padded by `batching.NO_TOKEN`.
    history: int32 [B, L], all tokens of the completion; [B, 0] if the engine makes no
      drafts.
    drafted: int32 [B], number of tokens with keys of the draft model.
    shift: int32 [B], offset that images add to the rotary position of `last`. None
      until the first request with such an offset.
  """

  last: Leaf
  position: Leaf
  index: Leaf
  limit: Leaf
  active: Leaf
  is_waiting: Leaf
  stop_ids: Leaf
  history: Leaf
  drafted: Leaf
  shift: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOutput:
  """The tokens that a launch has drawn: written on the device, read on the host.

  Attributes:
    count: int32 [B], number of drawn tokens.
    chosen: the drawn tokens, [B, C] and [B, C, ...]; `count` columns of a row are
      valid.
    stopped: bool [B], True if one of `stop_ids` was drawn.
    is_not_finite: bool [B], True if a logit was NaN or +inf, or if no token was
      allowed. The token before is then the last one.
    rounds: int32 scalar, number of rounds.
    turns: int32 scalar, sum, over the rounds of `decode`, of the number of active
      slots.
    decoded: int32 scalar, tokens drawn in rounds of `decode`.
    proposed, accepted: int32 scalars, drafts that were run, and drafts that were right.
    watched, predicted: int32 scalars. A slot that decodes without drafts compares its
      token with the draft that it would have had. `watched` is the number of
      comparisons, and `predicted` the number of equal pairs.
  """

  count: jax.Array
  chosen: DrawnTokens
  stopped: jax.Array
  is_not_finite: jax.Array
  rounds: jax.Array
  turns: jax.Array
  decoded: jax.Array
  proposed: jax.Array
  accepted: jax.Array
  watched: jax.Array
  predicted: jax.Array


class Vectors(NamedTuple):
  """The vectors of images in blocks.

  Attributes:
    table: float [F, n * D], one row for each soft token. Columns 0 to D replace the
      embedding. Each further group of D columns is added to the output of one of the
      first n - 1 layers (DeepStack).
    index: int32 [R, N, Q], row of the table for each token; -1 for text.
    last: int32 [R, N, Q], position of the last token that each token attends to; None:
      its own.
    rope: int32 [R, N, Q, P], offsets of the rotary positions of each token; None: no
      offsets.
  """

  table: Leaf
  index: Leaf
  last: Leaf | None = None
  rope: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
  """The blocks of R rounds that prefill, N blocks of Q tokens each.

  Attributes:
    tokens: int32 [R, N, Q].
    targets: int32 [R, N, Q], the token after each, whose log-prob may be wanted.
    slots: int32 [R, N].
    starts: int32 [R, N], position of the first token.
    counts: int32 [R, N], number of tokens; 0 for a block that only fills the round.
    draws: int32 [R, B], number in N * Q of the token after which the slot draws its
      first token; -1: the slot draws none.
    ends: int32 [R, B], position of that first token.
    scores: bool scalar, log-probs of the targets are wanted.
    vectors: vectors of images; None: the blocks have none.
  """

  tokens: Leaf
  targets: Leaf
  slots: Leaf
  starts: Leaf
  counts: Leaf
  draws: Leaf
  ends: Leaf
  scores: Leaf
  vectors: Vectors | None = None


class PromptOut(NamedTuple):
  """Records of the tokens of prompts.

  Attributes:
    logps: log-probs of the targets, [R, N * Q].
    top_ids, top_logps: the most likely tokens, [R, N * Q, t].
    routes: experts of the tokens, [R, N * Q, M, k]; None if they are not recorded.
  """

  logps: jax.Array
  top_ids: jax.Array
  top_logps: jax.Array
  routes: jax.Array | None = None


class ModelOutput(NamedTuple):
  """Results of the model that the slots draw from.

  Attributes:
    logits: float32 [B, V].
    routes: experts [B, M, k] of the tokens that were run; None if not recorded.
    hidden: [T, D], hidden states of all tokens of the round, for a draft model that
      reads them; else None.
    drawn_from: [B, D], those that the logits come from; or None.
  """

  logits: jax.Array
  routes: jax.Array | None = None
  hidden: jax.Array | None = None
  drawn_from: jax.Array | None = None


def empty(
  slots: int, columns: int, tops: int, form: RouteForm | None = None, head: int = 0
) -> LaunchOutput:
  """Returns a `LaunchOutput` without tokens.

  Args:
    slots, columns: sizes B and C.
    tops: number t of most likely tokens.
    form: form of recorded routes; None if routes are not recorded.
    head: see `token_sampling.choose`.
  """

  def number():
    return jnp.zeros((), jnp.int32)

  return LaunchOutput(
    count=jnp.zeros(slots, jnp.int32),
    chosen=token_sampling.empty((slots, columns), tops, form, head),
    stopped=jnp.zeros(slots, bool),
    is_not_finite=jnp.zeros(slots, bool),
    rounds=number(),
    turns=number(),
    decoded=number(),
    proposed=number(),
    accepted=number(),
    watched=number(),
    predicted=number(),
  )


class Round(NamedTuple):
  """The state that a round passes on.

  Attributes:
    slots: the completions.
    store: the cache.
    out: the results.
    draft_store: the cache of the draft model; None while it does not run.
  """

  slots: Slots
  store: Any
  out: LaunchOutput
  draft_store: Any = None
