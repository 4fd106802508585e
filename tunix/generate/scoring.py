"""Scores of given completions: log-probabilities, values, rewards.

All functions of this module are pure, traceable and differentiable. Rows have the form
that a rollout returns, with prompts padded on the left and completions on the right.
Before the model runs, the valid tokens of a row are moved to its start. They then have
the same positions as in an unpadded row, and a causal model never attends to the
padding after them. Logits are computed only for the tokens that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.generate.decoders import decoders
from tunix.generate.scored_rows import Ids, Mask, Rows
from tunix.models import calling
from tunix.models.calling import Sequences
from tunix.models.transformer.dense import dropout
from tunix.models.transformer.experts import route_records, routing
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.ops import masks
from tunix.ops.vocabulary.logprobs import TokenScores


class Scores(NamedTuple):
  """The scores of completion tokens, float32 in nats; 0 outside the completions.

  Attributes:
    logps: [B, R], log-probability of each token given the tokens before it.
    entropy: [B, R], entropy of the distribution of each token, or None.
  """

  logps: Any
  entropy: Any


class HeadScores(NamedTuple):
  """`Scores` with those of further tokens.

  Attributes:
    logps, entropy: see `Scores`.
    head: [B, R, k], log-probabilities of `head_ids`.
  """

  logps: Any
  entropy: Any
  head: Any


def score_completions(
  model: nnx.Module,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
  temperature: float = 1.0,
  entropy: bool = False,
  tile_rows: int | None = None,
  tile_tokens: int | None = None,
  prompt_routes: jax.Array | None = None,
  completion_routes: jax.Array | None = None,
  head_ids: jax.Array | None = None,
  images: Any = None,
) -> Scores | HeadScores:
  """Scores completions under softmax(logits / temperature).

  Exact mode (`tile_rows`) computes the rows in tiles of a fixed shape, one after the
  other, and again in the backward pass. The bits of a row's scores then depend on the
  row's tokens, the weights, `tile_rows`, P, R, the dtypes and the compiler of the
  device. They do not depend on the number or order of other rows, on the padding of the
  prompt within P, or on whether gradients are taken. Keep P and R fixed during a run,
  or give `tile_tokens`; the bits then depend on `tile_tokens` instead of P and R. With
  one row per tile, no other row enters. With more rows, the compiled products must
  compute all rows of a tile in the same way. The compiler may also fuse a single tile,
  or one with a gradient, differently. On a CPU, the tiles are therefore computed by the
  batch-invariant form of the model, where it has one. This was tested on CPUs only.
  docs/guides/scoring.md has the cost and the limits.

  Args:
    model: our decoder; or a user's model that is called with (tokens, positions, cache,
      attention_mask) or only with tokens. A user's model computes logits at every
      position.
    prompt_ids: [B, P], padded on the left, at least one token per row.
    prompt_mask: [B, P], True on the prompts' tokens.
    completion_ids: [B, R], padded on the right.
    completion_mask: [B, R], True on the tokens to score. Tokens before the last True
      are part of the row even if they are not scored, such as the output of a tool.
      Tokens after the last True are padding, whatever their ids.
    group_size: G, number of consecutive rows with the same prompt. Each prompt is then
      computed once, in the forward and the backward pass; B must be a multiple of G.
      The scores of a group whose prompts differ are NaN. Results equal those of G = 1
      up to rounding. Only our decoder supports G above 1.
    temperature: temperature of the softmax, above 0.
    entropy: if True, the entropy is computed as well.
    tile_rows: rows of a tile in exact mode; None computes all rows at once. It cannot
      be combined with a `group_size` above 1.
    tile_tokens: tokens per row of a tile, at least P + R. Logits are then computed at
      all of these positions. Only with `tile_rows`.
    prompt_routes, completion_routes: experts of the tokens, [B, P, M, k] and [B, R, M,
      k], as a sampler recorded them (see experts/route_records.py). The model uses them
      in place of its routers' choice; the routers still compute their weights. With a
      `group_size` above 1, prompts use the experts of the first row of their group.
      None: the routers choose.
    head_ids: int [B, R, k], further tokens to score at the position of each completion
      token, which makes the result `HeadScores`. They exclude exact mode, and meshes
      that split the tokens of a row.
    images: images of the prompts, the argument `images` of a `VisionLanguageModel`. B
      is a multiple of their rows, and adjacent rows share the images of a prompt. In
      exact mode the tower computes them again for each row.

  Raises:
    ValueError: shapes or options contradict each other, dropout is on in exact mode, or
      the model returns scores instead of logits.
  """
  rows = Rows.checked(
    *(prompt_ids, prompt_mask, completion_ids, completion_mask),
    prompt_routes=prompt_routes,
    completion_routes=completion_routes,
    images=images,
  )
  _check_tiles(model, rows, group_size, tile_rows, tile_tokens)
  in_place = group_size == 1 and splits_tokens(model)
  if head_ids is not None and (in_place or tile_rows is not None):
    raise ValueError(
      f"head_ids are given (score centering) and tile_rows is {tile_rows}; expected "
      "None, and a mesh without an axis cp above 1. Leave head_ids out"
    )

  def scores(model: nnx.Module, states: jax.Array, targets: jax.Array) -> TokenScores:
    with jax.named_scope("unembed"):
      return calling.adapt(model).token_logps(
        states,
        targets,
        temperature=temperature,
        entropy=entropy,
        exact=tile_rows is not None,
      )

  def one(model: nnx.Module, rows: Rows) -> Scores | HeadScores:
    # Three paths give the same numbers: for tokens split over devices (`cp`), for
    # groups with a shared prompt, and for plain rows. `_states` has the last two.
    scored = jnp.zeros(())
    if in_place:
      out = _scored_in_place(model, rows, scores, tile_tokens)
    else:
      scored = _states(model, rows, group_size, tile_tokens)
      targets = rows.completions
      # `tile_tokens` positions are scored instead of R, so that no matrix product has a
      # shape, and therefore bits, that depend on R. The extra scores are cut off below.
      if tile_tokens is not None:
        short = tile_tokens - targets.shape[1]
        targets = jnp.pad(targets, ((0, 0), (0, short)))
      out = scores(model, scored, targets)
    size = rows.completions.shape[1]
    keep = lambda x: jnp.where(rows.completion_mask, x[:, :size], 0.0)
    own = Scores(*jax.tree.map(keep, tuple(out)))
    if head_ids is None:
      return own
    head = calling.adapt(model).logps_at(scored, head_ids, temperature=temperature)
    kept = jnp.where(rows.completion_mask[..., None], head, 0.0)
    return HeadScores(*own, head=kept)

  return (
    one(model, rows) if tile_rows is None else _by_tiles(model, one, rows, tile_rows)
  )


def completion_hidden(
  model: nnx.Module,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
) -> Float[Array, "B R D"]:
  """Returns the final hidden states at the positions that predict completion tokens.

  The arguments are those of `score_completions`.

  Raises:
    ValueError: the model does not offer its hidden states, or shapes contradict each
      other.
  """
  if calling.adapt(model).builds_logits:
    raise ValueError(
      f"{type(model).__name__} does not offer its hidden states (return_hidden= and "
      "unembedding()): use its logits"
    )
  rows = Rows.checked(prompt_ids, prompt_mask, completion_ids, completion_mask)
  return _states(model, rows, group_size)


def completion_logits(
  model: nnx.Module,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
  images: Any = None,
) -> Float[Array, "B R V"]:
  """Returns the logits at the positions that predict completion tokens, of any model.

  Exact KL and distillation need the whole distribution of each token. It takes memory
  for B * R * V numbers. Arguments and errors are those of `score_completions`.
  """
  rows = Rows.checked(
    prompt_ids, prompt_mask, completion_ids, completion_mask, images=images
  )
  states = _states(model, rows, group_size)
  return calling.adapt(model).unembed(states)


def score_values(
  critic: nnx.Module,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
  images: Any = None,
) -> Float[Array, "B R"]:
  """Returns a critic's value before each completion token is chosen.

  The value of a token is the critic's score at the position that predicts it; float32,
  0 outside the completions.

  Args:
    critic: a model with one score per position (`heads.with_scores`), or a user's model
      that returns [B, T, 1]. The other arguments are those of `score_completions`.

  Raises:
    ValueError: the model returns more than one number per position.
  """
  rows = Rows.checked(
    prompt_ids, prompt_mask, completion_ids, completion_mask, images=images
  )
  values = _one_score(critic, _states(critic, rows, group_size))
  return jnp.where(rows.completion_mask, values, 0.0)


def score_sequences(
  reward_model: nnx.Module,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  images: Any = None,
) -> Float[Array, " B"]:
  """Returns a reward model's score at the last token of each row, float32.

  If a completion is empty, the last token of the row is that of its prompt. The
  arguments are those of `score_values`.

  Raises:
    ValueError: the model returns more than one number per position.
  """
  rows = Rows.checked(
    prompt_ids, prompt_mask, completion_ids, completion_mask, images=images
  )
  lengths = jnp.sum(rows.prompt_mask, axis=1) + jnp.sum(rows.extent, axis=1)
  # In `rows.joined` a row begins at slot 0, so its last token is in slot length - 1.
  last = (lengths - 1)[:, None]
  out = _run(reward_model, rows.joined(), last, seen=rows.seen())
  return _one_score(reward_model, out)[:, 0]


def _check_tiles(model, rows, group_size, tile_rows, tile_tokens) -> None:
  if tile_rows is None:
    if tile_tokens is not None:
      raise ValueError(
        f"tile_tokens is {tile_tokens} and tile_rows is None; expected both for exact "
        "mode, or neither. Give tile_rows, or leave tile_tokens out"
      )
    return
  if tile_rows < 1:
    raise ValueError(f"tile_rows is {tile_rows}, expected at least 1")
  if group_size != 1:
    raise ValueError(
      f"tile_rows is {tile_rows} and group_size is {group_size}: exact mode computes "
      "every row by itself, leave one of them out"
    )
  width = rows.prompts.shape[1] + rows.completions.shape[1]
  if tile_tokens is not None and tile_tokens < width:
    raise ValueError(
      f"tile_tokens is {tile_tokens}; expected at least {width}, the tokens of prompt "
      "and completion. Raise it"
    )
  if dropout.is_on(model):
    raise ValueError(
      f"tile_rows is {tile_rows} and the model has dropout on; exact mode expects "
      "dropout off. Call model.eval() before, or leave tile_rows out"
    )


def _by_tiles(
  model: nnx.Module, one: Callable[[Any, Rows], Any], rows: Rows, size: int
) -> Any:
  """Runs `one` over tiles of `size` rows, all by the same compiled program."""
  with routing.unlogged(model):
    graph, state = nnx.split(model)
  count = rows.prompts.shape[0]
  # A tile may have a part of a group.
  each = lambda x: jnp.repeat(jnp.asarray(x), count // len(x), axis=0)
  rows = rows._replace(images=jax.tree.map(each, rows.images))

  # The last tile is filled with empty rows, whose scores are dropped.
  def cut(x):
    filled = jnp.pad(x, ((0, -count % size), *((0, 0),) * (x.ndim - 1)))
    return filled.reshape(-1, size, *x.shape[1:])

  # Without the checkpoint, a program with gradients also stores intermediate results of
  # the forward pass. The compiler then fuses it differently, which changes its bits.
  def tile(rows):
    tile_model = nnx.merge(graph, state)
    # XLA inlines a loop of one tile and fuses it with its surroundings, which changes
    # bits, except in batch-invariant form. With images, that was not compared.
    if isinstance(tile_model, Transformer) and rows.images is None:
      tile_model.set_invariant_if_possible()
    return one(tile_model, rows)

  out = jax.lax.map(jax.checkpoint(tile), jax.tree.map(cut, rows))
  return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:count], out)


def _states(
  model: nnx.Module, rows: Rows, group_size: int, tile_tokens: int | None = None
) -> jax.Array:
  """Runs the model and picks the positions that predict completion tokens.

  Returns:
    Hidden states [B, R, D], or logits [B, R, V] of a model without them; with
    `tile_tokens` that number of positions instead of R.
  """
  if group_size != 1:
    return _shared_states(model, rows, group_size)
  tokens, routes = rows.joined(tile_tokens), rows.joined_routes(tile_tokens)
  at = rows.predicting_slots(tile_tokens)
  return _run(model, tokens, at, routes, rows.seen())


def splits_tokens(model: nnx.Module) -> bool:
  """Returns True if the mesh axis `cp` splits the tokens of a row over devices."""
  rules = decoders.sharding_rules(model)
  return rules is not None and sharding.token_axis(rules) is not None


def _scored_in_place(
  model: nnx.Module,
  rows: Rows,
  scores: Callable[[Any, jax.Array, jax.Array], TokenScores],
  tile_tokens: int | None,
) -> TokenScores:
  """Scores all tokens on their devices, then picks the scores of the completions.

  With `cp`, the tokens of a row are on several devices. Picking scores moves one number
  per token between devices; picking hidden states would move D numbers per token.
  """
  tokens = rows.joined(tile_tokens)
  replay = route_records.replayed(model, rows.joined_routes(tile_tokens))
  extra = {**replay, **rows.seen()}
  states = calling.adapt(model).states(Sequences(tokens, extra=extra))
  out = scores(model, states, masks.next_token_targets(tokens))
  at = jnp.clip(rows.predicting_slots(), 0, tokens.shape[1] - 1)
  return jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=1), out)


def _run(
  model: nnx.Module,
  tokens: jax.Array,
  at: jax.Array,
  routes: jax.Array | None = None,
  seen: Mapping[str, Any] | None = None,
) -> jax.Array:
  """Returns hidden states, or logits, at the slots `at` [B, R].

  A slot out of range is replaced by the nearest valid slot, and the caller masks its
  score.
  """
  extra = {**route_records.replayed(model, routes), **(seen or {})}
  out = calling.adapt(model).states(Sequences(tokens, extra=extra))
  at = jnp.clip(at, 0, tokens.shape[1] - 1)
  return jnp.take_along_axis(out, at[..., None], axis=1)


def _shared_states(model: nnx.Module, rows: Rows, group_size: int) -> jax.Array:
  """Returns `_states` of rows in groups of G with one prompt, which runs once."""
  count, width = rows.prompts.shape
  if group_size < 1 or count % group_size:
    raise ValueError(
      f"group_size is {group_size}, expected at least 1 and a divisor of the {count} "
      "rows"
    )
  language_model = calling.adapt(model)
  if not language_model.shares_prompts:
    raise ValueError(
      f"group_size is {group_size}; expected 1 for {type(model).__name__}. Only our "
      "decoder without batch_invariant runs rows with a shared prompt. Set group_size=1"
    )
  layout = SharedPrompt(width, group_size)
  prompts, mask = rows.prompts[::group_size], rows.prompt_mask[::group_size]
  # One row per group: the prompt, then its G completions. Segment 0 is the padding of
  # the prompt, segment 1 everything else.
  tokens = layout.rows(prompts, rows.completions)
  valid = layout.rows(mask, jnp.ones_like(rows.completions, bool))
  segments, routes = valid.astype(jnp.int32), None
  if rows.prompt_routes is not None and rows.completion_routes is not None:
    routes = layout.rows(rows.prompt_routes[::group_size], rows.completion_routes)
  extra = {"shared_prompt": layout, **route_records.replayed(model, routes)}
  extra |= rows.seen()
  out = language_model.states(Sequences(tokens, segment_ids=segments, extra=extra))
  # Each sequence has P prompt states and R completion states. The last prompt state
  # predicts the first completion token, and the last completion state predicts no
  # token of the row.
  out = layout.sequences(out)[:, width - 1 : -1]
  # Inside a traced function the contents of arrays are unknown, so different prompts in
  # a group cannot raise an error. Their scores are NaN instead of wrong numbers.
  alike = lambda x, first: jnp.all(x == jnp.repeat(first, group_size, axis=0), axis=1)
  same = alike(rows.prompts, prompts) & alike(rows.prompt_mask, mask)
  return jnp.where(same[:, None, None], out, jnp.nan)


def _one_score(model: nnx.Module, states: jax.Array) -> jax.Array:
  """Returns float32 [B, R] scores of `_states`."""
  scores = calling.adapt(model).unembed(states)
  if scores.shape[-1] != 1:
    raise ValueError(
      f"{type(model).__name__} returns {scores.shape[-1]} numbers per position; "
      "expected 1 for a critic or reward model. See heads.with_scores"
    )
  return scores[..., 0].astype(jnp.float32)
