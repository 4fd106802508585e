"""Scores of completions that exist: log-probabilities, values, rewards.

Everything here is traced, pure and differentiable. Rows come as a rollout leaves them:
prompts padded on the left, completions on the right. They are moved together before
the model runs, so that a row's tokens stand where they would stand alone; causal models
never look at what follows. Logits are computed only where they are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models import calling
from tunix.models.calling import Sequences
from tunix.models.transformer import dropout, sharding
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.ops import masks
from tunix.ops.logprobs import TokenScores

Ids = Int[Array, "B T"]
Mask = Bool[Array, "B T"] | Int[Array, "B T"]


class Scores(NamedTuple):
  """Of completion tokens, float32 in nats; 0 outside the completions.

  Attributes:
    logps: [B, R] log-probability of each token given what precedes it.
    entropy: [B, R] of the distribution that each token is drawn from, or None.
  """

  logps: Any
  entropy: Any


class _Rows(NamedTuple):
  """Prompts [B, P] and completions [B, R], padding set to token 0."""

  prompts: jax.Array
  prompt_mask: jax.Array
  completions: jax.Array
  completion_mask: jax.Array


def score_completions(
  model: Any,
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
) -> Scores:
  """Log-probabilities, and entropies, of completions under softmax(logits /
  temperature).

  Exact mode (`tile_rows`): the rows are computed in tiles of a fixed shape, one after
  the other, and again in the backward pass. A row's bits then depend on its own tokens,
  the weights, `tile_rows`, P, R, the program's dtypes and the compiler for its device:
  not on the number or order of the other rows, nor on how the prompt is padded within
  P, nor on whether gradients are taken. Keep P and R fixed for a run, or give
  `tile_tokens`: then the bits depend on it instead of P and R. With one row a tile this
  holds by construction; with more the compiled products must treat all rows of a tile
  alike, which is tested on CPUs. docs/guides/scoring.md has the cost.

  Args:
    model: our decoder, or a user's model in the form (tokens, positions, cache,
      attention_mask) or of tokens alone, whose logits are then computed everywhere.
    prompt_ids, prompt_mask: [B, P], padded on the left, at least one token a row.
    completion_ids, completion_mask: [B, R]. Tokens before the last one of the mask are
      seen by those after them even where they are not scored themselves; what comes
      after it is padding, whatever its ids.
    group_size: G: the rows come G by G with the same prompt, and each prompt is
      computed once, in the forward and the backward pass; B must be a multiple of G.
      Rows whose prompts differ within a group become NaN. Equal to G = 1 up to
      rounding. Our decoder only.
    temperature: above 0.
    entropy: whether to compute it.
    tile_rows: rows of a tile; None: all rows at once. Not with a group size.
    tile_tokens: tokens of a tile's row, at least P + R; logits are then computed at all
      of them. Only with `tile_rows`.

  Raises:
    ValueError: shapes or options that contradict each other, dropout in exact mode, or
      a model that gives scores instead of logits.
  """
  rows = _rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
  _check_tiles(model, rows, group_size, tile_rows, tile_tokens)

  def scores(model: Any, states: jax.Array, targets: jax.Array) -> TokenScores:
    with jax.named_scope("unembed"):
      return calling.adapt(model).token_logps(
        states, targets, temperature=temperature, entropy=entropy
      )

  def one(model: Any, rows: _Rows) -> Scores:
    if group_size == 1 and _splits_tokens(model):
      out = _scored_in_place(model, rows, scores, tile_tokens)
    else:
      scored = _states(model, rows, group_size, tile_tokens)
      targets = rows.completions
      if tile_tokens is not None:
        short = tile_tokens - targets.shape[1]
        targets = jnp.pad(targets, ((0, 0), (0, short)))
      out = scores(model, scored, targets)
    size = rows.completions.shape[1]
    keep = lambda x: jnp.where(rows.completion_mask, x[:, :size], 0.0)
    return Scores(*jax.tree.map(keep, tuple(out)))

  return (
    one(model, rows) if tile_rows is None else _by_tiles(model, one, rows, tile_rows)
  )


def completion_hidden(
  model: Any,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
) -> Float[Array, "B R D"]:
  """Final hidden states at the positions that predict the completion tokens.

  Args: see `score_completions`.

  Raises:
    ValueError: a model that does not offer its hidden states, or shapes that contradict
      each other.
  """
  if calling.adapt(model).builds_logits:
    raise ValueError(
      f"{type(model).__name__} does not offer its hidden states (return_hidden= and "
      "unembedding()): use its logits"
    )
  rows = _rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
  return _states(model, rows, group_size)


def completion_logits(
  model: Any,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
) -> Float[Array, "B R V"]:
  """Logits at the positions that predict the completion tokens, of any model.

  For what needs the whole distribution (exact KL, distillation): the memory grows with
  the vocabulary.

  Args, Raises: see `score_completions`.
  """
  rows = _rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
  states = _states(model, rows, group_size)
  return calling.adapt(model).unembed(states)


def score_values(
  critic: Any,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
  *,
  group_size: int = 1,
) -> Float[Array, "B R"]:
  """A critic's value at the position that predicts each completion token, that is
  before the token is chosen; float32, 0 outside the completions.

  Args:
    critic: a model with one score a position (`heads.with_scores`), or a user's model
      that gives [B, T, 1].
    prompt_ids, prompt_mask, completion_ids, completion_mask, group_size: see
      `score_completions`.

  Raises:
    ValueError: the model gives more than one number a position.
  """
  rows = _rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
  values = _one_score(critic, _states(critic, rows, group_size))
  return jnp.where(rows.completion_mask, values, 0.0)


def score_sequences(
  reward_model: Any,
  prompt_ids: Ids,
  prompt_mask: Mask,
  completion_ids: Ids,
  completion_mask: Mask,
) -> Float[Array, " B"]:
  """A reward model's score at the last token of each row, the prompt's if the
  completion is empty; float32.

  Args: see `score_values`.

  Raises:
    ValueError: the model gives more than one number a position.
  """
  rows = _rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
  lengths = jnp.sum(rows.prompt_mask, axis=1) + jnp.sum(_extent(rows), axis=1)
  last = (lengths - 1)[:, None]
  return _one_score(reward_model, _run(reward_model, _joined(rows), last))[:, 0]


def _rows(prompt_ids, prompt_mask, completion_ids, completion_mask) -> _Rows:
  """Checked rows, cleared of whatever ids stand for padding."""
  shapes = [x.shape for x in (prompt_ids, prompt_mask)]
  shapes += [x.shape for x in (completion_ids, completion_mask)]
  two = shapes[0] == shapes[1] and shapes[2] == shapes[3]
  if not (
    two and len(shapes[0]) == len(shapes[2]) == 2 and shapes[0][0] == shapes[2][0]
  ):
    raise ValueError(
      f"prompts {shapes[0]}, their mask {shapes[1]}, completions {shapes[2]}, their "
      f"mask {shapes[3]}: expected [B, P] twice and [B, R] twice"
    )
  arrays = map(jnp.asarray, (prompt_ids, prompt_mask, completion_ids, completion_mask))
  prompts, prompt_mask, completions, completion_mask = arrays
  rows = _Rows(
    prompts, prompt_mask.astype(bool), completions, completion_mask.astype(bool)
  )
  return rows._replace(
    prompts=jnp.where(rows.prompt_mask, prompts, 0),
    completions=jnp.where(_extent(rows), completions, 0),
  )


def _extent(rows: _Rows) -> jax.Array:
  """True up to the last token of each completion: a mask may have holes before it."""
  seen = rows.completion_mask.astype(jnp.int32)
  return jax.lax.cummax(seen, axis=1, reverse=True) > 0


def _check_tiles(model, rows, group_size, tile_rows, tile_tokens) -> None:
  if tile_rows is None:
    if tile_tokens is not None:
      raise ValueError(
        f"tile_tokens is {tile_tokens} and tile_rows is None: it is for exact mode only"
      )
    return
  if tile_rows < 1:
    raise ValueError(f"tile_rows is {tile_rows}, it must be at least 1")
  if group_size != 1:
    raise ValueError(
      f"tile_rows={tile_rows} with group_size={group_size}: in exact mode every row is "
      "computed by itself; leave one of them out"
    )
  width = rows.prompts.shape[1] + rows.completions.shape[1]
  if tile_tokens is not None and tile_tokens < width:
    raise ValueError(
      f"tile_tokens is {tile_tokens}, prompts and completions have {width}: raise it"
    )
  if dropout.is_on(model):
    raise ValueError(
      "exact mode cannot score with dropout: call model.eval() before, or leave "
      "tile_rows out"
    )


def _by_tiles(
  model: Any, one: Callable[[Any, _Rows], Scores], rows: _Rows, size: int
) -> Scores:
  """`one`, tile by tile: every tile runs the same compiled program."""
  graph, state = nnx.split(model)
  count = rows.prompts.shape[0]

  def cut(x):
    filled = jnp.pad(x, ((0, -count % size), (0, 0)))
    return filled.reshape(-1, size, x.shape[1])

  # Without the checkpoint the compiler fuses the forward pass with what it keeps for
  # the backward pass, and its bits change when gradients are taken.
  tile = jax.checkpoint(lambda rows: one(nnx.merge(graph, state), rows))
  out = jax.lax.map(tile, jax.tree.map(cut, rows))
  return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:count], out)


def _states(
  model: Any, rows: _Rows, group_size: int, tile_tokens: int | None = None
) -> jax.Array:
  """What the model says where completion tokens are predicted: hidden states [B, R, D],
  or a user's logits [B, R, V]; tile_tokens of them in the place of R if given."""
  if group_size != 1:
    return _shared_states(model, rows, group_size)
  return _run(model, _joined(rows, tile_tokens), _before(rows, tile_tokens))


