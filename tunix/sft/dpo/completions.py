"""Functions that the trainers on prompts with completions share: scores and losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.data.batches import Rows
from tunix.generate import scoring
from tunix.models import calling
from tunix.models.calling import Sequences
from tunix.ops import masks
from tunix.ops.pair_losses import PairLoss
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.perf import programs
from tunix.sft import sharding_utils
from tunix.sft.dpo.preference_config import CompletionsConfig
from tunix.sft.steps.module_state import ModuleState
from tunix.utils import checks, mesh as mesh_lib


def as_pair_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., PairLoss]:
  """Wraps a user's loss so that it returns a PairLoss.

  Args:
    loss_fn: returns values [B]; with `has_aux` a pair of values and a dict of metrics,
      [B] each.
    has_aux: True if `loss_fn` returns metrics.
  """

  @functools.wraps(loss_fn)  # its options are read from its signature
  def loss(*columns: object, **options: object) -> PairLoss:
    out = loss_fn(*columns, **options)
    return PairLoss(*out) if has_aux else PairLoss(out, {})

  return loss


def checked_config(config: object, kind: type[CompletionsConfig]) -> Any:
  """Returns the config, or the default one of its kind for None.

  Raises:
    TypeError: The config is of another kind.
  """
  config = kind() if config is None else config
  if not isinstance(config, kind):
    raise TypeError(
      f"training_config is {checks.type_of(config)}; expected a {kind.__name__}"
    )
  return config


def shares_prompts(chosen: bool | None, models: Sequence[nnx.Module]) -> bool:
  """Returns whether the prompt of a pair in its own row is computed once.

  Args:
    chosen: `PreferenceConfig.shared_prompt`.
    models: the policy, and the reference if it is a second model.
  """
  if chosen is not None:
    return chosen
  with mesh_lib.use_mesh(mesh_lib.mesh_of(nnx.state(models[0]))):
    # Other platforms have fast kernels of attention, which refuse such rows.
    return mesh_lib.context_platform() == "cpu" and all(
      calling.adapt(model).shares_prompts and not scoring.splits_tokens(model)
      for model in models
    )


def token_columns(rows: Rows) -> Rows:
  """Returns the columns of tokens, without weights, labels and margins."""
  others = ("weights", "labels", "margins")
  return {name: x for name, x in rows.items() if name not in others}


def without_gradient(
  module: ModuleState, score: Callable[..., Any], axes: tuple[str, ...]
) -> Callable[[Any], Any]:
  """Returns a function of a batch: `score(model, batch)` of the current weights.

  The model has no dropout in it, and the scores stay on the device. A trainer makes
  this function once, so that the forward pass compiles once.

  Args:
    module: the trained model.
    score: function of a model and a batch.
    axes: mesh axes that split the batch.
  """
  skeleton = module.skeleton

  @jax.jit
  def forward(params, frozen, rest, batch):
    model = skeleton.merge(params, frozen, rest)
    model.eval()
    return score(model, batch)

  def run(batch: object) -> Any:
    module.refresh()
    placed = sharding_utils.shard_input(batch, axes)
    state = (module.params, module.frozen, module.rest)
    return programs.call("policy scoring", forward, *state, placed)

  return run


def weigh(
  loss: PairLoss, weights: jax.Array
) -> tuple[WeightedSum, dict[str, WeightedSum]]:
  """Returns the weighted sums of a loss and of its metrics, as a train step needs them.

  Args:
    loss: values and metrics, [B] each.
    weights: weights of the rows, [B].
  """
  metrics = {name: weighted_sum(x, weights) for name, x in loss.metrics.items()}
  return weighted_sum(loss.values, weights), metrics


def completion_rows(
  rows: Mapping[str, Any], names: Sequence[str]
) -> tuple[Any, Any, Any, Any]:
  """Returns one row for each completion; the completions of a prompt are neighbors.

  Args:
    rows: ids and masks of B prompts and of each completion.
    names: names of the N completions of a prompt.

  Returns: prompt ids, prompt mask, completion ids and completion mask, of B * N rows.
  """
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
  """Returns log-probabilities [B, N] of whole completions, in one forward pass.

  Args:
    model: the policy or the reference.
    rows: ids and masks of B prompts and of each completion, with the prompts' `images`
      if they have some; or the columns of pairs that share rows, see
      `buckets.batch_pairs`.
    names: names of the N completions of a prompt.
    shared: compute each prompt once for all of its completions.
  """
  if "sequence" in rows:
    return _sequence_logps(model, rows)
  scores = scoring.score_completions(
    model,
    *completion_rows(rows, names),
    group_size=len(names) if shared else 1,
    **calling.images_of(model, rows),
  )
  return jnp.sum(scores.logps, axis=1).reshape(-1, len(names))


def _sequence_logps(model: nnx.Module, rows: Mapping[str, Any]) -> jax.Array:
  """Returns log-probabilities [B, 2] of the completions of pairs that share rows."""
  language_model, tokens = calling.adapt(model), rows["input_tokens"]
  segments, shape = rows["segment_ids"], rows["tokens"].shape
  states = language_model.states(Sequences(tokens, rows["positions"], segments))
  needed = masks.target_weights(rows["input_mask"], segments) != 0
  with jax.named_scope("unembed"):
    targets = masks.next_token_targets(tokens)
    logps = language_model.token_logps(states, targets, needed=needed).logps
  # A masked sum, because a scatter-add has no fixed order on GPUs. XLA fuses the mask.
  owner = jnp.arange(math.prod(shape))[:, None, None]
  sums = jnp.sum(jnp.where(rows["sequence"] == owner, logps, 0.0), axis=(1, 2))
  return sums.reshape(shape)


@functools.lru_cache(maxsize=16)
def logps_of(names: tuple[str, ...], shared: bool) -> Callable[..., jax.Array]:
  """Returns `completion_logps` as a function for `inference.apply`.

  The cache returns the same object for the same arguments, because `inference` compiles
  once for each function object.
  """
  return lambda model, **rows: completion_logps(model, rows, names, shared)
