"""The configuration of the decoder. A family only changes its defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix.models.transformer.configs import checks as config_checks
from tunix.models.transformer.configs.checks import (
  ATTENTION as ATTENTION,
  LAYER_INPUT as LAYER_INPUT,
  REMAT_POLICIES as REMAT_POLICIES,
  Activation as Activation,
  LayerType as LayerType,
  TypeFields as TypeFields,
)
from tunix.models.transformer.configs.mixer import (
  DeltaNetConfig as DeltaNetConfig,
  Mamba2Config as Mamba2Config,
)
from tunix.models.transformer.configs.mla import MLAConfig as MLAConfig
from tunix.models.transformer.configs.moe import (
  ClampedGate as ClampedGate,
  MoEConfig as MoEConfig,
)
from tunix.models.transformer.configs.rope import RopeConfig as RopeConfig
from tunix.models.transformer.configs.sharding_rules import (
  ShardingRules as ShardingRules,
)
from tunix.utils import checks, mesh as mesh_lib

# On a CPU stacks with fewer layers are unrolled by default: scanning 8 layers costs
# about 7 % of a train step. Deeper stacks, and all stacks on other platforms, are
# scanned: the TPU compiler took 317 s for 8 unrolled layers of an 8B model, and 52 s
# for 32 scanned.
UNROLL_BELOW_LAYERS = 24

_ROPE = RopeConfig()
_SHARDING = ShardingRules()


def scans(scan_layers: bool | None, num_layers: int) -> bool:
  """Returns True if a stack of layers runs in `lax.scan`.

  Args:
    scan_layers: the option; if it is None, depth and platform decide. The platform is
      the one that the program is traced for. A plan may trace for another machine.
    num_layers: number of layers in the stack.
  """
  if scan_layers is not None:
    return scan_layers
  return mesh_lib.context_platform() != "cpu" or num_layers >= UNROLL_BELOW_LAYERS


class LayerKind(NamedTuple):
  """The settings in which kinds of layer differ.

  Attributes:
    window: number of keys that a query attends to, its own included; None for all keys
      before it.
    rope: rotary embedding; None for a layer without positions (NoPE).
    num_kv_heads: number of key heads K; 0 for a layer without attention.
    head_dim: size H of a head.
  """

  window: int | None
  rope: RopeConfig | None
  num_kv_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shape and options of a decoder-only transformer.

  Attributes:
    num_layers: number of layers L.
    vocab_size: size of the vocabulary V.
    embed_dim: model width D.
    hidden_dim: hidden width F of the gated MLP.
    num_heads: number of query heads N.
    num_kv_heads: number of key heads K, which must divide N.
    head_dim: size H of a head.
    norm_eps: epsilon of the RMS norms.
    norm_offset: the norms multiply by norm_offset + scale; 1 in Gemma.
    norms: positions of a layer's RMS norms: "pre" before attention and MLP, "post" on
      their outputs (OLMo 2), or "both" (Gemma 2 and 3).
    activation: activation function of the gated MLP.
    rope: rotary embedding.
    layer_types: "full" or "sliding" attention per layer; "nope": full attention without
      rotary embedding (SmolLM3); "linear": a recurrent mixer; "none": no mixer
      (Nemotron 3). None for full attention in all.
    type_fields: fields of this configuration that layers of a type have in place of the
      model's, made by `fields_by_type(full={"head_dim": 512})`.
    sliding_window: number of keys that a query of a "sliding" layer attends to, its own
      included.
    local_rope: rotary embedding of the sliding layers; None for `rope`.
    grouped_layers: the layers in which the tokens of a group (of an image) attend to
      each other in both directions: "all", or "sliding" ones (Gemma 4).
    query_scale: factor of the attention scores; None for head_dim ** -0.5.
    attention_softcap: a number c; scores s become c tanh(s / c) (Gemma 2). None for no
      cap.
    final_softcap: the same for the logits.
    logits_divisor: divisor of the hidden states before the unembedding, and so of the
      logits (Granite).
    residual_multiplier: factor of the outputs of attention and MLP where they are added
      to the residual stream (Granite).
    tie_embeddings: if True, the unembedding is the embedding table.
    scale_embeddings: if True, embeddings are multiplied by sqrt(D) (Gemma).
    embedding_multiplier: factor of the embeddings (Granite); None for no factor.
    qk_norm: RMS norm of queries and keys: None, "head" for each head separately (Qwen
      3, Gemma 3) or "all" for all heads together (OLMo 2).
    value_norm: if True, values have an RMS norm without scale (Gemma 4).
    values_from_keys: if True, the values are the outputs of the key projection before
      its norm, and there is no value projection (Gemma 4).
    attention_sinks: if True, every head has a sink logit in the softmax of its scores
      (gpt-oss), see `ops.sinks`.
    attention_gate: if True, the outputs of the heads are multiplied by the sigmoid of a
      gate, which the queries' projection gives too (Qwen3.5).
    qkv_bias, o_bias: if True, the attention's projections have biases.
    fused_qkv: if True, the projections of queries, keys and values are one map
      `qkv_proj` (Phi 3 and 4).
    fused_gate_up: if True, gate and up projection of the MLP are one map `gate_up_proj`
      whose first half of outputs is the gate (Phi 3 and 4, Granite 4).
    mla: latent attention in place of attention, or None. `head_dim` is then that of
      the `MLAConfig`, and `num_kv_heads` is `num_heads`.
    shared_kv_layers: number of layers, the last ones, that have no keys and values of
      their own and read those of the last earlier layer of their type (Gemma 3n and 4).
    shared_kv_hidden_dim: hidden width of the MLPs of these layers; None for hidden_dim.
    reads_kv: set by `of_layer`: True for a layer that reads the keys of another one.
    layer_input_dim: size P of a vector that every layer gets for each token, beside the
      residual stream (see layer_inputs.py); None for no vector.
    layer_input_vocab: number of rows of the table of these vectors; None for V.
    layer_scalars: if True, every layer multiplies its output by a number that is not
      trained (Gemma 4).
    gated_mlp: if False, the MLP and the experts are down(activation(up(x))).
    parts: the parts of a layer: "both" mixer and MLP, or only the "mixer" or the "mlp",
      each with one norm before it (Nemotron 3).
    mixer: a recurrent mixer in place of attention, or None.
    moe: a mixture of experts in place of the MLP, or None.
    num_scores: None for a language model. Otherwise the number of scores per position
      of a head that replaces the unembedding: 1 for a critic or a reward model.
    max_position: longest context of the checkpoint in tokens. It is saved with the
      model and limits generation, but the decoder itself does not enforce it.
    param_dtype: dtype of the weights.
    dtype: dtype of the computation; norms, softmax and logits are always float32.
    remat: the results that the backward pass recomputes. "none" recomputes nothing,
      "block" each layer from its input, and "dots" all results of a layer except its
      matrix products. "offload" is "block" with the inputs kept in the host's memory.
    attention: implementation of attention: "auto", or a name in
      `attention_paths.PATHS` but "invariant". It refuses unsupported calls.
    batch_invariant: if True, the bits of a token's results do not depend on the other
      rows of a batch, on a CPU. A token that the engine draws then has the
      log-probability that a trainer computes, see docs/guides/scoring.md. Only for
      layers of attention and a dense MLP, with `attention` "auto".
    scan_layers: True runs the stacked layers in `lax.scan`, False unrolled. None scans
      them, except on a CPU with fewer than 24 layers.
    sharding: mesh axes of weights and activations.
  """

  num_layers: int
  vocab_size: int
  embed_dim: int
  hidden_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  norm_eps: float = 1e-6
  norm_offset: float = 0.0
  norms: Literal["pre", "post", "both"] = "pre"
  activation: Activation = "silu"
  rope: RopeConfig = _ROPE
  layer_types: tuple[LayerType, ...] | None = None
  type_fields: TypeFields = ()
  sliding_window: int | None = None
  local_rope: RopeConfig | None = None
  grouped_layers: Literal["all", "sliding"] = "all"
  query_scale: float | None = None
  attention_softcap: float | None = None
  final_softcap: float | None = None
  logits_divisor: float = 1.0
  residual_multiplier: float = 1.0
  tie_embeddings: bool = False
  scale_embeddings: bool = False
  embedding_multiplier: float | None = None
  qk_norm: Literal["head", "all"] | None = None
  value_norm: bool = False
  values_from_keys: bool = False
  attention_sinks: bool = False
  attention_gate: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  fused_qkv: bool = False
  fused_gate_up: bool = False
  mla: MLAConfig | None = None
  shared_kv_layers: int = 0
  shared_kv_hidden_dim: int | None = None
  reads_kv: bool = False
  layer_input_dim: int | None = None
  layer_input_vocab: int | None = None
  layer_scalars: bool = False
  gated_mlp: bool = True
  parts: Literal["both", "mixer", "mlp"] = "both"
  mixer: Mamba2Config | DeltaNetConfig | None = None
  moe: MoEConfig | None = None
  num_scores: int | None = None
  max_position: int | None = None
  param_dtype: DTypeLike = jnp.float32
  dtype: DTypeLike = jnp.float32
  remat: Literal["none", "block", "dots", "offload"] = "none"
  attention: str = "auto"
  batch_invariant: bool = False
  scan_layers: bool | None = None
  sharding: ShardingRules = _SHARDING

  def __post_init__(self):
    sizes = "num_layers vocab_size embed_dim hidden_dim num_heads num_kv_heads head_dim"
    caps = (
      "attention_softcap final_softcap query_scale norm_eps logits_divisor "
      "residual_multiplier embedding_multiplier"
    )
    checks.fields(
      self,
      **dict.fromkeys(sizes.split(), checks.COUNT),
      **dict.fromkeys(caps.split(), checks.POSITIVE),
      num_scores=checks.COUNT,
      max_position=checks.COUNT,
      sliding_window=checks.COUNT,
      shared_kv_layers=checks.NOT_NEGATIVE,
      shared_kv_hidden_dim=checks.COUNT,
      layer_input_dim=checks.COUNT,
      layer_input_vocab=checks.COUNT,
    )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} must be even for rotary embedding")
    config_checks.check(self)

  def layers_of(self, path: str) -> Sequence[int]:
    """Returns the numbers of the layers in the stack that holds the parameter `path`.

    Args:
      path: "layers.attn.q_proj.kernel", or "layers.dense.attn.q_proj.kernel" where the
        layers have several structures.
    """
    name = path.split(".")[1] if path.startswith("layers.") else ""
    return self.stacks.get(name, range(self.num_layers))

  @property
  def max_cached(self) -> int | None:
    """Largest number of tokens of a row with a cache; None for no limit.

    With "longrope" the frequencies change after the original context, and those of the
    keys in the cache cannot change.
    """
    if self.rope.scaling != "longrope":
      return self.max_position
    return min(self.rope.original_max_position, self.max_position or 2**31)

  @property
  def kinds(self) -> tuple[LayerKind, ...]:
    """The kinds of layer of this configuration."""
    attention: dict[LayerType, tuple[int | None, RopeConfig | None]] = {
      "full": (None, self.rope),
      "sliding": (self.sliding_window, self.local_rope or self.rope),
      "nope": (None, None),
      "linear": (None, None),
      "none": (None, None),
    }
    heads = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
    own: dict[str, dict[str, Any]] = {x: dict(y) for x, y in self.type_fields}

    def kind(name: LayerType, reads_kv: bool) -> LayerKind:
      fields = heads | own.get(name, {})
      has_keys = fields.get("mixer") is None and fields.get("parts") != "mlp"
      has_keys = has_keys and not reads_kv
      kv_heads = fields["num_kv_heads"] if has_keys else 0
      return LayerKind(*attention[name], kv_heads, fields["head_dim"])

    return tuple(kind(*name) for name in dict.fromkeys(self.kind_names))

  @property
  def layer_kinds(self) -> tuple[int, ...]:
    """The kind of each layer, as an index into `kinds`."""
    order = list(dict.fromkeys(self.kind_names))
    return tuple(order.index(name) for name in self.kind_names)

  @property
  def kind_names(self) -> tuple[tuple[LayerType, bool], ...]:
    """The type of each layer, and True if it reads the keys of another layer."""
    types = self.layer_types or ("full",) * self.num_layers
    first = self.num_layers - self.shared_kv_layers
    return tuple((name, i >= first) for i, name in enumerate(types))

  def kind_name(self, kind: int | jax.Array) -> tuple[LayerType, bool] | None:
    """Returns the entry of `kind_names` of a kind; None for a traced kind."""
    if not isinstance(kind, int):
      return None
    return list(dict.fromkeys(self.kind_names))[kind]

  @property
  def kv_sources(self) -> dict[LayerType, int]:
    """The number of the layer whose keys later layers of a type read, by type."""
    read = {name for name, reads in self.kind_names if reads}
    sources: dict[LayerType, int] = {}
    for i, (name, reads) in enumerate(self.kind_names):
      if name in read and not reads:
        sources[name] = i
    return sources

  @property
  def structures(self) -> tuple[str, ...]:
    """The structure of each layer: layers with the same name have the same modules.

    If all layers have the same modules, all names are "".
    """
    types = self.layer_types or ("full",) * self.num_layers
    own = {name for name, _ in self.type_fields}
    # Types without fields of their own share a structure, named by the first of them.
    shared = next((name for name in types if name not in own), "")
    by_type = [name if name in own else shared for name in types]
    dense = () if self.moe is None else self.moe.dense_layers
    by_mlp = ["dense" if i in dense else "sparse" for i in range(self.num_layers)]
    by_kv = ["reads" if reads else "own" for _, reads in self.kind_names]
    parts = [names for names in (by_type, by_mlp, by_kv) if len({*names}) > 1]
    return tuple("_".join(names) for names in zip(*parts)) or ("",) * self.num_layers

  @property
  def stacks(self) -> dict[str, list[int]]:
    """The numbers of the layers of each structure, in the order of the model."""
    stacks: dict[str, list[int]] = {}
    for i, name in enumerate(self.structures):
      stacks.setdefault(name, []).append(i)
    return stacks

  def of_layer(self, layer: int) -> TransformerConfig:
    """Returns the configuration with the fields of one layer, see `type_fields`."""
    name = "full" if self.layer_types is None else self.layer_types[layer]
    fields = dict(dict(self.type_fields).get(name, ()))
    if self.moe is not None and layer in self.moe.dense_layers:
      fields["moe"] = None
    if self.kind_names[layer][1]:
      hidden = self.shared_kv_hidden_dim or self.hidden_dim
      fields |= {"reads_kv": True, "hidden_dim": hidden}
    return dataclasses.replace(self, **fields) if fields else self

  @property
  def has_experts(self) -> bool:
    """True if a layer of this configuration has experts; see `of_layer`."""
    return self.moe is not None and self.parts != "mixer"

  @property
  def scanned(self) -> bool:
    """True if the layers run in `lax.scan`, see `scans`."""
    return scans(self.scan_layers, self.num_layers)


def fields_by_type(**fields: Mapping[str, Any]) -> TypeFields:
  """Returns `TransformerConfig.type_fields`: by type of layer, names and values."""
  return tuple((name, tuple(own.items())) for name, own in fields.items())  # pyright: ignore[reportReturnType]


def sizes(
  layers: int, dim: int, hidden: int, heads: int, kv_heads: int, **fields: object
) -> dict[str, Any]:
  """Returns the fields of a preset; the five sizes are positional."""
  return {
    "num_layers": layers,
    "embed_dim": dim,
    "hidden_dim": hidden,
    "num_heads": heads,
    "num_kv_heads": kv_heads,
    **fields,
  }
