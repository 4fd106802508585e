"""Outputs of a model on a batch, labels, and the cross-entropy between them.

The functions accept any model. If the user gives a forward function, it receives the
fields of the batch that its signature names. Otherwise the model receives the fields
that its `__call__` names, as in `PeftTrainer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models import calling
from tunix.models.calling import LanguageModel, Sequences, Unembedded
from tunix.ops import masks
from tunix.ops.distill import TopK
from tunix.ops.vocabulary import logprobs

Inputs = Mapping[str, Any]

# Fields with the same meaning for every model. A model receives further fields if its
# `__call__` names them.
_FIELDS = ("input_tokens", "positions", "segment_ids", "attention_mask")


class Labels(NamedTuple):
  """The tokens to predict.

  Attributes:
    targets: int32 [B, T], the token to predict at each position.
    weights: float32 [B, T], 0 on padding and on positions that are not trained.
  """

  targets: Any
  weights: Any


def next_tokens(inputs: Inputs) -> Labels:
  """Returns the labels of a `TrainingInput`: the next token at each position.

  Raises:
    ValueError: input_tokens or input_mask is missing.
  """
  missing = {"input_tokens", "input_mask"} - inputs.keys()
  if missing:
    raise ValueError(
      f"the inputs are {sorted(inputs)}, without {sorted(missing)}. Add these fields "
      "with with_gen_model_input_fn, or give a labels_fn that makes the labels"
    )
  tokens, mask = jnp.asarray(inputs["input_tokens"]), jnp.asarray(inputs["input_mask"])
  if (weights := inputs.get("loss_weights")) is not None:
    mask = mask.astype(jnp.float32) * weights
  return Labels(
    masks.next_token_targets(tokens),
    masks.target_weights(mask, inputs.get("segment_ids")),
  )


def call(fn: Callable[..., Any], *args: object, inputs: Inputs) -> Any:
  """Calls `fn(*args, **inputs)` with the inputs that its signature names.

  If the signature has `**kwargs`, the function receives all inputs.
  """
  parameters = inspect.signature(fn).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return fn(*args, **inputs)
  # `args` fill the first parameters, so inputs may only fill the others.
  free = list(parameters)[len(args) :]
  return fn(*args, **{name: inputs[name] for name in free if name in inputs})


def states(model: object, inputs: Inputs) -> jax.Array:
  """Returns the final hidden states, or logits if the model has no hidden states."""
  return _adapted(model).states(_sequences(model, inputs))


def output(model: object, inputs: Inputs) -> Unembedded | jax.Array:
  """Returns `Unembedded` hidden states if the model has them, else logits [B, T, V]."""
  return _adapted(model).output(states(model, inputs))


def logits(model: object, inputs: Inputs) -> jax.Array:
  """Returns the logits [B, T, V] as one array."""
  return _adapted(model).full_logits(_sequences(model, inputs))


def token_logps(
  model: object, inputs: Inputs, targets: jax.Array, temperature: float
) -> jax.Array:
  """Returns the log-probabilities of the targets, float32 [B, T] in nats."""
  hidden = states(model, inputs)
  return _adapted(model).token_logps(hidden, targets, temperature=temperature).logps


def top_tokens(model: object, inputs: Inputs, k: int, temperature: float) -> TopK:
  """Returns the k most likely tokens at each position, with log-probabilities."""
  return _adapted(model).top_k(states(model, inputs), k, temperature)


def fields_of(model: object) -> tuple[str, ...]:
  """Returns the names of the fields that a model receives if a batch has them."""
  return (*_FIELDS, *_further_fields(model))


def _further_fields(model: Any) -> list[str]:
  return [name for name in calling.call_parameters(model) if name not in _FIELDS]


def _adapted(model: Any) -> LanguageModel:
  return calling.adapt(model, remedy=": give the strategy a forward function")


def _sequences(model: Any, inputs: Inputs) -> Sequences:
  if "input_tokens" not in inputs:
    raise ValueError(
      f"the inputs are {sorted(inputs)}, without input_tokens. Add this field with "
      "with_gen_model_input_fn, or give the strategy forward functions"
    )
  extra = {name: inputs[name] for name in _further_fields(model) if name in inputs}
  extra |= calling.images_of(model, inputs)
  arrays = (inputs.get(name) for name in _FIELDS[1:])
  return Sequences(jnp.asarray(inputs["input_tokens"]), *arrays, extra=extra)


class Scored(NamedTuple):
  """The cross-entropy of each position, float32 in nats, and its weight."""

  nll: jax.Array
  weights: jax.Array


def task_loss(output: Any, labels: Any) -> Scored:
  """Computes the cross-entropy of a model's output and the labels.

  Args:
    output: `Unembedded`, or logits [..., V].
    labels: `Labels`; or integers [...], negative at positions without a label; or
      probabilities [..., V] (one-hot or smoothed), all 0 at positions without a label.
      The weight of a position is then the sum of its probabilities.

  Raises:
    ValueError: the labels have another shape.
  """
  if isinstance(output, Unembedded):
    hard = checked_labels(labels, output.hidden.shape[:-1])
    scores = logprobs.token_logps(
      output.hidden, output.table, hard.targets, output.layout
    )
    return Scored(-scores.logps, hard.weights)
  logps = jax.nn.log_softmax(output.astype(jnp.float32))
  # Labels with as many axes as the logits are probabilities, all others are token ids.
  if isinstance(labels, Labels) or jnp.ndim(labels) != logps.ndim:
    hard = checked_labels(labels, logps.shape[:-1])
    picked = jnp.take_along_axis(logps, hard.targets[..., None], axis=-1)[..., 0]
    return Scored(-picked, hard.weights)
  if labels.shape != logps.shape:
    raise ValueError(
      f"labels have shape {labels.shape} and logits {logps.shape}: give a probability "
      "for each position and token, or an integer for each position"
    )
  weights = jnp.sum(labels, axis=-1).astype(jnp.float32)
  # The product of a label 0 and a log-probability -inf (a forbidden token) is NaN, so
  # labels of 0 are masked.
  total = -jnp.sum(jnp.where(labels != 0, labels * logps, 0.0), axis=-1)
  # The loss multiplies by the weight again; a position without a label divides by 1.
  return Scored(total / jnp.where(weights == 0, 1.0, weights), weights)


def checked_labels(labels: Any, shape: tuple[int, ...]) -> Labels:
  """Converts labels to `Labels` and checks their shape.

  Raises:
    ValueError: the shape differs from `shape`.
  """
  if not isinstance(labels, Labels):
    valid = labels >= 0
    labels = Labels(jnp.where(valid, labels, 0), valid.astype(jnp.float32))
  if labels.targets.shape != shape:
    raise ValueError(
      f"labels have shape {labels.targets.shape} and the model's positions {shape}: "
      "give one label for each position"
    )
  return labels


def label_weights(labels: Any) -> jax.Array:
  """Returns the weight of each position; see `task_loss`."""
  if isinstance(labels, Labels):
    return labels.weights
  if jnp.issubdtype(labels.dtype, jnp.integer):
    return (labels >= 0).astype(jnp.float32)
  return jnp.sum(labels, axis=-1).astype(jnp.float32)
