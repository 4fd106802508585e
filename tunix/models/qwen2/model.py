"""Qwen 2 and 2.5: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=1_000_000.0)
_SHORT_ROPE = RopeConfig(theta=10_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Qwen 2's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.qwen2p5_0p5b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 151_936
  head_dim: int = 128
  rope: RopeConfig = _ROPE
  qkv_bias: bool = True
  max_position: int | None = 32_768

  @classmethod
  def qwen2p5_0p5b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5 0.5B."""
    fields = sizes(24, 896, 4864, 14, 2, head_dim=64, tie_embeddings=True)
    return cls(**(fields | overrides))

  @classmethod
  def qwen2p5_1p5b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5 1.5B."""
    fields = sizes(28, 1536, 8960, 12, 2, tie_embeddings=True, max_position=131_072)
    return cls(**(fields | overrides))

  @classmethod
  def qwen2p5_3b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5 3B."""
    return cls(**(sizes(36, 2048, 11008, 16, 2, tie_embeddings=True) | overrides))

  @classmethod
  def qwen2p5_7b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5 7B."""
    fields = sizes(28, 3584, 18944, 28, 4, vocab_size=152_064, max_position=131_072)
    return cls(**(fields | overrides))

  @classmethod
  def qwen2p5_14b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5 14B."""
    fields = sizes(48, 5120, 13824, 40, 8, vocab_size=152_064, max_position=131_072)
    fields["norm_eps"] = 1e-5
    return cls(**(fields | overrides))

  @classmethod
  def qwen2p5_32b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5 32B."""
    fields = sizes(64, 5120, 27648, 40, 8, vocab_size=152_064, max_position=131_072)
    fields["norm_eps"] = 1e-5
    return cls(**(fields | overrides))

  @classmethod
  def qwen2p5_math_1p5b(cls, **overrides: Any) -> ModelConfig:
    """Qwen2.5-Math 1.5B: another rotary base and a shorter context."""
    fields = {"rope": _SHORT_ROPE, "max_position": 4096}
    return cls.qwen2p5_1p5b(**(fields | overrides))

  @classmethod
  def deepseek_r1_distill_qwen_1p5b(cls, **overrides: Any) -> ModelConfig:
    """DeepSeek-R1-Distill-Qwen 1.5B: Qwen2.5-Math, untied, 131,072 tokens."""
    fields = {
      "rope": _SHORT_ROPE,
      "max_position": 131_072,
      "tie_embeddings": False,
    }
    return cls.qwen2p5_1p5b(**(fields | overrides))

  qwen2p5_0p5b_instruct = qwen2p5_coder_0p5b = qwen2p5_0p5b
  qwen2p5_1p5b_instruct = qwen2p5_1p5b
  qwen2p5_3b_instruct = qwen2p5_coder_3b = qwen2p5_3b
  qwen2p5_7b_instruct = qwen2p5_coder_7b = qwen2p5_7b


class Qwen2(Transformer):
  """A Qwen 2 or 2.5 model; see `Transformer`."""

  config: ModelConfig
