"""Mixture of experts: a router and E gated MLPs of which each token uses k.

(Shazeer et al. 2017, arXiv:1701.06538; softmax before top-k as in Qwen 3.)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from tunix.models.transformer import dropout, qwix_seam, sharding
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.layers import GatedMLP, Linear
from tunix.perf import hlo_flops
from tunix.utils import mesh as mesh_lib


def _names(spec: PartitionSpec) -> set[str]:
  """Mesh axes of a spec."""
  entries = ((x,) if isinstance(x, str) else x or () for x in spec)
  return {name for names in entries for name in names}


def _of_router(path: tuple[Any, ...], _: Any) -> bool:
  return "router" in path


def active_share(model: nnx.Module) -> float:
  """The share of its experts that a token meets, k / E; 1 without experts."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, MoE):
      return node.experts_per_token / node.router.kernel.shape[-1]
  return 1.0


@dataclasses.dataclass(frozen=True)
class Share:
  """The experts that a device has.

  Attributes:
    total: experts of the layer.
    axis: mesh axis that splits them; None: all are here.
    parts: into how many.
  """

  total: int
  axis: str | None = None
  parts: int = 1

  @property
  def count(self) -> int:
    return self.total // self.parts

  @property
  def first(self) -> Any:
    """Number of the first expert that is here."""
    return 0 if self.axis is None else jax.lax.axis_index(self.axis) * self.count

  def told(self, k: int) -> Any:
    """Writes onto grouped products which part of their rows counts, on average: there
    is room for all that tokens with k experts can send. `perf.hlo_flops` reads it."""
    if self.axis is None:
      return contextlib.nullcontext()
    part = k / self.parts / min(k, self.count)
    return set_xla_metadata(**{hlo_flops.SHARE: str(part)})


