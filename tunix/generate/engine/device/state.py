"""The arrays of a launch: slots, blocks of prompts, and results."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.generate.engine.device import token_sampling
from tunix.generate.engine.device.token_sampling import Chosen
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
    holds: bool [B], True for slots that draw a first token and wait for their pages.
    stop_ids: int32 [B, E], ids that end it, padded by `batching.NO_TOKEN`.
    history: int32 [B, M], all tokens, for drafts; [B, 0] without.
    drafted: int32 [B], number of tokens with keys of the draft model.
    shift: int32 [B], what images change the rotary position of `last` by; None: the
      engine has had no images that do.
  """

  last: Leaf
  position: Leaf
  index: Leaf
  limit: Leaf
  active: Leaf
  holds: Leaf
  stop_ids: Leaf
  history: Leaf
  drafted: Leaf
  shift: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Out:
  """The tokens that a launch has drawn: written on the device, read on the host.

  Attributes:
    count: int32 [B], number of drawn tokens.
    chosen: the drawn tokens, [B, C] and [B, C, ...]; `count` columns of a row are
      valid.
    stopped: bool [B], True if one of `stop_ids` was drawn.
    bad: bool [B], True if a logit was not finite; the token before is the last.
    rounds: int32 scalar, number of rounds.
    turns: int32 scalar, rounds of `decode`, summed over the slots that decoded in them.
    decoded: int32 scalar, tokens that they drew.
    proposed, accepted: int32 scalars, drafts that were run, and those that were right.
    watched, predicted: int32 scalars. A slot that decodes without drafts compares its
      token with the draft that it would have had: the number of comparisons, and how
      many were equal.
  """

  count: jax.Array
  chosen: Chosen
  stopped: jax.Array
  bad: jax.Array
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
    table: the vectors [F, n D]: those of the embeddings, and those that are added
      after the first n - 1 layers.
    index: int32 [R, N, Q], row of the table that replaces the embedding of each token;
      -1: none.
    last: int32 [R, N, Q], position of the last token that each token attends to; None:
      its own.
    rope: int32 [R, N, Q, R/2], what is added to the rotary positions of each token;
      None: nothing.
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


class Ran(NamedTuple):
  """Results of the model that the slots draw from.

  Attributes:
    logits: float32 [B, V].
    routes: experts [B, M, k] of the tokens that were run; None if not recorded.
  """

  logits: jax.Array
  routes: jax.Array | None = None


def empty(
  slots: int, columns: int, tops: int, form: RouteForm | None = None, head: int = 0
) -> Out:
  """Returns an `Out` without tokens; `form` is that of recorded routes, or None."""

  def number():
    return jnp.zeros((), jnp.int32)

  return Out(
    count=jnp.zeros(slots, jnp.int32),
    chosen=token_sampling.empty((slots, columns), tops, form, head),
    stopped=jnp.zeros(slots, bool),
    bad=jnp.zeros(slots, bool),
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
  out: Out
  draft_store: Any = None
