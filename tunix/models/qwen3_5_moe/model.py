"""Qwen3.5 mixtures: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.qwen3_5 import model as qwen3_5
from tunix.models.transformer.config import MoEConfig, sizes
from tunix.models.transformer.model import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(qwen3_5.Defaults):
  """The configuration of Qwen3.5 with experts in every layer, for the text model.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.qwen3p5_35b_a3b(param_dtype=jnp.bfloat16)`.
  """

  @classmethod
  def qwen3p5_35b_a3b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 35B-A3B (February 2026); Qwen3.6 35B-A3B has the same sizes."""
    fields = sizes(40, 2048, 512, 16, 2, moe=experts(256, 8, 512))
    return cls(**(fields | qwen3_5.hybrid(40, 32) | overrides))

  @classmethod
  def qwen3p5_122b_a10b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 122B-A10B (February 2026)."""
    fields = sizes(48, 3072, 1024, 32, 2, moe=experts(256, 8, 1024))
    return cls(**(fields | qwen3_5.hybrid(48, 64) | overrides))

  @classmethod
  def qwen3p5_397b_a17b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 397B-A17B (February 2026)."""
    fields = sizes(60, 4096, 1024, 32, 2, moe=experts(512, 10, 1024))
    return cls(**(fields | qwen3_5.hybrid(60, 64) | overrides))


def experts(
  count: int,
  per_token: int,
  hidden_dim: int,
  shared_hidden_dim: int | None = None,
  **fields: Any,
) -> MoEConfig:
  """Returns the experts of a Qwen3.5 mixture.

  Args:
    count: number of experts E.
    per_token: number of experts k of each token.
    hidden_dim: hidden width F of one expert.
    shared_hidden_dim: hidden width of the shared expert; None for F.
    **fields: further fields of `MoEConfig`.
  """
  return MoEConfig(
    num_experts=count,
    experts_per_token=per_token,
    hidden_dim=hidden_dim,
    shared_hidden_dim=shared_hidden_dim or hidden_dim,
    shared_gate=True,
    fused_gate=True,
    fused_halves=True,
    **fields,
  )


class Qwen3p5Moe(Transformer):
  """A Qwen3.5 mixture's text model; see `Transformer`."""

  config: ModelConfig
