"""One layer of the decoder, or a stack of layers, made from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer.attention import rope
from tunix.models.transformer.attention.layer import Attention, KeysValues, Kind
from tunix.models.transformer.attention.mla import MLA
from tunix.models.transformer.attention.rope import Angles
from tunix.models.transformer.config import (
  DeltaNetConfig,
  MoEConfig,
  TransformerConfig,
)
from tunix.models.transformer.dense.layers import ACTIVATIONS
from tunix.models.transformer.dense.mlp import MLP, FusedGatedMLP, GatedMLP
from tunix.models.transformer.experts.beside import ExpertsBeside
from tunix.models.transformer.experts.moe import MoE
from tunix.models.transformer.experts.routing import LayerRoutes
from tunix.models.transformer.layer_inputs import LayerInputGate
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.recurrences.delta_net import GatedDeltaNet
from tunix.models.transformer.recurrences.mamba2 import Mamba2
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.visibility import Visibility
from tunix.ops.vocabulary import invariant


class DecoderLayer(nnx.Module):
  """A mixer and an MLP (or experts), each added to the residual stream.

  The mixer, `attn`, is attention or a recurrence. `TransformerConfig.parts` may leave
  out one of the two.

  The RMS norms have Hugging Face's names. With norms "pre" this name of the norm before
  the MLP is `post_attention_layernorm`.

  Args:
    config: shape and options of the decoder.
    stack: (L,) for a stack of L layers, () for one layer.
    rngs: source of the weights' keys.
  """

  def __init__(self, config: TransformerConfig, stack: tuple[int, ...], rngs: nnx.Rngs):
    c = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs, stack, c.batch_invariant)
    self.norms = _NORMS[c.norms] if c.parts == "both" else _ONE_NORM
    for name in self.norms:
      if name is not None:
        setattr(self, name, make.norm(c.embed_dim, c.norm_eps, c.norm_offset))
    self.attn = nnx.data(None) if c.parts == "mlp" else _mixer(c, make)
    self.mlp = nnx.data(None) if c.parts == "mixer" else _mlp(c, make)
    beside = c.moe is not None and c.moe.beside_mlp
    self.beside = nnx.data(
      ExpertsBeside(c, make, _moe(c, c.moe, make)) if c.moe and beside else None
    )
    takes_input = c.layer_input_dim is not None
    self.input_gate = nnx.data(LayerInputGate(c, make) if takes_input else None)
    self.scalar = nnx.data(make.scalar() if c.layer_scalars else None)
    self.residual_multiplier = c.residual_multiplier
    self.rules = c.sharding
    self.invariant = c.batch_invariant

  def __call__(
    self,
    x: Float[Array, "B T D"],
    angles: Angles | tuple[Angles, ...],
    visible: Visibility,
    cached: KeysValues | None = None,
    kind: Kind = 0,
    routes: LayerRoutes | None = None,
    vector: Float[Array, "B T P"] | None = None,
    source: KeysValues | None = None,
  ) -> tuple[Float[Array, "B T D"], KeysValues]:
    """Returns the new residual stream, and the keys and values of its attention.

    Args:
      x: the residual stream.
      angles: rotary angles of all kinds of layer, see `rope.angles_by_kind`.
      visible: the keys that each query attends to.
      cached: see `Attention`.
      kind: number of the layer's kind, see `TransformerConfig.kinds`.
      routes: logs or replays the routes of experts; see `MoE`.
      vector: the layer's vectors, see layer_inputs.py.
      source: see `Attention`.
    """
    attn_in, attn_out, mlp_in, mlp_out = (self._norm(name) for name in self.norms)
    keys_values = cached
    if self.attn is not None:
      with jax.named_scope("attn"):
        own = rope.of_kind(angles, kind)
        more = (source,) if isinstance(self.attn, Attention) else ()
        out, keys_values = self.attn(attn_in(x), own, visible, cached, kind, *more)
        x = self._sum(x, self._scaled(attn_out(out)))
        x = sharding.pin_activations(x, self.rules)
    if self.mlp is not None:
      with jax.named_scope("mlp"):
        extra = (routes,) if isinstance(self.mlp, MoE) else ()
        out = self.mlp(mlp_in(x), *extra)
        if self.beside is not None:
          out = self.beside(out, x, routes)
        x = self._sum(x, self._scaled(mlp_out(out)))
      x = sharding.pin_activations(x, self.rules)
    if self.input_gate is not None and vector is not None:
      with jax.named_scope("layer_input"):
        x = sharding.pin_activations(x + self.input_gate(x, vector), self.rules)
    if self.scalar is not None:
      x = x * self.scalar[...].astype(x.dtype)
    return x, keys_values

  def _scaled(self, out: jax.Array) -> jax.Array:
    """Multiplies in float32: the factor itself may have no exact 16-bit value."""
    if self.residual_multiplier == 1:
      return out
    out = (out.astype(jnp.float32) * self.residual_multiplier).astype(out.dtype)
    return invariant.kept(out, self.invariant)

  def _sum(self, x: jax.Array, out: jax.Array) -> jax.Array:
    return invariant.kept(x + out, self.invariant)

  def _norm(self, name: str | None) -> Callable[[jax.Array], jax.Array]:
    return (lambda x: x) if name is None else getattr(self, name)


# Names of the norms before and after attention, before and after the MLP.
_NORMS: Mapping[str, tuple[str | None, str | None, str | None, str | None]] = {
  "pre": ("input_layernorm", None, "post_attention_layernorm", None),
  "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
  "both": (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
  ),
}

# A layer of one part has one norm, before this part. Only this part is called.
_ONE_NORM = ("input_layernorm", None, "input_layernorm", None)


def _mixer(
  c: TransformerConfig, make: LayerMaker
) -> Attention | Mamba2 | GatedDeltaNet:
  if c.mixer is None:
    return _attention(c, make) if c.mla is None else MLA(c, c.mla, make)
  kind = GatedDeltaNet if isinstance(c.mixer, DeltaNetConfig) else Mamba2
  return kind(c, make)


def _attention(c: TransformerConfig, make: LayerMaker) -> Attention:
  d, q_dim, kv_dim = c.embed_dim, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  widths = {None: None, "head": (c.head_dim, c.head_dim), "all": (q_dim, kv_dim)}
  norms = widths[c.qk_norm]

  def norm(width):
    return make.norm(width, c.norm_eps, c.norm_offset)

  def into(width):
    return make.linear(d, width, "in_out", bias=c.qkv_bias)

  fused = c.fused_qkv

  def one(width, given):
    return into(width) if given and not fused else None

  return Attention(
    one(q_dim * (2 if c.attention_gate else 1), True),
    one(kv_dim, not c.reads_kv),
    one(kv_dim, not (c.reads_kv or c.values_from_keys)),
    make.linear(q_dim, d, "out_in", bias=c.o_bias),
    qkv_proj=into(q_dim + 2 * kv_dim) if fused else None,
    head_dim=c.head_dim,
    q_norm=norms and norm(norms[0]),
    k_norm=None if c.reads_kv else norms and norm(norms[1]),
    value_eps=c.norm_eps if c.value_norm else None,
    wide_norm=c.qk_norm == "all",
    gated=c.attention_gate,
    scale=c.query_scale,
    softcap=c.attention_softcap,
    windows=tuple(kind.window for kind in c.kinds),
    implementation="invariant" if c.batch_invariant else c.attention,
    rules=c.sharding,
    sinks=make.sinks(c.num_heads) if c.attention_sinks else None,
  )


def _mlp(c: TransformerConfig, make: LayerMaker) -> MLP | FusedGatedMLP | MoE:
  if c.moe is None or c.moe.beside_mlp:
    return _dense_mlp(c, make, c.hidden_dim)
  return _moe(c, c.moe, make)


def _moe(c: TransformerConfig, moe: MoEConfig, make: LayerMaker) -> MoE:
  shared, beside = moe.shared_hidden_dim, moe.beside_mlp
  return MoE(
    make.linear(c.embed_dim, moe.num_experts, "router", bias=moe.bias),
    _experts(c, moe, make),
    config=moe,
    rules=c.sharding,
    correction=make.correction(moe) if moe.routing == "sigmoid" else None,
    shared=None if shared is None else _dense_mlp(c, make, shared),
    shared_gate=make.linear(c.embed_dim, 1, "router") if moe.shared_gate else None,
    in_norm=make.norm(c.embed_dim, c.norm_eps, c.norm_offset) if beside else None,
    router_scale=make.small((c.embed_dim,), 1.0) if beside else None,
    expert_scale=make.small((moe.num_experts,), 1.0) if beside else None,
  )


def _dense_mlp(
  c: TransformerConfig, make: LayerMaker, hidden_dim: int
) -> MLP | FusedGatedMLP:
  def into():
    return make.linear(c.embed_dim, hidden_dim, "in_out")

  def down():
    return make.linear(hidden_dim, c.embed_dim, "out_in")

  if c.gated_mlp and c.fused_gate_up:
    both = make.linear(c.embed_dim, 2 * hidden_dim, "in_out")
    return FusedGatedMLP(both, down(), ACTIVATIONS[c.activation], halves=True)
  if c.gated_mlp:
    return GatedMLP(into(), into(), down(), ACTIVATIONS[c.activation])
  return MLP(into(), down(), ACTIVATIONS[c.activation])


def _experts(
  c: TransformerConfig, moe: MoEConfig, make: LayerMaker
) -> MLP | FusedGatedMLP:
  """Makes the experts of a mixture, see `MoEConfig`."""
  options = {"experts": moe.num_experts, "bias": moe.bias}

  def into(width):
    return make.linear(c.embed_dim, width, "in_out", **options)

  def down():
    return make.linear(moe.hidden_dim, c.embed_dim, "out_in", **options)

  activation, gating = ACTIVATIONS[c.activation], moe.clamped_gate
  if moe.fused_gate:
    both = into(2 * moe.hidden_dim)
    return FusedGatedMLP(both, down(), activation, gating, halves=moe.fused_halves)
  if not c.gated_mlp:
    return MLP(into(moe.hidden_dim), down(), activation)
  first = into(moe.hidden_dim), into(moe.hidden_dim)
  return GatedMLP(*first, down(), activation, gating)
