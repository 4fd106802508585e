"""The default loss: next-token cross-entropy of any model from tokens to logits."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models import calling
from tunix.models.calling import Sequences
from tunix.ops import masks
from tunix.ops.reductions import WeightedSum
from tunix.utils import attributes

_REMEDY = (
  "set a loss with trainer.with_loss_fn(fn), and its arguments with "
  "trainer.with_gen_model_input_fn(fn)"
)


def batch_fields(batch: Any) -> dict[str, Any]:
  """Returns the fields of a batch by name, without fields that are None.

  Args:
    batch: a dict, a dataclass or a named tuple.

  Raises:
    TypeError: The batch has no named fields.
  """
  if isinstance(batch, Mapping):
    fields = dict(batch)
  elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
    fields = attributes.of_fields(batch)
  elif hasattr(batch, "_asdict"):
    fields = batch._asdict()
  else:
    raise TypeError(
      f"a batch of type {type(batch).__name__} has no named fields; the default loss "
      f"expects a TrainingInput, a dict or a dataclass: {_REMEDY}"
    )
  return {name: value for name, value in fields.items() if value is not None}


def next_token_loss(
  model: nnx.Module,
  input_tokens: jax.Array,
  input_mask: jax.Array,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  attention_mask: jax.Array | None = None,
  loss_weights: jax.Array | None = None,
  **extra: object,
) -> WeightedSum:
  """Returns the cross-entropy of each trained token given earlier tokens, in nats.

  If the model can return its final hidden states (`return_hidden=` and
  `unembedding()`), the loss never builds logits [B, T, V]. Other models are called for
  logits with the arguments that their `__call__` takes: `(tokens, positions, cache,
  attention_mask)`, or tokens alone.

  Args:
    model: function from tokens [B, T] to logits [B, T, V], or to (logits, cache).
    input_tokens, input_mask: see TrainingInput.
    positions, segment_ids, loss_weights: optional, see TrainingInput.
    attention_mask: bool [B, T, T], True if the query may attend to the key; None:
      causal attention.
    **extra: further fields of the batch (images), as arguments of the model.

  Returns: the sum of -log p over the trained tokens, and their weight.

  Raises:
    TypeError: The model's `__call__` has another signature, or does not take a field.
    ValueError: The attention mask has another shape.
  """
  if attention_mask is not None and attention_mask.ndim != 3:
    raise ValueError(
      f"attention_mask has shape {attention_mask.shape}, expected [batch, tokens, "
      "tokens]. For rows padded on the right leave it out: the default is causal."
    )
  targets = masks.next_token_targets(input_tokens)
  if loss_weights is not None:
    input_mask = input_mask.astype(jnp.float32) * loss_weights
  weights = masks.target_weights(input_mask, segment_ids)
  language_model = calling.adapt(model, remedy=f": {_REMEDY}")
  _check_taken(language_model, extra)
  states = language_model.states(
    Sequences(input_tokens, positions, segment_ids, attention_mask, extra)
  )
  with jax.named_scope("loss"):
    return language_model.cross_entropy(states, targets, weights)


def _check_taken(language_model: calling.LanguageModel, extra: Any) -> None:
  """Refuses fields of a batch that neither the loss nor the model takes."""
  names = list(inspect.signature(next_token_loss).parameters)[1:-1]
  for name in extra:
    if not language_model.accepts(name):
      near = difflib.get_close_matches(name, names, n=1)
      raise TypeError(
        f"the batch has the field {name!r}, which neither the default loss nor "
        f"{language_model.name} takes: "
        + (f"did you mean {near[0]!r}? " if near else "")
        + "Drop it in _prepare_inputs or with with_gen_model_input_fn"
      )


@dataclasses.dataclass(frozen=True)
class LossCall:
  """A loss of a model and a batch, made of two functions: `call(model, batch)`.

  Attributes:
    loss_fn: loss function of the model and of keyword arguments.
    input_fn: function from a batch to the keyword arguments; it is traced.
    has_aux: True if the loss returns a pair of the loss and aux.
  """

  loss_fn: Callable[..., Any] = next_token_loss
  input_fn: Callable[[Any], Any] = batch_fields
  has_aux: bool = False

  @property
  def is_default(self) -> bool:
    """True for the default loss on the fields of the batch."""
    return (self.loss_fn, self.input_fn) == (next_token_loss, batch_fields)

  def __call__(self, model: nnx.Module, batch: object) -> Any:
    out = self.loss_fn(model, **self.input_fn(batch))
    is_pair = isinstance(out, tuple) and not hasattr(out, "_fields")
    if is_pair != self.has_aux:
      raise TypeError(
        f"has_aux is {self.has_aux}, and the loss returned "
        f"{'a tuple' if is_pair else 'no tuple'}. Call with_loss_fn(fn, "
        f"has_aux={is_pair})."
      )
    return out
