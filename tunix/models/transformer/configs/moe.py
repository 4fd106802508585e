"""The settings of a mixture of experts."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedGate:
  """The gate of gpt-oss: min(g, c) sigmoid(alpha min(g, c)) (clip(u, -c, c) + 1).

  g and u are the outputs of the gate's and the up projection.

  Attributes:
    alpha: factor inside the sigmoid; 1.702 approximates GELU.
    limit: the number c.
  """

  alpha: float = 1.702
  limit: float = 7.0

  def __post_init__(self):
    checks.fields(self, alpha=checks.POSITIVE, limit=checks.POSITIVE)

  def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns the hidden units."""
    gate = jnp.minimum(gate, self.limit)
    up = jnp.clip(up, -self.limit, self.limit)
    return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
  """A mixture of experts in place of the MLP (Shazeer et al. 2017).

  Attributes:
    num_experts: number of experts E.
    experts_per_token: number of experts k that each token uses.
    hidden_dim: hidden width F of one expert.
    normalise: if True, the k weights are divided by their sum.
    routing: "softmax" takes the softmax over all experts and then the k largest;
      "chosen" takes the k largest logits and then the softmax over them (gpt-oss),
      which needs no `normalise`; "sigmoid" takes the sigmoid of each logit, and adds a
      correction to choose but not to weigh (DeepSeek-V3, arXiv:2412.19437).
    groups, groups_used: with "sigmoid" routing, the experts form `groups` groups. The k
      experts belong to the `groups_used` groups whose two best experts have the largest
      sums.
    scale: factor of the weights.
    shared_hidden_dim: hidden width of an MLP that every token uses besides its experts,
      or None.
    shared_gate: if True, the output of the shared MLP is multiplied by the sigmoid of a
      linear map of the token (Qwen 3.5).
    bias: if True, the router and the maps of the experts have biases.
    fused_gate: if True, gate and up projection are one map `gate_up_proj` whose outputs
      2 i and 2 i + 1 are gate and up of hidden unit i (gpt-oss).
    fused_halves: if True, the first half of the outputs of `gate_up_proj` is the gate
      instead, and the second half is up (Gemma 4).
    beside_mlp: if True, the layer has its MLP too (see experts/beside.py). The input of
      the router is scale * x / (rms(x) sqrt(D)), with a vector `scale`, and each expert
      has a factor of its weights (Gemma 4).
    clamped_gate: the gate in place of activation(gate) * up, or None.
    balance_weight: weight of the load-balancing loss in training, 0 for none; see
      `ops.router`.
    z_weight: weight of the router z-loss in training, 0 for none; see `ops.router`.
    dense_layers: numbers of the layers that have the gated MLP in place of experts.
    implementation: "ragged" sorts tokens by expert and runs one grouped product, with
      work proportional to k. "dense" runs every expert on every token, with work
      proportional to E; it is the reference that "ragged" is tested against.
  """

  num_experts: int
  experts_per_token: int
  hidden_dim: int
  normalise: bool = True
  routing: Literal["softmax", "chosen", "sigmoid"] = "softmax"
  groups: int = 1
  groups_used: int = 1
  scale: float = 1.0
  shared_hidden_dim: int | None = None
  shared_gate: bool = False
  bias: bool = False
  fused_gate: bool = False
  fused_halves: bool = False
  beside_mlp: bool = False
  clamped_gate: ClampedGate | None = None
  balance_weight: float = 0.0
  z_weight: float = 0.0
  dense_layers: tuple[int, ...] = ()
  implementation: Literal["ragged", "dense"] = "ragged"

  def __post_init__(self):
    checks.fields(
      self,
      num_experts=checks.COUNT,
      hidden_dim=checks.COUNT,
      groups=checks.COUNT,
      groups_used=checks.COUNT,
      scale=checks.POSITIVE,
      shared_hidden_dim=checks.COUNT,
      balance_weight=checks.NOT_NEGATIVE,
      z_weight=checks.NOT_NEGATIVE,
    )
    if not 1 <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f"experts_per_token is {self.experts_per_token}; expected 1 to "
        f"{self.num_experts}, the number of experts"
      )
    if self.routing not in ("softmax", "chosen", "sigmoid"):
      raise ValueError(
        f"MoE routing is {self.routing!r}; expected 'softmax', 'chosen' or 'sigmoid'"
      )
    self._check_groups()
    if self.implementation not in ("ragged", "dense"):
      raise ValueError(
        f"MoE implementation {self.implementation!r} must be 'ragged' or 'dense'"
      )

  def _check_groups(self):
    if self.groups > 1 and self.routing != "sigmoid":
      raise ValueError(
        f"groups is {self.groups} with {self.routing!r} routing; expected 1, or "
        "routing 'sigmoid'"
      )
    if self.num_experts % self.groups or self.groups_used > self.groups:
      raise ValueError(
        f"groups is {self.groups} and groups_used {self.groups_used}; expected a "
        f"divisor of num_experts {self.num_experts}, and at most as many used groups"
      )
    size = self.num_experts // self.groups
    most = size * self.groups_used
    if self.groups > 1 and (size < 2 or self.experts_per_token > most):
      raise ValueError(
        f"groups of {size} experts, of which {self.groups_used} are used; expected at "
        f"least two experts in a group and {self.experts_per_token} in the used groups"
      )
    if self.shared_gate and self.shared_hidden_dim is None:
      raise ValueError(
        "shared_gate is True and shared_hidden_dim None; expected a width of the MLP"
      )
