"""Strategies: comparisons of a student with its teacher.

The formulas are in `tunix.ops.distill`.
"""

from tunix.distillation.strategies.attention import (
  AttentionProjectionStrategy as AttentionProjectionStrategy,
  AttentionTransferStrategy as AttentionTransferStrategy,
)
from tunix.distillation.strategies.base_strategy import BaseStrategy as BaseStrategy
from tunix.distillation.strategies.feature_pooling import (
  FeaturePoolingStrategy as FeaturePoolingStrategy,
)
from tunix.distillation.strategies.feature_projection import (
  FeatureProjectionStrategy as FeatureProjectionStrategy,
)
from tunix.distillation.strategies.logit import LogitStrategy as LogitStrategy
from tunix.distillation.strategies.policy_gradient import (
  PolicyGradientStrategy as PolicyGradientStrategy,
)
