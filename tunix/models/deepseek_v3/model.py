"""DeepSeek-V3: the defaults of its configurations, and the class."""

from __future__ import annotations

import dataclasses

from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.model import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of DeepSeek-V3 (arXiv:2412.19437)."""

  vocab_size: int = 129_280
  head_dim: int = 192


class DeepseekV3(Transformer):
  """A DeepSeek-V3 model; see `Transformer`."""

  config: ModelConfig
