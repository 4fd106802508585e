"""What a model says of a batch, and what would be right: for models of any make.

Functions of the user's are called with the fields of the batch that they take; left
out, the model is called by what its `__call__` takes, as `PeftTrainer` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models import calling
from tunix.models.calling import LanguageModel, Sequences, Unembedded
from tunix.ops import logprobs, masks
from tunix.ops.distill import TopK

Inputs = Mapping[str, Any]

# Fields that mean the same to every model; the others are its own, if it takes them.
_FIELDS = ("input_tokens", "positions", "segment_ids", "attention_mask")


class Labels(NamedTuple):
  """The right tokens.

  Attributes:
    targets: int32 [B, T], the token to predict at each position.
    weights: float32 [B, T], 0 on padding and on whatever is not trained.
  """

  targets: Any
  weights: Any


def next_tokens(inputs: Inputs) -> Labels:
  """Labels of a `TrainingInput`'s fields.

  Raises:
    ValueError: there are no input_tokens and input_mask.
  """
  missing = {"input_tokens", "input_mask"} - inputs.keys()
  if missing:
    raise ValueError(
      f"the inputs are {sorted(inputs)}, without {sorted(missing)}: give them under "
      "these names (with_gen_model_input_fn), or a labels_fn that makes labels of them"
    )
  tokens, mask = jnp.asarray(inputs["input_tokens"]), jnp.asarray(inputs["input_mask"])
  if (weights := inputs.get("loss_weights")) is not None:
    mask = mask.astype(jnp.float32) * weights
  return Labels(
    masks.next_token_targets(tokens),
    masks.target_weights(mask, inputs.get("segment_ids")),
  )


def call(fn: Callable[..., Any], *args: Any, inputs: Inputs) -> Any:
  """`fn(*args, **inputs)`, with those of the inputs that it takes."""
  parameters = inspect.signature(fn).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return fn(*args, **inputs)
  free = list(parameters)[len(args) :]
  return fn(*args, **{name: inputs[name] for name in free if name in inputs})


def states(model: Any, inputs: Inputs) -> jax.Array:
  """Final hidden states, or the logits of a model that gives nothing else."""
  return _adapted(model).states(_sequences(model, inputs))


def output(model: Any, inputs: Inputs) -> Unembedded | jax.Array:
  """What a model says, `Unembedded` where it allows that, else logits [B, T, V]."""
  return _adapted(model).output(states(model, inputs))


def logits(model: Any, inputs: Inputs) -> jax.Array:
  """A model's logits [B, T, V], built."""
  return _adapted(model).full_logits(_sequences(model, inputs))


def token_logps(
  model: Any, inputs: Inputs, targets: jax.Array, temperature: float
) -> jax.Array:
  """[B, T] log-probabilities of the targets, float32 in nats."""
  said = states(model, inputs)
  return _adapted(model).token_logps(said, targets, temperature=temperature).logps


def top_words(model: Any, inputs: Inputs, k: int, temperature: float) -> TopK:
  """A model's k most likely words of every position."""
  return _adapted(model).top_k(states(model, inputs), k, temperature)


def fields_of(model: Any) -> tuple[str, ...]:
  """Names of the fields that a model is called with, where a batch has them."""
  return (*_FIELDS, *_further_fields(model))


def _further_fields(model: Any) -> list[str]:
  return [name for name in calling.call_parameters(model) if name not in _FIELDS]


def _adapted(model: Any) -> LanguageModel:
  return calling.adapt(model, remedy=": give the strategy a forward function")


def _sequences(model: Any, inputs: Inputs) -> Sequences:
  if "input_tokens" not in inputs:
    raise ValueError(
      f"the inputs are {sorted(inputs)}, without input_tokens: name them so "
      "(with_gen_model_input_fn), or give the strategy forward functions"
    )
  extra = {name: inputs[name] for name in _further_fields(model) if name in inputs}
  known = (inputs.get(name) for name in _FIELDS[1:])
  return Sequences(jnp.asarray(inputs["input_tokens"]), *known, extra=extra)


class Scored(NamedTuple):
  """Cross-entropy by position, float32 in nats, and its weights."""

  nll: jax.Array
  weights: jax.Array


def task_loss(output: Any, labels: Any) -> Scored:
  """Cross-entropy of what a model says against the labels.

  Args:
    output: `Unembedded`, or logits [..., V].
    labels: `Labels`; integers [...], negative where nothing is to be predicted; or
      probabilities [..., V] (one-hot, smoothed), all 0 where nothing is.

  Raises:
    ValueError: labels of another shape.
  """
  if isinstance(output, Unembedded):
    hard = checked_labels(labels, output.hidden.shape[:-1])
    scores = logprobs.token_logps(
      output.hidden, output.table, hard.targets, output.layout
    )
    return Scored(-scores.logps, hard.weights)
  logps = jax.nn.log_softmax(output.astype(jnp.float32))
  if isinstance(labels, Labels) or jnp.ndim(labels) != logps.ndim:
    hard = checked_labels(labels, logps.shape[:-1])
    picked = jnp.take_along_axis(logps, hard.targets[..., None], axis=-1)[..., 0]
    return Scored(-picked, hard.weights)
  if labels.shape != logps.shape:
    raise ValueError(
      f"labels have shape {labels.shape} and logits {logps.shape}: give labels for "
      "every position and word, or integers for every position"
    )
  weights = jnp.sum(labels, axis=-1).astype(jnp.float32)
  total = -jnp.sum(jnp.where(labels != 0, labels * logps, 0.0), axis=-1)
  return Scored(total / jnp.where(weights == 0, 1.0, weights), weights)


def checked_labels(labels: Any, shape: tuple[int, ...]) -> Labels:
  """Labels by position, of the given shape.

  Raises:
    ValueError: they have another.
  """
  if not isinstance(labels, Labels):
    valid = labels >= 0
    labels = Labels(jnp.where(valid, labels, 0), valid.astype(jnp.float32))
  if labels.targets.shape != shape:
    raise ValueError(
      f"labels have shape {labels.targets.shape}, the model speaks of {shape}: give "
      "one for every position"
    )
  return labels


def label_weights(labels: Any) -> jax.Array:
  """Weight of every position that the labels speak of; see `task_loss`."""
  if isinstance(labels, Labels):
    return labels.weights
  if jnp.issubdtype(labels.dtype, jnp.integer):
    return (labels >= 0).astype(jnp.float32)
  return jnp.sum(labels, axis=-1).astype(jnp.float32)
