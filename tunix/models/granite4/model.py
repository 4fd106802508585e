"""Granite 4, dense: the defaults of its configurations, and the class."""

from __future__ import annotations

import dataclasses

from tunix.models.transformer.config import RopeConfig, TransformerConfig
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=10_000_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of dense Granite 4 models."""

  vocab_size: int = 100_352
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  fused_gate_up: bool = True
  tie_embeddings: bool = True


class Granite4(Transformer):
  """A dense Granite 4 model; see `Transformer`."""

  config: ModelConfig
