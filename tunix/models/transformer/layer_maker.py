"""Factory of layers whose weights have the decoder's sharding and dtype."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tunix.models.transformer.config import MoEConfig, ShardingRules
from tunix.models.transformer.dense.layers import (
  Embedding,
  FrozenParam,
  Linear,
  RMSNorm,
  fresh,
  param,
)
from tunix.models.transformer.shards import sharding


@dataclasses.dataclass(frozen=True)
class LayerMaker:
  """Makes layers for one sharding, dtype and stack.

  Attributes:
    rules: sharding rules of the weights.
    param_dtype: dtype of the weights.
    rngs: source of the weights' keys. Each linear map and each embedding takes one.
    stack: leading axes of all weights: (L,) for a stack of layers, else ().
    invariant: see `TransformerConfig.batch_invariant`.
  """

  rules: ShardingRules
  param_dtype: DTypeLike
  rngs: nnx.Rngs
  stack: tuple[int, ...] = ()
  invariant: bool = False

  def spec(self, kind: str, experts: int = 0) -> tuple:
    """Returns the PartitionSpec entries of a weight, see `sharding.weight_spec`."""
    stacked = bool(self.stack)
    return sharding.weight_spec(kind, self.rules, stacked, experts=bool(experts))

  def linear(
    self, in_dim: int, out_dim: int, kind: str, *, bias: bool = False, experts: int = 0
  ) -> Linear:
    """Makes a linear map, or one per expert if `experts` is not 0.

    Args:
      in_dim, out_dim: sizes of the kernel.
      kind: kind of the kernel, see `sharding.weight_spec`.
      bias: if True, the map has a bias.
      experts: E; the kernel is [*stack, E, in, out].
    """
    return Linear(
      in_dim,
      out_dim,
      stack=self.stack + ((experts,) if experts else ()),
      spec=self.spec(kind, experts),
      use_bias=bias,
      param_dtype=self.param_dtype,
      invariant=self.invariant,
      rngs=self.rngs,
    )

  def sinks(self, heads: int) -> nnx.Param:
    """Makes the logits of attention sinks, one per head; 0 counts as one key of score
    0."""
    return param(jnp.zeros((*self.stack, heads), self.param_dtype), self.spec("heads"))

  def scalar(self) -> FrozenParam:
    """Makes a number that is not trained, [*stack, 1], with the value 1."""
    value = jnp.ones((*self.stack, 1), self.param_dtype)
    spec = (None,) * value.ndim
    return FrozenParam(value, out_sharding=spec, eager_sharding=False)

  def norm(self, dim: int, eps: float, offset: float = 0.0) -> RMSNorm:
    """Makes an RMS norm that multiplies by offset + scale."""
    return RMSNorm(
      dim,
      eps,
      offset=offset,
      stack=self.stack,
      spec=self.spec("norm"),
      param_dtype=self.param_dtype,
      invariant=self.invariant,
    )

  def embedding(self, count: int, dim: int, scale: float | None = None) -> Embedding:
    """Makes a table [count, dim]; `scale` is a factor of its rows, if given."""
    return Embedding(
      count,
      dim,
      spec=self.spec("out_in"),
      scale=scale,
      param_dtype=self.param_dtype,
      rngs=self.rngs,
    )

  def correction(self, moe: MoEConfig) -> FrozenParam:
    """Makes the corrections of a router's scores, one per expert, in float32."""
    value = jnp.zeros((*self.stack, moe.num_experts), jnp.float32)
    spec = (None,) * value.ndim
    return FrozenParam(value, out_sharding=spec, eager_sharding=False)

  def small(self, shape: tuple[int, ...], value: object = None) -> nnx.Param:
    """Makes a parameter that no mesh splits.

    Args:
      shape: shape without the stack.
      value: initial value, broadcast to the shape; None draws it like a kernel.
    """
    whole = (*self.stack, *shape)
    if value is None:
      array = fresh(self.rngs.params(), whole)
    else:
      array = jnp.broadcast_to(jnp.asarray(value, jnp.float32), whole)
    return param(array.astype(self.param_dtype), (None,) * len(whole))