def _before(rows: _Rows, count: int | None = None) -> jax.Array:
  """[B, R], the slots of `_joined` that predict the completion tokens; `count` of them
  in the place of R if given."""
  lengths = jnp.sum(rows.prompt_mask, axis=1)
  return lengths[:, None] - 1 + jnp.arange(count or rows.completions.shape[1])


def _splits_tokens(model: Any) -> bool:
  """Whether the tokens of a row lie on several devices (the mesh axis cp)."""
  rules = getattr(getattr(model, "config", None), "sharding", None)
  return rules is not None and sharding.token_axis(rules) is not None


def _scored_in_place(
  model: Any,
  rows: _Rows,
  scores: Callable[[Any, jax.Array, jax.Array], TokenScores],
  tile_tokens: int | None,
) -> TokenScores:
  """Scores of all tokens where they lie, those of the completions picked afterwards:
  numbers travel between the devices, and no hidden states."""
  tokens = _joined(rows, tile_tokens)
  states = calling.adapt(model).states(Sequences(tokens))
  out = scores(model, states, masks.next_token_targets(tokens))
  at = jnp.clip(_before(rows), 0, tokens.shape[1] - 1)
  return jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=1), out)


def _joined(rows: _Rows, width: int | None = None) -> jax.Array:
  """[B, width]: each prompt's tokens from slot 0, then the completion's, then 0."""
  both = jnp.concatenate([rows.prompts, rows.completions], axis=1)
  padding = rows.prompts.shape[1] - jnp.sum(rows.prompt_mask, axis=1)
  source = padding[:, None] + jnp.arange(width or both.shape[1])
  return jnp.take_along_axis(both, source, axis=1, mode="fill", fill_value=0)


