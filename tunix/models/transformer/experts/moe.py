"""Mixture of experts: a router, and E gated MLPs of which each token uses k.

See Shazeer et al. 2017, arXiv:1701.06538.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from tunix.models.transformer.config import MoEConfig, ShardingRules
from tunix.models.transformer.dense import dropout, qwix_seam
from tunix.models.transformer.dense.layers import FrozenParam, Linear, RMSNorm, unit_rms
from tunix.models.transformer.dense.mlp import MLP, FusedGatedMLP
from tunix.models.transformer.experts import shard as expert_shard
from tunix.models.transformer.experts.routing import LayerRoutes
from tunix.models.transformer.experts.shard import ExpertShard
from tunix.utils import mesh as mesh_lib

Experts = MLP | FusedGatedMLP


# Modules and parameters that every device has whole, by attribute of `MoE`.
_WHOLE = {"router", "correction", "in_norm", "router_scale", "expert_scale"}


def _of_router(path: tuple[Any, ...], _: object) -> bool:
  return not _WHOLE.isdisjoint(path)


def active_share(model: nnx.Module) -> float:
  """Returns the share of the experts that each token uses, k / E; 1 without experts."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, MoE):
      return node.config.experts_per_token / node.router.kernel.shape[-1]
  return 1.0


_SCORES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
  "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
  "chosen": lambda logits: logits,
  "sigmoid": jax.nn.sigmoid,
}


