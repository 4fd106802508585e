"""Experts beside the MLP of a layer (Gemma 4 26B-A4B)."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.experts.moe import MoE
from tunix.models.transformer.experts.routing import LayerRoutes
from tunix.models.transformer.layer_maker import LayerMaker


class ExpertsBeside(nnx.Module):
  """norm1(y) + norm2(experts(x)), with the output y of the MLP and the stream x.

  Attributes:
    moe: the experts, which normalize their own input.
    mlp_norm, out_norm: the two RMS norms.
  """

  def __init__(self, config: TransformerConfig, make: LayerMaker, moe: MoE):
    c = config
    self.moe = moe
    self.mlp_norm, self.out_norm = (
      make.norm(c.embed_dim, c.norm_eps, c.norm_offset) for _ in range(2)
    )

  def __call__(
    self,
    mlp_out: Float[Array, "B T D"],
    x: Float[Array, "B T D"],
    routes: LayerRoutes | None,
  ) -> Float[Array, "B T D"]:
    """Returns the sum.

    Args:
      mlp_out: output of the MLP.
      x: the residual stream before the MLP's norm.
      routes: see `MoE`.
    """
    with jax.named_scope("experts_beside"):
      return self.mlp_norm(mlp_out) + self.out_norm(self.moe(x, routes))