def _run(model: Any, tokens: jax.Array, at: jax.Array) -> jax.Array:
  """Hidden states, or logits, of the slots `at` [B, R]; those out of range are the
  nearest."""
  out = calling.adapt(model).states(Sequences(tokens))
  at = jnp.clip(at, 0, tokens.shape[1] - 1)
  return jnp.take_along_axis(out, at[..., None], axis=1)


def _shared_states(model: Any, rows: _Rows, group_size: int) -> jax.Array:
  """`_states` of rows that come G by G with one prompt, which runs once."""
  count, width = rows.prompts.shape
  if group_size < 1 or count % group_size:
    raise ValueError(
      f"group_size is {group_size}, it must be at least 1 and divide the {count} rows"
    )
  language_model = calling.adapt(model)
  if not language_model.shares_prompts:
    raise ValueError(
      f"{type(model).__name__} cannot run rows with a shared prompt, which our decoder "
      "can: score with group_size=1"
    )
  layout = SharedPrompt(width, group_size)
  prompts, mask = rows.prompts[::group_size], rows.prompt_mask[::group_size]
  tokens = layout.rows(prompts, rows.completions)
  valid = layout.rows(mask, jnp.ones_like(rows.completions, bool))
  segments, extra = valid.astype(jnp.int32), {"shared_prompt": layout}
  out = language_model.states(Sequences(tokens, segment_ids=segments, extra=extra))
  # Each completion's states, the prompt's last before them and their own last dropped.
  out = layout.sequences(out)[:, width - 1 : -1]
  alike = lambda x, first: jnp.all(x == jnp.repeat(first, group_size, axis=0), axis=1)
  same = alike(rows.prompts, prompts) & alike(rows.prompt_mask, mask)
  return jnp.where(same[:, None, None], out, jnp.nan)


def _one_score(model: Any, states: jax.Array) -> jax.Array:
  """float32 [B, R] of what `_states` gives."""
  scores = calling.adapt(model).unembed(states)
  if scores.shape[-1] != 1:
    raise ValueError(
      f"{type(model).__name__} gives {scores.shape[-1]} numbers a position, a critic "
      "or reward model gives 1: see heads.with_scores"
    )
  return scores[..., 0].astype(jnp.float32)
