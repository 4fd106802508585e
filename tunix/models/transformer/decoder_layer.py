"""One layer of the decoder, or a stack of equal ones, made from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer import sharding
from tunix.models.transformer.attention import Attention, KeysValues, Kind
from tunix.models.transformer.config import MoEConfig, TransformerConfig
from tunix.models.transformer.layers import ACTIVATIONS, GatedMLP, Linear, RMSNorm
from tunix.models.transformer.moe import MoE
from tunix.models.transformer.visibility import Visibility


class DecoderLayer(nnx.Module):
  """Attention and MLP (or experts), each added to the residual stream.

  The RMS norms carry the names that Hugging Face gives them: with "pre" norms the one
  before the MLP is called `post_attention_layernorm`.
  """

  def __init__(self, config: TransformerConfig, stack: tuple[int, ...], rngs: nnx.Rngs):
    c = config
    make = _Maker(config, stack, rngs)
    names = _NORMS[c.norms]
    for name in names:
      if name is not None:
        setattr(self, name, make.norm(c.embed_dim))
    self.norms = names
    self.attn = make.attention()
    self.mlp = make.gated_mlp(c.hidden_dim) if c.moe is None else make.experts(c.moe)
    self.rules = c.sharding

  def __call__(
    self,
    x: Float[Array, "B T D"],
    sin_cos: tuple[jax.Array, jax.Array],
    visible: Visibility,
    cached: KeysValues | None = None,
    kind: Kind = 0,
  ) -> tuple[Float[Array, "B T D"], KeysValues]:
    """Returns the new residual stream and the keys and values.

    Args:
      x: the residual stream.
      sin_cos: rotary angles, with a leading axis for the kinds of layer.
      visible: who may look where.
      cached: see `Attention`.
      kind: the layer's kind, see `TransformerConfig.kinds`.
    """
    attn_in, attn_out, mlp_in, mlp_out = (self._norm(name) for name in self.norms)
    with jax.named_scope("attn"):
      sin, cos = sin_cos
      out, keys_values = self.attn(
        attn_in(x), (sin[kind], cos[kind]), visible, cached, kind
      )
      x = sharding.pin_activations(x + attn_out(out), self.rules)
    with jax.named_scope("mlp"):
      x = x + mlp_out(self.mlp(mlp_in(x)))
    return sharding.pin_activations(x, self.rules), keys_values

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


class _Maker:
  """Makes the modules of one layer, or of a stack of them."""

  def __init__(self, config: TransformerConfig, stack: tuple[int, ...], rngs: nnx.Rngs):
    self.config = config
    self.stack = stack
    self.rngs = rngs

  def linear(
    self, in_dim: int, out_dim: int, kind: str, *, bias: bool = False, experts: int = 0
  ) -> Linear:
    rules, stacked = self.config.sharding, bool(self.stack)
    return Linear(
      in_dim,
      out_dim,
      stack=self.stack + ((experts,) if experts else ()),
      spec=sharding.weight_spec(kind, rules, stacked, experts=bool(experts)),
      use_bias=bias,
      param_dtype=self.config.param_dtype,
      rngs=self.rngs,
    )

  def norm(self, dim: int) -> RMSNorm:
    c = self.config
    return RMSNorm(
      dim,
      c.norm_eps,
      offset=c.norm_offset,
      stack=self.stack,
      spec=sharding.weight_spec("norm", c.sharding, bool(self.stack)),
      param_dtype=c.param_dtype,
    )

  def attention(self) -> Attention:
    c = self.config
    d, q_dim, kv_dim = (
      c.embed_dim,
      c.num_heads * c.head_dim,
      c.num_kv_heads * c.head_dim,
    )
    widths = {None: None, "head": (c.head_dim, c.head_dim), "all": (q_dim, kv_dim)}
    norms = widths[c.qk_norm]
    return Attention(
      self.linear(d, q_dim, "in_out", bias=c.qkv_bias),
      self.linear(d, kv_dim, "in_out", bias=c.qkv_bias),
      self.linear(d, kv_dim, "in_out", bias=c.qkv_bias),
      self.linear(q_dim, d, "out_in", bias=c.o_bias),
      head_dim=c.head_dim,
      q_norm=norms and self.norm(norms[0]),
      k_norm=norms and self.norm(norms[1]),
      wide_norm=c.qk_norm == "all",
      scale=c.query_scale,
      softcap=c.attention_softcap,
      windows=tuple(kind.window for kind in c.kinds),
      implementation=c.attention,
      rules=c.sharding,
    )

  def gated_mlp(self, hidden_dim: int, experts: int = 0) -> GatedMLP:
    d = self.config.embed_dim
    return GatedMLP(
      self.linear(d, hidden_dim, "in_out", experts=experts),
      self.linear(d, hidden_dim, "in_out", experts=experts),
      self.linear(hidden_dim, d, "out_in", experts=experts),
      ACTIVATIONS[self.config.activation],
    )

  def experts(self, moe: MoEConfig) -> MoE:
    return MoE(
      self.linear(self.config.embed_dim, moe.num_experts, "router"),
      self.gated_mlp(moe.hidden_dim, moe.num_experts),
      experts_per_token=moe.experts_per_token,
      normalise=moe.normalise,
      implementation=moe.implementation,
      rules=self.config.sharding,
    )
