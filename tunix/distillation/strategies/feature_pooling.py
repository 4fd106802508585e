"""Feature strategies; FeaturePoolingStrategy pools the teacher's features."""

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
from tunix.utils import checks
from tunix.utils.metric import Metric

METRICS = (
  Metric(
    "distill/feature_loss", "of the distance", "distance of the features", "train"
  ),
  Metric(
    "distill/hard_loss", "nats", "student's cross-entropy with the labels", "train"
  ),
)

FeatureLoss = Callable[[jax.Array, jax.Array], jax.Array]


class FeatureStrategy(BaseStrategy):
  """Minimizes alpha * distance of features + (1 - alpha) * cross-entropy.

  The outputs of all layers of one type are stacked to features [B, L, ...]. The
  distance is averaged over the layers, and over the positions with the labels' weights,
  so that padding does not count. Subclasses make the shapes of the features equal
  (`match`).

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn: see BaseStrategy. Without them,
      no logits are built if the models have hidden states.
    layer: the layer type whose outputs are compared; of a tuple the first entry is
      used.
    alpha: weight of the features, in [0, 1].
    distance: function of student and teacher features, both [B, L, ...]. It returns a
      scalar, or values [B, L, *positions, ...] with the positions of the labels.

  Raises:
    TypeError: `layer` is not a module type.
    ValueError: `alpha` is out of range.
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
        f"the layer to capture is {layer!r}: expected the type of a layer, such as "
        "tunix.models.transformer.decoder_layer.DecoderLayer"
      )
    check_alpha(alpha)
    self.layer = layer
    self.alpha = alpha
    self.distance = distance

  def match(self, student: jax.Array, teacher: jax.Array) -> tuple[Any, Any]:
    """Returns both features in the same shape."""
    return student, teacher

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Checks that the features of both models can be captured."""
    if not isinstance(teacher_model, nnx.Module | None):
      raise TypeError(
        f"teacher_model is {checks.type_of(teacher_model)}: features need a model, or "
        "batches with teacher_output"
      )
    vocabulary.check_sizes(student_model, teacher_model)
    return student_model, teacher_model

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """Returns the teacher's features [B, L, ...]."""

    def forward(model):
      return self._forward(self.teacher_forward_fn, model, inputs)

    _, features = sowed_module.capture(teacher_model, self.layer, forward)
    return jax.lax.stop_gradient(features)

  def get_student_outputs(
    self, student_model: nnx.Module, inputs: Inputs
  ) -> dict[str, Any]:
    """Returns a dict of "logits" (an array or `Unembedded`) and "features"."""

    def forward(model):
      return self._forward(self.student_forward_fn, model, inputs)

    logits, features = sowed_module.capture(student_model, self.layer, forward)
    return {"logits": logits, "features": features}

  def compute_loss(
    self, student_output: dict[str, Any], teacher_output: Any, labels: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean over labeled positions, and its two parts as metrics."""
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
    """Returns the student's cross-entropy, in nats, and no metrics."""
    nll, weights = outputs.task_loss(student_output["logits"], labels)
    return weighted_sum(nll, weights).mean(), {}

  def loss_weight(self, labels: Any) -> jax.Array:
    """Returns the number of labeled positions."""
    return jnp.sum(outputs.label_weights(labels))

  def _forward(
    self, forward_fn: Forward | None, model: nnx.Module, inputs: Inputs
  ) -> Any:
    if forward_fn is not None:
      return outputs.call(forward_fn, model, inputs=inputs)
    # A user's labels may be probabilities of the whole vocabulary, which need logits.
    output = outputs.output if self.labels_fn is None else outputs.logits
    return output(model, inputs)


class FeaturePoolingStrategy(FeatureStrategy):
  """Averages the teacher's features over neighbors, to the student's shape.

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn, feature_layer, alpha: see
      FeatureStrategy.
    feature_loss_fn: the distance; None is 1 - cosine along `cosine_distance_axis`.
    cosine_distance_axis: axis of the features [B, L, ...].
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
    def cosine(student, teacher):
      return optax.cosine_distance(
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
    """Pools the teacher's features."""
    pooled = pooling.avg_pool_array_to_target_shape(teacher, student.shape)
    return student, pooled


def _mean(values: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the mean of values [B, L, *positions, ...].

  Positions count with their weights, and all other axes equally. Values of another
  shape have a plain mean.
  """
  if values.ndim == 0:
    return values
  shape = (values.shape[0], *values.shape[2 : 1 + weights.ndim])
  if values.ndim < 1 + weights.ndim or shape != weights.shape:
    return jnp.mean(values)
  values = jnp.moveaxis(values, 1, weights.ndim)
  values = jnp.mean(values.reshape(*weights.shape, -1), axis=-1)
  total = weighted_sum(values, weights)
  return safe_divide(total.total, total.weight)