class MoE(nnx.Module):
  """The sum of weight * expert(x) over the k experts of each token.

  Attributes:
    router: linear map [D, E]; its softmax in float32 gives the weights.
    experts: an MLP whose kernels have an axis of experts, [E, in, out].
    config: see `MoEConfig`.
    rules: mesh axes of rows, tokens and experts.
    correction: [E], added to the scores that choose experts, or None. It has no
      gradient.
    in_norm, router_scale, expert_scale: RMS norm of the experts' input, factors [D] of
      the router's normalized input, and factors [E] of the experts' weights, see
      `MoEConfig.beside_mlp`; or None.
    shared: an MLP that every token uses besides its experts, or None.
    shared_gate: linear map [D, 1] whose sigmoid multiplies the output of `shared`, or
      None.
  """

  def __init__(
    self,
    router: Linear,
    experts: Experts,
    *,
    config: MoEConfig,
    rules: ShardingRules,
    correction: FrozenParam | None = None,
    shared: Experts | None = None,
    shared_gate: Linear | None = None,
    in_norm: RMSNorm | None = None,
    router_scale: nnx.Param | None = None,
    expert_scale: nnx.Param | None = None,
  ):
    self.router = router
    self.experts = experts
    self.config = config
    self.rules = rules
    self.correction = nnx.data(correction)
    self.in_norm, self.router_scale = nnx.data(in_norm), nnx.data(router_scale)
    self.expert_scale = nnx.data(expert_scale)
    self.shared, self.shared_gate = nnx.data(shared), nnx.data(shared_gate)

  def __call__(
    self, x: Float[Array, "B T D"], routes: LayerRoutes | None = None
  ) -> Float[Array, "B T D"]:
    """Returns the sum over the experts of each token, and the shared MLP's output.

    Args:
      x: the tokens.
      routes: logs the routes, or replays recorded ones; None for neither.
    """
    if self.shared is None:
      return self._routed(x, routes)
    # Apart: its weights are split like those of an MLP, not like those of experts.
    alone = nnx.merge(*nnx.split(self))
    alone.shared, alone.shared_gate = nnx.data(None), nnx.data(None)
    with jax.named_scope("shared"):
      out = self.shared(x)
      if self.shared_gate is not None:
        out = out * jax.nn.sigmoid(self.shared_gate(x))
    return alone._routed(x, routes) + out

  def _routed(self, x, routes):
    mesh = mesh_lib.context_mesh()
    can_shard = self.config.implementation == "ragged" and not self._needs_whole_batch()
    if mesh is not None and can_shard and not self._is_left_to_xla(mesh, x):
      return self._on_mesh(mesh, x, routes)
    logits = self._logits(x)
    replay = None if routes is None else routes.replay
    weights, chosen = self._choose(logits, replay)
    if routes is not None:
      routes.add(logits, chosen, self._replaced(logits, chosen, replay))
    weights = weights.astype(x.dtype)
    x = x if self.in_norm is None else self.in_norm(x)
    with jax.named_scope("experts"):
      if self.config.implementation == "dense":
        return self._dense(x, weights, chosen)
      return self._grouped(self.experts, ExpertShard(self._count), x, weights, chosen)

  def _is_left_to_xla(self, mesh: Mesh | AbstractMesh, x: jax.Array) -> bool:
    """Returns True if XLA's partitioner chooses the better program.

    With one token per row, as in a decode step, the weights are larger than the tokens,
    and XLA moves the tokens. If ep splits the experts, XLA would move their weights
    instead, so this function returns False; but if `rules.step` splits the products of
    a decode step, XLA moves the tokens in that case too.
    """
    return x.shape[1] == 1 and (
      bool(self.rules.step) or self.rules.ep not in mesh.shape
    )

  def _needs_whole_batch(self) -> bool:
    """Returns True if the call cannot be split over devices by `shard_map`.

    qwix adds parameters during its first call. Dropout would draw the same mask on
    every device.
    """
    return qwix_seam.is_initialising(self) or dropout.is_on(self)

  @property
  def _count(self) -> int:
    return self.router.kernel.shape[-1]

  def route(
    self, tokens: Float[Array, "... D"]
  ) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Returns weights and numbers of each token's experts, the most likely first."""
    weights, chosen = self._choose(self._logits(tokens))
    return weights.astype(tokens.dtype), chosen

  def _logits(self, tokens: Float[Array, "... D"]) -> Float[Array, "... E"]:
    with jax.named_scope("router"):
      if self.config.routing == "sigmoid":  # trained in float32
        tokens = tokens.astype(jnp.float32)
      if self.router_scale is not None and self.in_norm is not None:
        unit = unit_rms(tokens, self.in_norm.eps).astype(tokens.dtype)
        scale = self.router_scale[...].astype(tokens.dtype)
        tokens = unit * scale * jnp.asarray(tokens.shape[-1] ** -0.5, tokens.dtype)
      return self.router(tokens).astype(jnp.float32)

  def _choose(
    self, logits: Float[Array, "... E"], replay: Int[Array, "... k"] | None = None
  ) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Returns weights and numbers of each token's experts, given the router's logits.

    Args:
      logits: the logits.
      replay: numbers of the experts to use; None, or negative numbers of a token, for
        those of the largest scores.
    """
    with jax.named_scope("router"):
      c = self.config
      scores = _SCORES[c.routing](logits)
      if replay is None:
        weights, chosen = self._best(scores)
      else:
        chosen = jnp.where(replay < 0, self._best(scores)[1], replay)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
      if c.routing == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
      elif c.normalise:  # Qwen 3 renormalizes the k weights to the sum 1
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
      if self.expert_scale is not None:
        weights = weights * self.expert_scale[...].astype(jnp.float32)[chosen]
      return (weights if c.scale == 1 else c.scale * weights), chosen

  def _replaced(self, logits, chosen, replay) -> Float[Array, "... 1"]:
    """Returns 1 for tokens whose experts are others than the router's choice, else 0.

    The order of the experts does not matter.
    """
    if replay is None:
      return jnp.zeros((*chosen.shape[:-1], 1), jnp.float32)
    own = self._best(_SCORES[self.config.routing](logits))[1]
    is_kept = jnp.any(own[..., :, None] == chosen[..., None, :], axis=-1)
    return 1.0 - jnp.all(is_kept, axis=-1, keepdims=True).astype(jnp.float32)

  def _best(self, scores):
    """Returns scores and numbers of the experts to use."""
    c = self.config
    if self.correction is None:
      return jax.lax.top_k(scores, c.experts_per_token)
    ranks = scores + self.correction[...].astype(jnp.float32)
    if c.groups > 1:
      groups = ranks.reshape(*ranks.shape[:-1], c.groups, -1)
      of_group = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
      used = jax.lax.top_k(of_group, c.groups_used)[1]
      is_used = jnp.any(jax.nn.one_hot(used, c.groups, dtype=bool), axis=-2)
      ranks = jnp.where(is_used[..., None], groups, -jnp.inf).reshape(ranks.shape)
    chosen = jax.lax.top_k(ranks, c.experts_per_token)[1]
    return jnp.take_along_axis(scores, chosen, axis=-1), chosen

  def _dense(self, x, weights, chosen):
    """Runs every expert on every token; the unused ones get weight 0."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = (y.reshape(-1, y.shape[-1]) for y in (weights, chosen))
    rows = jnp.arange(tokens.shape[0])[:, None]
    table = jnp.zeros((tokens.shape[0], self._count), weights.dtype)
    table = table.at[rows, chosen].set(weights)
    every = jnp.broadcast_to(tokens, (self._count, *tokens.shape))
    out = self._experts(self.experts, every, Linear.per_expert)
    return jnp.einsum("emd,me->md", out, table).reshape(x.shape)

  def _on_mesh(
    self, mesh: Mesh | AbstractMesh, x: jax.Array, routes: LayerRoutes | None
  ) -> jax.Array:
    """Runs each device on its own tokens and, along ep, on its own experts.

    XLA's partitioner would sort the tokens of all devices together, on every device.
    Here the tokens of the devices along ep are all-gathered, each device computes the
    outputs of its experts, and a reduce-scatter returns the sums to the devices of the
    tokens. If the size of ep is at most k, this moves no more bytes than sending each
    token to its k experts. Experts have no capacity limit, so no token is dropped.
    If the weights of the experts are fewer bytes than the tokens, they travel instead,
    see `expert_shard.on_mesh`.
    """
    graph, router, rest = nnx.split(self, _of_router, ...)

    # Arrays with a leading axis of E are kernels and adapters of the experts.
    def of_experts(y):
      return y.shape[:1] == (self._count,)

    experts = [y for y in jax.tree.leaves(rest) if of_experts(y)]
    k = self.config.experts_per_token
    shard = expert_shard.on_mesh(x, experts, self._count, k, mesh, self.rules)

    def local(router, rest, x, replay):
      moe = nnx.merge(graph, router, rest)
      # Routing comes before the all-gather, so that every token is routed only once.
      # The gather then also moves k weights and k expert numbers per token.
      logits = moe._logits(x)
      weights, chosen = moe._choose(logits, replay)
      routed = ()
      if routes is not None:
        routed = logits, chosen, moe._replaced(logits, chosen, replay)
      weights = weights.astype(x.dtype)
      x = x if moe.in_norm is None else moe.in_norm(x)
      flat = [y.reshape(-1, y.shape[-1]) for y in (x, weights, chosen)]
      with jax.named_scope("experts"):
        if shard.gathers:
          flat = [jax.lax.all_gather(y, shard.axis, tiled=True) for y in flat]
        out = moe._grouped(moe.experts, shard, *flat)
        if shard.gathers:
          out = jax.lax.psum_scatter(out, shard.axis, tiled=True)
        elif shard.axis is not None:
          out = jax.lax.psum(out, shard.axis)
      return out.reshape(x.shape), routed

    def spec(y):
      return PartitionSpec(shard.axis if of_experts(y) else None)

    out, routed = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(PartitionSpec(), jax.tree.map(spec, rest), *[shard.tokens] * 2),
      out_specs=shard.tokens,
      check_vma=False,
    )(router, rest, x, None if routes is None else routes.replay)
    if routes is not None:
      routes.add(*routed)
    return out

  def _grouped(self, experts: Experts, shard: ExpertShard, x, weights, chosen):
    """Returns the sum over the device's experts for each token.

    Each (token, expert) pair has one row. Rows are sorted by expert, so that the rows
    of one expert are one block of a grouped product. Rows for experts of other devices
    come last.

    Args:
      experts: the MLPs, kernels [count, in, out] on this device.
      shard: the experts of this device.
      x: tokens [..., D].
      weights, chosen: weights and expert numbers from `route`, [..., k].
    """
    k = self.config.experts_per_token
    tokens = x.reshape(-1, x.shape[-1])
    number = chosen.reshape(-1) - shard.first
    is_local = (number >= 0) & (number < shard.count)
    # Experts of other devices get the number `count`. It sorts after all local experts,
    # and [:-1] removes its entry from the block sizes.
    number = jnp.where(is_local, number, shard.count)
    order = jnp.argsort(number, stable=True)
    sizes = jnp.bincount(number, length=shard.count + 1)[:-1].astype(jnp.int32)
    # Shapes are static, so there must be rows for the case that every token chooses as
    # many local experts as possible. Its k experts are different, hence the minimum.
    rows_max = tokens.shape[0] * min(k, shard.count)

    def product(linear: Linear, rows: jax.Array) -> jax.Array:
      with shard.row_annotation(k):
        return linear.grouped(rows, sizes)

    # Pair i belongs to token i // k, because `chosen` was flattened from [tokens, k].
    out = self._experts(experts, tokens[order[:rows_max] // k], product)
    if shard.axis is not None:  # rows of other devices' experts hold no valid numbers
      out = jnp.where(jnp.arange(rows_max)[:, None] < jnp.sum(sizes), out, 0)
    # Each pair reads its row back by a gather. A scatter-add has no fixed order of
    # additions, so its sums would differ between runs. Pairs beyond `rows_max` belong
    # to experts of other devices and read 0.
    back = jnp.argsort(order)
    out = out.at[back].get(mode="fill", fill_value=0)
    out = out.reshape(tokens.shape[0], k, -1)
    weights = weights.reshape(-1, k)
    return jnp.einsum("mkd,mk->md", out, weights).reshape(x.shape)

  def _experts(
    self,
    mlp: Experts,
    x: jax.Array,
    product: Callable[[Linear, jax.Array], jax.Array],
  ) -> jax.Array:
    return product(mlp.down_proj, mlp.hidden(x, product))
