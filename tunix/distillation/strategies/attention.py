"""Attention strategies: the feature strategies applied to attention layers.

They compare the outputs of the layers. Attention weights cannot be compared, because
fused kernels never store them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from tunix.distillation.strategies.base_strategy import Forward
from tunix.distillation.strategies.feature_pooling import (
  FeatureLoss,
  FeaturePoolingStrategy,
)
from tunix.distillation.strategies.feature_projection import FeatureProjectionStrategy


class AttentionTransferStrategy(FeaturePoolingStrategy):
  """FeaturePoolingStrategy whose layer is `attention_layer`; see there."""

  def __init__(
    self,
    student_forward_fn: Forward | None = None,
    teacher_forward_fn: Forward | None = None,
    labels_fn: Callable[..., Any] | None = None,
    attention_layer: type[nnx.Module] | None = None,
    alpha: float = 0.75,
    attention_loss_fn: FeatureLoss | None = None,
  ):
    super().__init__(
      student_forward_fn,
      teacher_forward_fn,
      labels_fn,
      feature_layer=attention_layer,
      alpha=alpha,
      feature_loss_fn=attention_loss_fn,
    )


class AttentionProjectionStrategy(FeatureProjectionStrategy):
  """FeatureProjectionStrategy whose layer is `attention_layer`; see there."""

  def __init__(
    self,
    student_forward_fn: Forward | None = None,
    teacher_forward_fn: Forward | None = None,
    labels_fn: Callable[..., Any] | None = None,
    attention_layer: type[nnx.Module] | None = None,
    dummy_input: Any = None,
    rngs: nnx.Rngs | None = None,
    alpha: float = 0.75,
    attention_loss_fn: FeatureLoss | None = None,
  ):
    super().__init__(
      student_forward_fn,
      teacher_forward_fn,
      labels_fn,
      feature_layer=attention_layer,
      dummy_input=dummy_input,
      rngs=rngs,
      alpha=alpha,
      feature_loss_fn=attention_loss_fn,
    )
