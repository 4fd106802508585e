"""Experts of a mixture on the devices of a mesh: who has which, and what travels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.shards import sharding
from tunix.perf import hlo_flops


@dataclasses.dataclass(frozen=True)
class ExpertShard:
  """The experts whose products one device computes, and the tokens that it holds.

  Attributes:
    total: number of experts of the layer.
    tokens: spec of the tokens [B, T, D] before and after the layer; None without a
      mesh.
    axis: mesh axis that splits the experts; None if every device computes all of them.
    parts: size of this axis.
  """

  total: int
  tokens: PartitionSpec | None = None
  axis: str | None = None
  parts: int = 1

  @property
  def count(self) -> int:
    """Number of experts on the device."""
    return self.total // self.parts

  @property
  def first(self) -> Any:
    """Number of the device's first expert, traced inside `shard_map`."""
    return 0 if self.axis is None else jax.lax.axis_index(self.axis) * self.count

  @property
  def gathers(self) -> bool:
    """True if the tokens of the devices along `axis` differ, so that they travel.

    If the size of the axis does not divide the tokens, each device along it has all of
    them already.
    """
    return self.axis is not None and self.axis in _names(self.tokens)

  def row_annotation(self, k: int) -> Any:
    """Returns a context that annotates products with the used share of their rows.

    A product has min(k, count) rows per token, the largest number of local experts that
    one token can choose. On average k / parts of them are used. `perf.hlo_flops` reads
    this share from the compiled program to count the useful FLOPs.
    """
    if self.axis is None:
      return contextlib.nullcontext()
    part = k / self.parts / min(k, self.count)
    return set_xla_metadata(**{hlo_flops.SHARE: str(part)})


def on_mesh(
  x: Float[Array, "B T D"],
  experts: Sequence[Array],
  total: int,
  k: int,
  mesh: Mesh | AbstractMesh,
  rules: ShardingRules,
) -> ExpertShard:
  """Returns which experts a device computes for tokens on a mesh.

  Each device computes its own experts if the axis `rules.ep` divides their number. If
  this axis also splits the tokens, and the weights of all experts are fewer bytes than
  they, the weights travel instead, as along the other axes.

  Args:
    x: tokens.
    experts: arrays [E, ...] of the experts.
    total: E.
    k: experts of a token.
    mesh: mesh of the call.
    rules: mesh axes of rows, tokens and experts.
  """
  tokens = sharding.tokens_everywhere(x.shape, mesh, rules)
  ep = rules.ep
  if ep is None or ep not in mesh.shape or total % mesh.shape[ep]:
    return ExpertShard(total, tokens)
  shard = ExpertShard(total, tokens, ep, mesh.shape[ep])
  if shard.gathers and weights_are_fewer(x, experts, k, shard, mesh):
    return ExpertShard(total, tokens)
  return shard


def weights_are_fewer(
  x: Float[Array, "B T D"],
  experts: Sequence[Array],
  k: int,
  shard: ExpertShard,
  mesh: Mesh | AbstractMesh,
) -> bool:
  """Returns True if a device receives fewer bytes with weights sent than with tokens.

  One forward pass is counted. The backward pass doubles both if the weights are frozen;
  gradients of trained weights add half of the weights' bytes again.
  """
  split = 1
  for name in _names(shard.tokens):
    split *= mesh.shape[name]
  here = x.size // x.shape[-1] // split
  there = here * (x.shape[-1] * x.dtype.itemsize + k * (x.dtype.itemsize + 4))
  back = here * x.shape[-1] * x.dtype.itemsize
  others = shard.parts - 1
  weights = sum(y.size * _bits(y.dtype) / 8 for y in experts)
  return weights * others / shard.parts < (there + back) * others


def _bits(dtype: DTypeLike) -> int:
  """Returns bits of a number; 4 for int4, whose itemsize is a byte."""
  is_float = jnp.issubdtype(dtype, jnp.floating)
  return (jnp.finfo if is_float else jnp.iinfo)(dtype).bits


def _names(spec: PartitionSpec | None) -> set[str]:
  """Returns the mesh axes of a spec."""
  entries = ((x,) if isinstance(x, str) else x or () for x in spec or ())
  return {name for names in entries for name in names}
