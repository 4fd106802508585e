"""Captures, pools and projects the outputs of layers."""

from tunix.distillation.feature_extraction.pooling import (
  PaddingMode as PaddingMode,
  avg_pool_array_to_target_shape as avg_pool_array_to_target_shape,
)
from tunix.distillation.feature_extraction.projection import (
  ModelWithFeatureProjection as ModelWithFeatureProjection,
  remove_feature_projection_from_models as remove_feature_projection_from_models,
  setup_models_with_feature_projection as setup_models_with_feature_projection,
)
from tunix.distillation.feature_extraction.sowed_module import (
  SowedModule as SowedModule,
  pop_sowed_intermediate_outputs as pop_sowed_intermediate_outputs,
  unwrap_sowed_modules as unwrap_sowed_modules,
  wrap_model_with_sowed_modules as wrap_model_with_sowed_modules,
)
