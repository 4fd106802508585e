"""The configuration of the decoder; a family only changes defaults."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix.utils import checks, mesh as mesh_lib

Axes = str | tuple[str, ...] | None
Activation = Literal["silu", "gelu_tanh", "gelu"]
LayerType = Literal["full", "sliding"]

# Names of attention paths, see attention_paths.py.
ATTENTION = ("auto", "plain", "blockwise", "splash", "cudnn")

# Unrolled layers are the default on a CPU up to here: scanning 8 of them costs about
# 7 % of a train step. Deeper stacks, and other platforms at any depth, are scanned:
# the TPU compiler took 317 s for 8 unrolled layers of an 8B model, 52 s for 32 scanned.
UNROLL_BELOW_LAYERS = 24

# Name of a layer's input for the policy "offload", which keeps nothing else.
LAYER_INPUT = "layer_input"

# What the backward pass keeps of a layer, by the names of `remat` but "none".
REMAT_POLICIES = {
  "block": None,
  "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  ),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def scans(scan_layers: bool | None, num_layers: int) -> bool:
  """Whether a stack runs by `lax.scan`: as its option says, else by its depth and the
  platform traced for, which is not this machine's where a plan is made."""
  if scan_layers is not None:
    return scan_layers
  return mesh_lib.context_platform() != "cpu" or num_layers >= UNROLL_BELOW_LAYERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding and the scaling of its frequencies.

  Attributes:
    theta: base of the frequencies.
    scaling: None, "linear" (all frequencies divided by `factor`), "llama3" (Llama 3.1:
      low frequencies divided, high ones kept, a ramp between) or "yarn" (the same by
      turns within the original context, and longer vectors; arXiv:2309.00071).
    factor: how much longer the context becomes.
    low_freq_factor: "llama3": wavelengths above original / this are divided.
    high_freq_factor: "llama3": wavelengths below original / this are kept.
    original_max_position: "llama3" and "yarn": the context length before scaling, in
      tokens.
    beta_fast: "yarn": frequencies with more turns than this are kept.
    beta_slow: "yarn": frequencies with fewer turns than this are divided.
    attention_factor: "yarn": queries and keys are multiplied by this; None means
      0.1 ln(factor) + 1.
    truncate: "yarn": round the ends of the ramp to whole dimensions.
  """

  theta: float = 10_000.0
  scaling: Literal["linear", "llama3", "yarn"] | None = None
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self):
    if self.scaling not in (None, "linear", "llama3", "yarn"):
      raise ValueError(
        f"rope scaling {self.scaling!r} is not supported: use None, 'linear', 'llama3' "
        "or 'yarn'"
      )
    checks.fields(
      self,
      theta=checks.POSITIVE,
      factor=checks.Range(1),
      original_max_position=checks.NOT_NEGATIVE,
      low_freq_factor=checks.POSITIVE,
      high_freq_factor=checks.POSITIVE,
      beta_fast=checks.POSITIVE,
      beta_slow=checks.POSITIVE,
      attention_factor=checks.POSITIVE,
    )
    if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
        f"{self.low_freq_factor}"
      )
    if self.scaling == "yarn" and self.beta_fast <= self.beta_slow:
      raise ValueError(
        f"rope beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
  """A mixture of experts in the place of the MLP (Shazeer et al. 2017).

  Attributes:
    num_experts: E.
    experts_per_token: k, how many of them see a token.
    hidden_dim: F of one expert.
    normalise: the k weights are divided by their sum.
    implementation: "ragged" (tokens sorted by expert, one grouped product: work grows
      with k) or "dense" (every expert sees every token: work grows with E; the plain
      form that the other is checked against).
  """

  num_experts: int
  experts_per_token: int
  hidden_dim: int
  normalise: bool = True
  implementation: Literal["ragged", "dense"] = "ragged"

  def __post_init__(self):
    checks.fields(self, num_experts=checks.COUNT, hidden_dim=checks.COUNT)
    if not 1 <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f"experts_per_token {self.experts_per_token} must lie in "
        f"1..{self.num_experts}, the number of experts"
      )
    if self.implementation not in ("ragged", "dense"):
      raise ValueError(
        f"MoE implementation {self.implementation!r} must be 'ragged' or 'dense'"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
  """Which mesh axes split what. Axes that a mesh lacks, or that do not divide a
  dimension, are dropped where they are used.

  Attributes:
    fsdp: axis that splits every weight along its model dimension.
    tp: axis that splits heads, hidden units and the vocabulary.
    ep: axis that splits the experts of a mixture, and the batch and all other weights
      together with fsdp.
    cp: axis that splits the tokens of every row, and weights together with fsdp.
    batch: axes that split the batch; None means ("dp", fsdp, ep).
    step: axes that split products instead of rows and weights where a row has one
      token; for decoding alone, see `generate.layout`.
  """

  fsdp: Axes = "fsdp"
  tp: str | None = "tp"
  ep: str | None = "ep"
  cp: str | None = "cp"
  batch: tuple[str, ...] | None = None
  step: tuple[str, ...] = ()

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """Axes of the batch dimension of activations."""
    if self.batch is not None:
      return self.batch
    return tuple(dict.fromkeys(("dp", *self._fsdp, *_named(self.ep))))

  @property
  def weight_axes(self) -> tuple[str, ...]:
    """Axes of the model dimension of weights: devices that share the tokens of a row
    share the weights too, or long rows would cost a copy of the model each."""
    return (*self._fsdp, *_named(self.ep), *_named(self.cp))

  @property
  def _fsdp(self) -> tuple[str, ...]:
    return (self.fsdp,) if isinstance(self.fsdp, str) else (self.fsdp or ())


def _named(axis: str | None) -> tuple[str, ...]:
  return () if axis is None else (axis,)


class LayerKind(NamedTuple):
  """What a kind of layer has of its own: all else is equal in all layers.

  Attributes:
    window: keys that a query sees, its own included; None: all before it.
    rope: rotary embedding.
  """

  window: int | None
  rope: RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shape and options of a decoder-only transformer.

  Attributes:
    num_layers: L. vocab_size: V. embed_dim: D. hidden_dim: F, of the gated MLP.
    num_heads: N query heads. num_kv_heads: K, must divide N. head_dim: H.
    norm_eps: epsilon of the RMS norms.
    norm_offset: the norms multiply by offset + scale (Gemma: 1).
    norms: where a layer has RMS norms: "pre" (before attention and MLP), "post" (on
      their outputs, OLMo 2), "both" (Gemma 2 and 3).
    activation: of the gated MLP.
    rope: rotary embedding.
    layer_types: "full" or "sliding" attention, one a layer; None: all are full.
    sliding_window: keys that a query of a "sliding" layer sees, its own included.
    local_rope: rotary embedding of the sliding layers; None: `rope`.
    query_scale: factor of the attention scores; None: head_dim ** -0.5.
    attention_softcap: scores s become c tanh(s / c) (Gemma 2).
    final_softcap: the same for the logits.
    tie_embeddings: the unembedding is the embedding table.
    scale_embeddings: embeddings are multiplied by sqrt(D) (Gemma).
    qk_norm: RMS norm of queries and keys: None, "head" (each head by itself: Qwen 3,
      Gemma 3) or "all" (all heads together: OLMo 2).
    qkv_bias, o_bias: biases of the attention's projections.
    moe: a mixture of experts instead of the MLP.
    num_scores: None: a language model. Otherwise the unembedding is replaced by a head
      that gives every position this many scores: 1 for a critic or a reward model.
    max_position: longest context the checkpoint names, in tokens; recorded and written
      back, not enforced.
    param_dtype: dtype of the weights.
    dtype: dtype of the computation; norms, softmax and logits are float32 always.
    remat: what the backward pass recomputes: "none", "block" (each layer from its
      input), "dots" (each layer, keeping the results of its matrix products), "offload"
      (each layer from its input, which waits in the host's memory meanwhile).
    attention: how attention is computed: "auto", or a name in `attention_paths.PATHS`,
      which refuses what it cannot do.
    scan_layers: run the stacked layers by `lax.scan` (True) or unrolled (False);
      None: unrolled on a CPU up to 23 layers, else scanned.
    sharding: mesh axes.
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
  rope: RopeConfig = RopeConfig()
  layer_types: tuple[LayerType, ...] | None = None
  sliding_window: int | None = None
  local_rope: RopeConfig | None = None
  query_scale: float | None = None
  attention_softcap: float | None = None
  final_softcap: float | None = None
  tie_embeddings: bool = False
  scale_embeddings: bool = False
  qk_norm: Literal["head", "all"] | None = None
  qkv_bias: bool = False
  o_bias: bool = False
  moe: MoEConfig | None = None
  num_scores: int | None = None
  max_position: int | None = None
  param_dtype: DTypeLike = jnp.float32
  dtype: DTypeLike = jnp.float32
  remat: Literal["none", "block", "dots", "offload"] = "none"
  attention: str = "auto"
  scan_layers: bool | None = None
  sharding: ShardingRules = ShardingRules()

  def __post_init__(self):
    sizes = "num_layers vocab_size embed_dim hidden_dim num_heads num_kv_heads head_dim"
    caps = "attention_softcap final_softcap query_scale norm_eps"
    checks.fields(
      self,
      **dict.fromkeys(sizes.split(), checks.COUNT),
      **dict.fromkeys(caps.split(), checks.POSITIVE),
      num_scores=checks.COUNT,
      max_position=checks.COUNT,
      sliding_window=checks.COUNT,
    )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} must be even for rotary embedding")
    choices = {
      "remat": ("none", *REMAT_POLICIES),
      "norms": ("pre", "post", "both"),
      "activation": ("silu", "gelu_tanh", "gelu"),
      "qk_norm": (None, "head", "all"),
      "attention": ATTENTION,
    }
    for name, allowed in choices.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f"{name} {getattr(self, name)!r} must be one of {allowed}")
    self._check_layer_types()

  def layers_of(self, path: str) -> int:
    """Layers in the stack that holds the parameter `path`."""
    del path
    return self.num_layers

  def _check_layer_types(self):
    if self.layer_types is None:
      return
    if len(self.layer_types) != self.num_layers:
      raise ValueError(
        f"layer_types names {len(self.layer_types)} layers, num_layers is "
        f"{self.num_layers}"
      )
    if unknown := set(self.layer_types) - {"full", "sliding"}:
      raise ValueError(f"layer_types has {sorted(unknown)}, known: 'full', 'sliding'")
    if "sliding" in self.layer_types and (self.sliding_window or 0) < 1:
      raise ValueError(
        f"there are sliding layers, but sliding_window is {self.sliding_window}: give "
        "the number of keys that a query sees"
      )

  @property
  def kinds(self) -> tuple[LayerKind, ...]:
    """The kinds of layer there are."""
    full = LayerKind(None, self.rope)
    if self.layer_types is None:
      return (full,)
    sliding = LayerKind(self.sliding_window, self.local_rope or self.rope)
    known: dict[LayerType, LayerKind] = {"full": full, "sliding": sliding}
    return tuple(known[name] for name in dict.fromkeys(self.layer_types))

  @property
  def layer_kinds(self) -> tuple[int, ...]:
    """The kind of each layer, as its number in `kinds`."""
    names = self.layer_types or ("full",) * self.num_layers
    order = list(dict.fromkeys(names))
    return tuple(order.index(name) for name in names)

  @property
  def scanned(self) -> bool:
    """Whether the layers run by `lax.scan`."""
    return scans(self.scan_layers, self.num_layers)


def sizes(
  layers: int, dim: int, hidden: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
  """Fields of a preset, by position."""
  return {
    "num_layers": layers,
    "embed_dim": dim,
    "hidden_dim": hidden,
    "num_heads": heads,
    "num_kv_heads": kv_heads,
    **more,
  }


def canonical(config: Any) -> Any:
  """The configuration with what does not change the function set to one value, so that
  equal functions compare equal."""
  slides = config.layer_types is not None and "sliding" in config.layer_types
  moe = config.moe and dataclasses.replace(config.moe, implementation="ragged")
  return dataclasses.replace(
    config,
    layer_types=config.layer_types if slides else None,
    sliding_window=config.sliding_window if slides else None,
    local_rope=(config.local_rope or config.rope) if slides else None,
    query_scale=config.query_scale or config.head_dim**-0.5,
    moe=moe,
    param_dtype=jnp.float32,
    dtype=jnp.float32,
    remat="none",
    attention="auto",
    scan_layers=None,
    sharding=ShardingRules(),
  )