class MoE(nnx.Module):
  """sum over the token's k experts of weight * expert(x).

  Attributes:
    router: [D, E]; its softmax in float32 gives the weights.
    experts: a gated MLP whose kernels carry the axis of the experts, [E, in, out].
  """

  def __init__(
    self,
    router: Linear,
    experts: GatedMLP,
    *,
    experts_per_token: int,
    normalise: bool,
    implementation: Literal["ragged", "dense"],
    rules: ShardingRules,
  ):
    self.router = router
    self.experts = experts
    self.experts_per_token = experts_per_token
    self.normalise = normalise
    self.implementation = implementation
    self.rules = rules

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    mesh = mesh_lib.context_mesh()
    ours = self.implementation == "ragged" and not self._adds_or_drops()
    if mesh is not None and ours and not self._is_left_to_xla(mesh, x):
      return self._on_mesh(mesh, x)
    weights, chosen = self.route(x)
    with jax.named_scope("experts"):
      if self.implementation == "dense":
        return self._dense(x, weights, chosen)
      return self._grouped(self.experts, Share(self._count), x, weights, chosen)

  def _is_left_to_xla(self, mesh: Mesh | AbstractMesh, x: jax.Array) -> bool:
    """Whether XLA finds the better way: of a single token a row weights are more than
    tokens, and it moves the latter; but the weights of experts that ep splits, unless
    they split the products of a step besides."""
    return x.shape[1] == 1 and (
      bool(self.rules.step) or self.rules.ep not in mesh.shape
    )

  def _adds_or_drops(self) -> bool:
    """Whether qwix adds parameters in this call, or adapters draw masks, which would be
    the same on every device."""
    return qwix_seam.is_initialising(self) or dropout.is_on(self)

  @property
  def _count(self) -> int:
    return self.router.kernel.shape[-1]

  def route(
    self, tokens: Float[Array, "... D"]
  ) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """(weights, numbers) of each token's experts, the most likely first."""
    with jax.named_scope("router"):
      probabilities = jax.nn.softmax(self.router(tokens).astype(jnp.float32), axis=-1)
      weights, chosen = jax.lax.top_k(probabilities, self.experts_per_token)
      if self.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
      return weights.astype(tokens.dtype), chosen

  def _dense(self, x, weights, chosen):
    """Every expert on every token; most of it is weighted with zero."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = (y.reshape(-1, y.shape[-1]) for y in (weights, chosen))
    rows = jnp.arange(tokens.shape[0])[:, None]
    table = jnp.zeros((tokens.shape[0], self._count), weights.dtype)
    table = table.at[rows, chosen].set(weights)
    every = jnp.broadcast_to(tokens, (self._count, *tokens.shape))
    out = self._experts(self.experts, every, Linear.per_expert)
    return jnp.einsum("emd,me->md", out, table).reshape(x.shape)

  def _on_mesh(self, mesh: Mesh | AbstractMesh, x: jax.Array) -> jax.Array:
    """Each device on its own tokens and, along ep, its own experts.

    Left to XLA, the tokens of all devices are sorted together, and every device has all
    of them. Here the tokens of the devices along ep are gathered, each gives what its
    experts make of them, and the sums go back to whose tokens they are. As many bytes
    travel as in an exchange of single tokens where ep is at most k, and no expert has a
    capacity: no token is dropped.
    """
    share = Share(self._count)
    ep = self.rules.ep if self.rules.ep in mesh.shape else None
    if ep is not None and self._count % mesh.shape[ep] == 0:
      share = Share(self._count, ep, mesh.shape[ep])
    tokens = sharding.tokens_everywhere(x.shape, mesh, self.rules)
    gathers = share.axis is not None and share.axis in _names(tokens)
    graph, router, rest = nnx.split(self, _of_router, ...)

    def local(router, rest, x):
      moe = nnx.merge(graph, router, rest)
      weights, chosen = moe.route(x)
      flat = [y.reshape(-1, y.shape[-1]) for y in (x, weights, chosen)]
      with jax.named_scope("experts"):
        if gathers:
          flat = [jax.lax.all_gather(y, share.axis, tiled=True) for y in flat]
        out = moe._grouped(moe.experts, share, *flat)
        if gathers:
          out = jax.lax.psum_scatter(out, share.axis, tiled=True)
        elif share.axis is not None:
          out = jax.lax.psum(out, share.axis)
      return out.reshape(x.shape)

    lies = lambda y: PartitionSpec(
      share.axis if y.shape[:1] == (self._count,) else None
    )
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(PartitionSpec(), jax.tree.map(lies, rest), tokens),
      out_specs=tokens,
      check_vma=False,
    )(router, rest, x)

  def _grouped(self, experts: GatedMLP, share: Share, x, weights, chosen):
    """What the experts that are here add to each token. Rows are sorted by expert, so
    that each expert's are one block of a product; behind them those of others."""
    k = self.experts_per_token
    tokens = x.reshape(-1, x.shape[-1])
    number = chosen.reshape(-1) - share.first
    is_here = (number >= 0) & (number < share.count)
    number = jnp.where(is_here, number, share.count)
    order = jnp.argsort(number, stable=True)
    sizes = jnp.bincount(number, length=share.count + 1)[:-1].astype(jnp.int32)
    most = tokens.shape[0] * min(k, share.count)  # if every token chose only these

    def product(linear: Linear, rows: jax.Array) -> jax.Array:
      with share.told(k):
        return linear.grouped(rows, sizes)

    out = self._experts(experts, tokens[order[:most] // k], product)
    if share.axis is not None:
      out = jnp.where(jnp.arange(most)[:, None] < jnp.sum(sizes), out, 0)
    back = jnp.argsort(order)  # by a gather: adding rows up by a scatter has no order
    out = out.at[back].get(mode="fill", fill_value=0)
    out = out.reshape(tokens.shape[0], k, -1)
    weights = weights.reshape(-1, k)
    return jnp.einsum("mkd,mk->md", out, weights).reshape(x.shape)

  def _experts(
    self,
    mlp: GatedMLP,
    x: jax.Array,
    product: Callable[[Linear, jax.Array], jax.Array],
  ) -> jax.Array:
    hidden = mlp.activation(product(mlp.gate_proj, x)) * product(mlp.up_proj, x)
    return product(mlp.down_proj, hidden)
