"""Samples the next token of each row by its own rules, with its log-probabilities.

The functions are those of `sampling` and `filters`. A rule that no row of a batch uses
costs nothing, except on GPUs (see `Rules.when`). A row's token depends on its own rules
only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.generate.drawing import filters, sampling
from tunix.models.transformer.experts.route_records import RouteForm
from tunix.ops.vocabulary import invariant
from tunix.utils import mesh as mesh_lib

Leaf = Any  # a traced array inside a program, a host array where it is called


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The rules of every slot.

  `uses` names what the program is compiled for, and the flags say what any slot uses
  now: a program without filters compiles faster, and one with them runs faster while no
  slot has a filter.

  Attributes:
    keys: uint32 [B, 2], data of the random key of each request.
    rows: int32 [B], number of the completion under its key.
    temperature: float32 [B]; 0: the most likely token.
    filter_values: values [B] of all filters, by name; see `filters.OFF`.
    bias_ids: int32 [B, F], ids with a bias, padded by `batching.NO_TOKEN`.
    bias: float32 [B, F].
    draws: bool, some temperature is above 0.
    filters: bool, some filter is on.
    biases: bool, some row has a bias.
    scores: bool, log-probabilities are wanted.
    tops: bool, the most likely tokens are wanted.
    uses: names of the flags that may be True; "prompts" if log-probs of prompts are
      wanted; and "invariant" for a model that is `batch_invariant`.
  """

  keys: Leaf
  rows: Leaf
  temperature: Leaf
  filter_values: Mapping[str, Leaf]
  bias_ids: Leaf
  bias: Leaf
  draws: Leaf
  filters: Leaf
  biases: Leaf
  scores: Leaf
  tops: Leaf
  uses: frozenset[str] = dataclasses.field(metadata={"static": True})

  def when(
    self,
    name: str,
    then: Callable[[], Any],
    otherwise: object,
    *,
    is_cheap: bool = False,
  ) -> Any:
    """Returns `then()` if the flag is True, and else `otherwise`.

    A GPU computes what is cheap in any case: it would wait for the host at a branch.
    """
    if name not in self.uses:
      return otherwise
    flag = getattr(self, name)
    if is_cheap and mesh_lib.context_platform() == "gpu":
      return jax.tree.map(lambda x, y: jnp.where(flag, x, y), then(), otherwise)
    return jax.lax.cond(flag, then, lambda: otherwise)


def repeated(rules: Rules, count: int) -> Rules:
  """Returns the rules for `count` consecutive rows of each slot."""
  return jax.tree.map(
    lambda x: jnp.repeat(jnp.asarray(x), count, axis=0) if jnp.ndim(x) else x, rules
  )


class DrawnTokens(NamedTuple):
  """The tokens of one position of every row, with the columns of `tokens.Tokens`.

  Attributes:
    ids: int32 [B].
    logps: float32 [B], in nats, under the model's own distribution; 0 if not wanted.
    sampling_logps: float32 [B], under the distribution drawn from; 0 at temperature 0.
    top_ids: int32 [B, t], most likely tokens; 0 if not wanted.
    top_logps: float32 [B, t].
    routes: [B, M, k], the experts of the token that was run to draw each token, see
      experts/route_records.py; None if routes are not recorded.
    head_ids, head_probs: int32 and float32 [B, k], the most likely tokens of the
      distribution drawn from; 0 at temperature 0. None if they are not recorded.
  """

  ids: jax.Array
  logps: jax.Array
  sampling_logps: jax.Array
  top_ids: jax.Array
  top_logps: jax.Array
  routes: jax.Array | None = None
  head_ids: jax.Array | None = None
  head_probs: jax.Array | None = None

  @property
  def sizes(self) -> tuple[int, int]:
    """The arguments `tops` and `head` of `choose`."""
    head = 0 if self.head_ids is None else self.head_ids.shape[-1]
    return self.top_ids.shape[-1], head


def empty(
  shape: tuple[int, ...], tops: int, form: RouteForm | None, head: int = 0
) -> DrawnTokens:
  """Returns zeros; `form` is that of recorded routes, or None."""
  return DrawnTokens(
    jnp.zeros(shape, jnp.int32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, tops), jnp.int32),
    jnp.zeros((*shape, tops), jnp.float32),
    None if form is None else jnp.zeros((*shape, *form.shape), form.dtype),
    *_no_head(shape, head),
  )


