"""A trained projection of the student's features to the teacher's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.distillation.feature_extraction import sowed_module
from tunix.sft.steps.module_state import is_lora


class ModelWithFeatureProjection(nnx.Module):
  """A student with a trained projection of its features.

  Features are [B, L, ..., D]. One matrix, the same for all layers, maps D to the
  teacher's D'. If the numbers of layers differ, L' mixtures of the layers are taken,
  which start as the layers at the same relative depth. (One matrix from L D to L' D'
  numbers would be larger than the models.)

  The projection is an `nnx.Param`. It is an `nnx.LoRAParam` if only the student's LoRA
  parameters are trained, so that it is trained too.

  Args:
    model: the student.
    feature_shape: shape of the student's features.
    feature_target_shape: shape of the teacher's features; only the number of layers
      (the second axis) and the last axis may differ.
    rngs: random keys of the matrix.

  Raises:
    ValueError: the shapes differ in another axis.
  """

  def __init__(
    self,
    model: nnx.Module,
    feature_shape: tuple[int, ...],
    feature_target_shape: tuple[int, ...],
    *,
    rngs: nnx.Rngs,
  ):
    shape, target = tuple(feature_shape), tuple(feature_target_shape)
    alike = shape[:1] + shape[2:-1] == target[:1] + target[2:-1]
    if len(shape) != len(target) or not alike:
      raise ValueError(
        f"the student's features have shape {shape}, the teacher's {target}: they may "
        "differ in the layers (second) and the width (last) only"
      )
    self.model = model
    kind = nnx.LoRAParam if is_lora(model) else nnx.Param
    scale = shape[-1] ** -0.5
    matrix = scale * jax.random.normal(rngs.params(), (shape[-1], target[-1]))
    self.projection = kind(matrix)
    self.mixture = nnx.data(None)
    if shape[1] != target[1]:
      self.mixture = nnx.data(kind(_same_depth(shape[1], target[1])))

  def __call__(self, *args: object, **kwargs: object) -> tuple[Any, jax.Array]:
    """Returns the model's output and its projected features.

    The layers must be wrapped (`setup_models_with_feature_projection`).
    """
    out = self.model(*args, **kwargs)
    return out, self.project(sowed_module.stacked_outputs(self.model))

  def project(self, features: jax.Array) -> jax.Array:
    """Projects features [B, L, ..., D] to [B, L', ..., D']."""
    out = features @ self.projection[...].astype(features.dtype)
    if self.mixture is None:
      return out
    mixture = self.mixture[...].astype(out.dtype)
    return jnp.moveaxis(jnp.tensordot(mixture, out, axes=(1, 1)), 0, 1)


def _same_depth(layers: int, target: int) -> jax.Array:
  """Returns [L', L], where each row is 1 at the layer of the same relative depth."""
  index = ((jnp.arange(target) + 0.5) * layers / target).astype(jnp.int32)
  return jax.nn.one_hot(index, layers)


def setup_models_with_feature_projection(
  student_model: nnx.Module,
  teacher_model: nnx.Module,
  student_layer_to_capture: type[nnx.Module],
  teacher_layer_to_capture: type[nnx.Module],
  dummy_student_input: object,
  dummy_teacher_input: object,
  *,
  rngs: nnx.Rngs,
) -> tuple[ModelWithFeatureProjection, nnx.Module]:
  """Wraps the layers of both models in place, and the student in a projection.

  Args:
    student_model, teacher_model: models whose layers are separate modules.
    student_layer_to_capture, teacher_layer_to_capture: types of their layers.
    dummy_student_input, dummy_teacher_input: inputs of the models: a dict of named
      arguments, or the single argument. Only their shapes are used.
    rngs: random keys of the projection.

  Raises:
    ValueError: see `sowed_module.wrap_model_with_sowed_modules`.
  """
  shapes = []
  for model, layer, dummy in (
    (student_model, student_layer_to_capture, dummy_student_input),
    (teacher_model, teacher_layer_to_capture, dummy_teacher_input),
  ):

    def forward(model, dummy=dummy):
      return model(**dummy) if isinstance(dummy, Mapping) else model(dummy)

    shapes.append(feature_shape(model, layer, forward))
    sowed_module.wrap_model_with_sowed_modules(model, [layer])
  projected = ModelWithFeatureProjection(student_model, *shapes, rngs=rngs)
  return projected, teacher_model


def remove_feature_projection_from_models(
  student_model: nnx.Module, teacher_model: nnx.Module
) -> tuple[nnx.Module, nnx.Module]:
  """Undoes `setup_models_with_feature_projection`."""
  if isinstance(student_model, ModelWithFeatureProjection):
    student_model = student_model.model
  for model in (student_model, teacher_model):
    sowed_module.unwrap_sowed_modules(model)
  return student_model, teacher_model


def feature_shape(
  model: nnx.Module, layer: type[nnx.Module], forward: Callable[[Any], Any]
) -> tuple[int, ...]:
  """Returns the shape of the features that `capture` returns; computes nothing."""
  graph, state = nnx.split(model)

  def features(state):
    return sowed_module.capture(nnx.merge(graph, state), layer, forward)[1]

  return jax.eval_shape(features, state).shape
