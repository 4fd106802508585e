"""Features of layers: the teacher's, pooled to the student's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tunix.distillation import outputs, vocabulary
from tunix.distillation.feature_extraction import pooling, sowed_module
from tunix.distillation.outputs import Inputs
from tunix.distillation.strategies.base_strategy import BaseStrategy, Forward
from tunix.distillation.strategies.logit import check_alpha
from tunix.ops.reductions import safe_divide, weighted_sum

FeatureLoss = Callable[[jax.Array, jax.Array], jax.Array]


class FeatureStrategy(BaseStrategy):
  """alpha x distance of features + (1 - alpha) x cross-entropy.

  What every instance of a layer type puts out is stacked to features [B, L, ...]. The
  distance is averaged over the layers, and over the positions by the labels' weights,
  so that padding is left out. Subclasses say how the features are made comparable
  (`match`).

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn: see BaseStrategy. Left out, no
      logits are built of models that give hidden states.
    layer: the type whose outputs are compared. Of a tuple the first entry counts.
    alpha: share of the features, in [0, 1].
    distance: (student [B, L, ...], teacher [B, L, ...]) -> values that begin with
      [B, L, *shape of the labels but B], or a scalar.

  Raises:
    TypeError: no layer type.
    ValueError: alpha out of its range.
  """

  def __init__(
    self,
    student_forward_fn: Forward | None,
    teacher_forward_fn: Forward | None,
    labels_fn: Callable[..., Any] | None,
    layer: type[nnx.Module] | None,
    alpha: float,
    distance: FeatureLoss,
  ):
    super().__init__(student_forward_fn, teacher_forward_fn, labels_fn)
    if not (isinstance(layer, type) and issubclass(layer, nnx.Module)):
      raise TypeError(
        f"the layer to capture is {layer!r}: give the type of a layer, such as "
        "tunix.models.transformer.decoder_layer.DecoderLayer"
      )
    check_alpha(alpha)
    self.layer = layer
    self.alpha = alpha
    self.distance = distance

  def match(self, student: jax.Array, teacher: jax.Array) -> tuple[Any, Any]:
    """Both features in one shape."""
    return student, teacher

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Checks that both can be captured."""
    if not isinstance(teacher_model, nnx.Module | None):
      raise TypeError(
        f"the teacher is a {type(teacher_model).__name__}: features need a model, or "
        "batches with teacher_output"
      )
    vocabulary.check_sizes(student_model, teacher_model)
    return student_model, teacher_model

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """The teacher's features [B, L, ...]."""
    forward = lambda model: self._forward(self.teacher_forward_fn, model, inputs)
    _, features = sowed_module.capture(teacher_model, self.layer, forward)
    return jax.lax.stop_gradient(features)

  def get_student_outputs(
    self, student_model: nnx.Module, inputs: Inputs
  ) -> dict[str, Any]:
    """ "logits" (or `Unembedded`) and "features"."""
    forward = lambda model: self._forward(self.student_forward_fn, model, inputs)
    said, features = sowed_module.capture(student_model, self.layer, forward)
    return {"logits": said, "features": features}

  def compute_loss(
    self, student_output: dict[str, Any], teacher_output: Any, labels: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean over labelled positions, and its parts as metrics."""
    nll, weights = outputs.task_loss(student_output["logits"], labels)
    hard = weighted_sum(nll, weights).mean()
    pair = self.match(student_output["features"], teacher_output)
    features = _mean(self.distance(*pair), weights)
    loss = self.alpha * features + (1 - self.alpha) * hard
    stopped = jax.lax.stop_gradient((features, hard))
    return loss, dict(zip(("distill/feature_loss", "distill/hard_loss"), stopped))

  def compute_eval_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, student_output: dict[str, Any], labels: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of the student alone, in nats."""
    nll, weights = outputs.task_loss(student_output["logits"], labels)
    return weighted_sum(nll, weights).mean(), {}

  def loss_weight(self, labels: Any) -> jax.Array:
    """Labelled positions."""
    return jnp.sum(outputs.label_weights(labels))

  def _forward(self, forward_fn: Forward | None, model: Any, inputs: Inputs) -> Any:
    if forward_fn is not None:
      return outputs.call(forward_fn, model, inputs=inputs)
    # Labels of the user's may be probabilities of all words, which meet logits alone.
    said = outputs.output if self.labels_fn is None else outputs.logits
    return said(model, inputs)


class FeaturePoolingStrategy(FeatureStrategy):
  """The teacher's features, averaged over neighbours to the student's shape.

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn, feature_layer, alpha: see
      FeatureStrategy.
    feature_loss_fn: a distance; None: 1 - cosine along `cosine_distance_axis`.
    cosine_distance_axis: of features [B, L, ...].
  """

  def __init__(
    self,
    student_forward_fn: Forward | None = None,
    teacher_forward_fn: Forward | None = None,
    labels_fn: Callable[..., Any] | None = None,
    feature_layer: type[nnx.Module] | None = None,
    alpha: float = 0.75,
    feature_loss_fn: FeatureLoss | None = None,
    cosine_distance_axis: int = -1,
  ):
    cosine = lambda student, teacher: optax.cosine_distance(
      student.astype(jnp.float32),
      teacher.astype(jnp.float32),
      epsilon=1e-8,
      axis=cosine_distance_axis,
    )
    super().__init__(
      student_forward_fn,
      teacher_forward_fn,
      labels_fn,
      feature_layer,
      alpha,
      feature_loss_fn or cosine,
    )

  def match(self, student: jax.Array, teacher: jax.Array) -> tuple[Any, Any]:
    """Pools the teacher's."""
    pooled = pooling.avg_pool_array_to_target_shape(teacher, student.shape)
    return student, pooled


def _mean(values: jax.Array, weights: jax.Array) -> jax.Array:
  """Mean of values [B, L, positions, ...] over all but the positions, and over these by
  their weights; of values of another shape, over all of them."""
  if values.ndim == 0:
    return values
  shape = (values.shape[0], *values.shape[2 : 1 + weights.ndim])
  if values.ndim < 1 + weights.ndim or shape != weights.shape:
    return jnp.mean(values)
  values = jnp.moveaxis(values, 1, weights.ndim)
  values = jnp.mean(values.reshape(*weights.shape, -1), axis=-1)
  total = weighted_sum(values, weights)
  return safe_divide(total.total, total.weight)