def choose(
  logits: Float[Array, "B V"],
  rules: Rules,
  index: Int[Array, " B"],
  allowed: Int[Array, "B W"] | None = None,
  tops: int = 0,
  head: int = 0,
) -> tuple[DrawnTokens, Bool[Array, " B"]]:
  """Chooses the token of every row.

  Args:
    logits: the model's logits, float32.
    rules: the rules of the rows.
    index: number of the token in its completion; a row's draw depends on its key, its
      number and this.
    allowed: uint32 [B, ceil(V / 32)] bits of allowed tokens (`request.Matcher.mask`);
      None: all tokens.
    tops: number t of most likely tokens under the model's own distribution.
    head: number k of most likely tokens of the distribution drawn from.

  Returns:
    The tokens, and False for a row if a logit is NaN or +inf, or if no token is
    allowed.
  """
  biased = rules.when("biases", lambda: _biased(logits, rules), logits)
  if allowed is not None:
    biased = jnp.where(_bits(allowed, logits.shape[1]), biased, -jnp.inf)
  best = sampling.greedy(biased)
  tokens, drawn, head_ids, head_probs = rules.when(
    "draws",
    lambda: _drawn(biased, rules, index, best, head),
    (best, _zeros(best), *_no_head(best.shape, head)),
    is_cheap=not head,
  )
  logps = rules.when(
    "scores",
    lambda: logps_of(rules)(logits, tokens),
    _zeros(best),
    is_cheap=True,
  )
  top_ids, top_logps = rules.when(
    "tops", lambda: most_likely(logits, tops), _no_tops(best, tops)
  )
  # The best logit is NaN if any is. A sampled token would not show it.
  at = jnp.take_along_axis(biased, best[:, None], axis=1)[:, 0]
  chosen = DrawnTokens(
    *(tokens, logps, drawn, top_ids, top_logps),
    head_ids=head_ids,
    head_probs=head_probs,
  )
  return chosen, jnp.isfinite(at)


def _biased(logits: jax.Array, rules: Rules) -> jax.Array:
  rows = jnp.arange(logits.shape[0])[:, None]
  return logits.at[rows, rules.bias_ids].add(rules.bias, mode="drop")


def _drawn(
  logits: jax.Array, rules: Rules, index: jax.Array, best: jax.Array, head: int
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """Returns sampled tokens, their log-probs and the head of their distribution.

  At temperature 0 the token is the best one, and the others are 0.
  """
  is_sampled = rules.temperature > 0
  scaled = sampling.scale(logits, jnp.where(is_sampled, rules.temperature, 1))

  def filtered():
    return filters.keep(scaled, **rules.filter_values)

  # A filter that is off must not cut a token of its row by a rounding error.
  allowed = rules.when("filters", filtered, scaled)
  scored = allowed
  if "invariant" in rules.uses:  # as trainers divide by the temperature
    whole = invariant.tempered(logits, jnp.where(is_sampled, rules.temperature, 1))
    scored = jnp.where(jnp.isfinite(allowed), whole, -jnp.inf)
  keys = jax.vmap(jax.random.wrap_key_data)(rules.keys)
  fold = jax.vmap(jax.random.fold_in)
  sampled = sampling.sample(fold(fold(keys, rules.rows), index), allowed)
  logps = rules.when(
    "scores",
    lambda: logps_of(rules)(scored, sampled),
    _zeros(best),
    is_cheap=True,
  )

  def pick(x, y):
    return jnp.where(is_sampled, x, y)

  if not head:
    return pick(sampled, best), pick(logps, 0), None, None
  ids, values = most_likely(allowed, head)
  probs = jnp.where(is_sampled[:, None], jnp.exp(values), 0)
  return pick(sampled, best), pick(logps, 0), ids, probs


def logps_of(rules: Rules) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the function of log-probabilities that suits the model."""
  is_invariant = "invariant" in rules.uses
  return invariant.token_logps if is_invariant else sampling.token_logps


def most_likely(
  logits: Float[Array, "B V"], tops: int
) -> tuple[Int[Array, "B t"], Float[Array, "B t"]]:
  """Returns the most likely tokens and their log-probabilities, in nats."""
  if not tops:
    return _no_tops(logits[:, 0], 0)
  best, ids = jax.lax.top_k(logits, min(tops, logits.shape[1]))
  values = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  missing = ((0, 0), (0, tops - best.shape[1]))  # a vocabulary of fewer tokens
  return (
    jnp.pad(ids.astype(jnp.int32), missing),
    jnp.pad(values, missing, constant_values=-jnp.inf),
  )


def _no_head(
  shape: tuple[int, ...], head: int
) -> tuple[jax.Array | None, jax.Array | None]:
  if not head:
    return None, None
  return jnp.zeros((*shape, head), jnp.int32), jnp.zeros((*shape, head), jnp.float32)


def _no_tops(like: jax.Array, tops: int) -> tuple[jax.Array, jax.Array]:
  shape = (like.shape[0], tops)
  return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _zeros(like: jax.Array) -> jax.Array:
  return jnp.zeros(like.shape, jnp.float32)


def _bits(words: Int[Array, "B W"], size: int) -> Bool[Array, "B V"]:
  """Returns bit v % 32 of word v // 32 for each v below `size`."""
  each = (words[:, :, None] >> jnp.arange(32, dtype=words.dtype)) & 1
  return each.reshape(words.shape[0], -1)[:, :size].astype(bool)
