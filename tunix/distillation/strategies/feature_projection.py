"""FeatureProjectionStrategy: projects the student's features to the teacher's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.distillation import outputs
from tunix.distillation.feature_extraction import projection
from tunix.distillation.feature_extraction.projection import ModelWithFeatureProjection
from tunix.distillation.outputs import Inputs
from tunix.distillation.strategies.base_strategy import Forward
from tunix.distillation.strategies.feature_pooling import FeatureLoss, FeatureStrategy


class FeatureProjectionStrategy(FeatureStrategy):
  """Projects the student's features to the teacher's shape by a trained matrix.

  Until `close` the trainer's model is a `ModelWithFeatureProjection`.

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn, feature_layer, alpha: see
      FeatureStrategy.
    dummy_input: inputs that give the shapes of the features: a dict of fields, or the
      single argument of the forward function after the model. None uses two tokens.
    rngs: random keys of the projection; None uses seed 0.
    feature_loss_fn: the distance; None is the squared difference.
  """

  def __init__(
    self,
    student_forward_fn: Forward | None = None,
    teacher_forward_fn: Forward | None = None,
    labels_fn: Callable[..., Any] | None = None,
    feature_layer: type[nnx.Module] | None = None,
    dummy_input: Any = None,
    rngs: nnx.Rngs | None = None,
    alpha: float = 0.75,
    feature_loss_fn: FeatureLoss | None = None,
  ):
    super().__init__(
      student_forward_fn,
      teacher_forward_fn,
      labels_fn,
      feature_layer,
      alpha,
      feature_loss_fn or _square,
    )
    self.dummy_input = dummy_input
    self.rngs = rngs

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Wraps the student in a ModelWithFeatureProjection."""
    super().pre_process_models(student_model, teacher_model)
    if teacher_model is None:
      raise ValueError(
        "teacher_model is None, and the projection needs the shape of the teacher's "
        "features: give a teacher_model"
      )
    shapes = [
      projection.feature_shape(model, self.layer, lambda m, f=fn: self._dummy(f, m))
      for model, fn in (
        (student_model, self.student_forward_fn),
        (teacher_model, self.teacher_forward_fn),
      )
    ]
    rngs = nnx.Rngs(0) if self.rngs is None else self.rngs
    return ModelWithFeatureProjection(student_model, *shapes, rngs=rngs), teacher_model

  def post_process_models(
    self, student_model: nnx.Module, teacher_model: nnx.Module
  ) -> tuple[nnx.Module, Any]:
    """Unwraps the student; the projection is dropped."""
    assert isinstance(student_model, ModelWithFeatureProjection)
    return student_model.model, teacher_model

  def get_student_outputs(
    self, student_model: nnx.Module, inputs: Inputs
  ) -> dict[str, Any]:
    """Returns a dict of "logits" (or `Unembedded`) and projected "features"."""
    assert isinstance(student_model, ModelWithFeatureProjection)
    out = super().get_student_outputs(student_model.model, inputs)
    return {**out, "features": student_model.project(out["features"])}

  def _dummy(self, forward_fn: Forward | None, model: nnx.Module) -> Any:
    dummy = self.dummy_input
    if dummy is None:
      dummy = {"input_tokens": jnp.zeros((1, 2), jnp.int32)}
    if forward_fn is not None and not isinstance(dummy, Mapping):
      return outputs.call(forward_fn, model, dummy, inputs={})
    inputs = dummy if isinstance(dummy, Mapping) else {"input_tokens": dummy}
    return self._forward(forward_fn, model, inputs)


def _square(student: jax.Array, teacher: jax.Array) -> jax.Array:
  return jnp.square(student.astype(jnp.float32) - teacher.astype(jnp.float32))
