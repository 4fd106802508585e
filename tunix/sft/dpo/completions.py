"""What trainers of prompts with completions share: reading, scoring, weighing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.data.batches import Rows, TextOptions
from tunix.generate import scoring, tokenizer_adapter
from tunix.ops.pair_losses import PairLoss
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.perf import programs
from tunix.sft import sharding_utils
from tunix.sft.dpo.preference_config import CompletionsConfig
from tunix.sft.losses import batch_fields
from tunix.sft.module_state import ModuleState


def as_pair_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., PairLoss]:
  """A user's loss of B rows as `weigh` takes it: values [B], or those with metrics.

  Args:
    loss_fn: gives values, or with `has_aux` (values, dict of metrics), [B] each.
    has_aux: which of the two.
  """

  @functools.wraps(loss_fn)  # the options that it takes are read from its signature
  def loss(*columns: Any, **options: Any) -> PairLoss:
    out = loss_fn(*columns, **options)
    return PairLoss(*out) if has_aux else PairLoss(out, {})

  return loss


class Read(NamedTuple):
  """Rows of tokens that a batch was read into; cut into micro-batches like any tree."""

  rows: Rows


class BatchReader(NamedTuple):
  """How a trainer's batches become rows.

  Attributes:
    columns: (columns, options) -> rows, of `tunix.data.batches`.
    options: of the trainer's config.
  """

  columns: Callable[[Mapping[str, Any], TextOptions], Rows]
  options: TextOptions

  def read(self, batch: Any, input_fn: Callable[[Any], Any]) -> Read:
    """Of text, of tokens, or of what was read already.

    Args:
      batch: columns by name, or what `input_fn` makes such of.
      input_fn: of `with_gen_model_input_fn`; runs on the host.
    """
    if isinstance(batch, Read):
      return batch
    return Read(self.columns(batch_fields(input_fn(batch)), self.options))


def options_of(config: CompletionsConfig, tokenizer: Any) -> TextOptions:
  """How text becomes rows, by a trainer's settings.

  Args:
    config: of the trainer.
    tokenizer: a TokenizerAdapter, what one can be made of, or None.
  """
  adapted = None if tokenizer is None else tokenizer_adapter.adapted(tokenizer)
  return TextOptions(tokenizer=adapted, limits=config.limits, bad_rows=config.bad_rows)


def checked_config(
  config: Any, kind: type[CompletionsConfig], default: type[CompletionsConfig]
) -> Any:
  """The config, or a default one.

  Raises:
    TypeError: it is of another kind.
  """
  if config is None:
    return default()
  if not isinstance(config, kind):
    raise TypeError(
      f"training_config is a {type(config).__name__}, expected a {kind.__name__}"
    )
  return config


def token_columns(rows: Rows) -> Rows:
  """Ids and masks alone."""
  return {name: x for name, x in rows.items() if name.endswith(("_ids", "_mask"))}


def without_gradient(
  module: ModuleState, score: Callable[..., Any], axes: tuple[str, ...]
) -> Callable[[Any], Any]:
  """batch -> score(model, batch) with the current weights and no dropout, left on the
  device. Made once a trainer, so that it compiles once."""
  skeleton = module.skeleton

  @jax.jit
  def forward(params, frozen, rest, batch):
    model = skeleton.merge(params, frozen, rest)
    model.eval()
    return score(model, batch)

  def run(batch: Any) -> Any:
    module.refresh()
    placed = sharding_utils.shard_input(batch, axes)
    state = (module.params, module.frozen, module.rest)
    return programs.call("policy scoring", forward, *state, placed)

  return run


def weigh(
  loss: PairLoss, weights: jax.Array
) -> tuple[WeightedSum, dict[str, WeightedSum]]:
  """A loss by example as a step wants it: sums and weights, of its metrics too."""
  metrics = {name: weighted_sum(x, weights) for name, x in loss.metrics.items()}
  return weighted_sum(loss.values, weights), metrics


def completion_rows(
  rows: Mapping[str, Any], names: Sequence[str]
) -> tuple[Any, Any, Any, Any]:
  """(prompt ids, their mask, completion ids, their mask): one row a
  completion, those of a prompt one after the other."""
  width = max(rows[f"{name}_ids"].shape[1] for name in names)

  def together(part: str) -> jax.Array:
    columns = [rows[f"{name}_{part}"] for name in names]
    filled = [jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in columns]
    return jnp.stack(filled, axis=1).reshape(-1, width)

  def prompt(part: str) -> jax.Array:
    return jnp.repeat(rows[f"prompt_{part}"], len(names), axis=0)

  return prompt("ids"), prompt("mask"), together("ids"), together("mask")


def completion_logps(
  model: nnx.Module, rows: Mapping[str, Any], names: Sequence[str], shared: bool
) -> jax.Array:
  """Log-probabilities [B, names] of whole completions, in one forward pass.

  Args:
    model: the policy or the reference.
    rows: prompt_ids, prompt_mask, and ids and mask of every completion.
    names: of the completions.
    shared: compute each prompt once.
  """
  scores = scoring.score_completions(
    model, *completion_rows(rows, names), group_size=len(names) if shared else 1
  )
  return jnp.sum(scores.logps, axis=1).reshape(-1, len(names))


@functools.lru_cache(maxsize=16)
def logps_of(names: tuple[str, ...], shared: bool) -> Callable[..., jax.Array]:
  """`completion_logps` for `inference`: one object a setting, to compile once."""
  return lambda model, **rows: completion_logps(model, rows, names, shared)
