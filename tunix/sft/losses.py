"""The default loss: next-token cross-entropy on any model from tokens to logits."""

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

_REMEDY = (
  "give a loss with trainer.with_loss_fn(fn) and what it takes with "
  "trainer.with_gen_model_input_fn(fn)"
)


def batch_fields(batch: Any) -> dict[str, Any]:
  """A batch as keyword arguments: of a dict, a dataclass or a named tuple.

  Fields that are None are left out.

  Raises:
    TypeError: the batch has no named fields.
  """
  if isinstance(batch, Mapping):
    fields = dict(batch)
  elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
    names = [f.name for f in dataclasses.fields(batch)]
    fields = {name: getattr(batch, name) for name in names}
  elif hasattr(batch, "_asdict"):
    fields = batch._asdict()
  else:
    raise TypeError(
      f"a batch of type {type(batch).__name__} has no named fields; the default loss "
      f"needs a TrainingInput, a dict or a dataclass: {_REMEDY}"
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
  **extra: Any,
) -> WeightedSum:
  """Cross-entropy of every trained token given what precedes it, in nats.

  Models that offer their final hidden states (`return_hidden=` and `unembedding()`)
  never build [B, T, V]; others are called for logits, by what their `__call__` takes:
  `(tokens, positions, cache, attention_mask)`, or tokens alone.

  Args:
    model: maps [B, T] tokens to [B, T, V] logits, or to (logits, cache).
    input_tokens, input_mask: see TrainingInput.
    positions, segment_ids, loss_weights: optional, see TrainingInput.
    attention_mask: bool [B, T, T], True where a query may look; None: causal.
    **extra: other fields of the batch (images), for the model.

  Returns: sum of -log p over the trained tokens, and their weight.

  Raises:
    TypeError: the model's `__call__` has another form, or does not take a field.
    ValueError: an attention mask of another shape.
  """
  if attention_mask is not None and attention_mask.ndim != 3:
    raise ValueError(
      f"attention_mask has shape {attention_mask.shape}, expected [batch, tokens, "
      "tokens], True where a query may look: for right-padded rows leave it out, the "
      "default is causal"
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
  """Refuses fields of a batch that nobody would look at."""
  known = list(inspect.signature(next_token_loss).parameters)[1:-1]
  for name in extra:
    if not language_model.accepts(name):
      near = difflib.get_close_matches(name, known, n=1)
      raise TypeError(
        f"the batch has the field {name!r}, which neither the default loss nor "
        f"{language_model.name} takes: "
        + (f"did you mean {near[0]!r}? " if near else "")
        + "Drop it in _prepare_inputs or with with_gen_model_input_fn"
      )


@dataclasses.dataclass(frozen=True)
class LossCall:
  """A loss and how a batch becomes its arguments: `call(model, batch)`.

  Attributes:
    loss_fn: called with the model and the arguments by name.
    input_fn: batch -> arguments by name; traced.
    has_aux: whether the loss returns a pair.
  """

  loss_fn: Callable[..., Any] = next_token_loss
  input_fn: Callable[[Any], Any] = batch_fields
  has_aux: bool = False

  @property
  def is_default(self) -> bool:
    """Whether batches mean what `next_token_loss` says they mean."""
    return (self.loss_fn, self.input_fn) == (next_token_loss, batch_fields)

  def __call__(self, model: nnx.Module, batch: Any) -> Any:
    out = self.loss_fn(model, **self.input_fn(batch))
    is_pair = isinstance(out, tuple) and not hasattr(out, "_fields")
    if is_pair != self.has_aux:
      raise TypeError(
        f"the loss returned {'a tuple' if is_pair else 'no tuple'}, but has_aux is "
        f"{self.has_aux}: say with_loss_fn(fn, has_aux={is_pair})"
      )
    return out
