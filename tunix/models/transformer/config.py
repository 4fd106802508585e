"""The configuration of the decoder; a family only changes defaults."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Axes = str | tuple[str, ...] | None

# Unrolled layers are the default on a CPU up to here: scanning 8 of them costs about
# 7 % of a train step. Deeper stacks, and other platforms at any depth, are scanned:
# the TPU compiler took 317 s for 8 unrolled layers of an 8B model, 52 s for 32 scanned.
UNROLL_BELOW_LAYERS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding and the scaling of its frequencies.

  Attributes:
    theta: base of the frequencies.
    scaling: None, "linear" (all frequencies divided by `factor`) or "llama3"
      (Llama 3.1: low frequencies divided, high ones kept, a ramp between).
    factor: how much longer the context becomes.
    low_freq_factor: "llama3": wavelengths above original / this are divided.
    high_freq_factor: "llama3": wavelengths below original / this are kept.
    original_max_position: "llama3": the context length before scaling, in tokens.
  """

  theta: float = 10_000.0
  scaling: Literal["linear", "llama3"] | None = None
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 8192

  def __post_init__(self):
    if self.scaling not in (None, "linear", "llama3"):
      raise ValueError(
        f"rope scaling {self.scaling!r} is not supported: use None, 'linear' or "
        "'llama3'"
      )
    if self.theta <= 0 or self.factor < 1:
      raise ValueError(
        f"rope theta {self.theta} must be positive and factor {self.factor} at least 1"
      )
    if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f"rope high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
        f"{self.low_freq_factor}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
  """Which mesh axes split what. Axes that a mesh lacks, or that do not divide a
  dimension, are dropped where they are used.

  Attributes:
    fsdp: axis that splits every weight along its model dimension.
    tp: axis that splits heads, hidden units and the vocabulary.
    batch: axes that split the batch; None means ("dp", fsdp).
  """

  fsdp: Axes = "fsdp"
  tp: str | None = "tp"
  batch: tuple[str, ...] | None = None

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """Axes of the batch dimension of activations."""
    if self.batch is not None:
      return self.batch
    fsdp = (self.fsdp,) if isinstance(self.fsdp, str) else (self.fsdp or ())
    return tuple(dict.fromkeys(("dp", *fsdp)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shape and options of a decoder-only transformer.

  Attributes:
    num_layers: L. vocab_size: V. embed_dim: D. hidden_dim: F, of the gated MLP.
    num_heads: N query heads. num_kv_heads: K, must divide N. head_dim: H.
    norm_eps: epsilon of the RMS norms.
    rope: rotary embedding.
    tie_embeddings: the unembedding is the embedding table.
    qk_norm: RMS norm of queries and keys per head (Qwen 3).
    max_position: longest context the checkpoint names, in tokens; recorded and written
      back, not enforced.
    param_dtype: dtype of the weights.
    dtype: dtype of the computation; norms, softmax and logits are float32 always.
    remat: what the backward pass recomputes: "none", "block" (each layer from its
      input), "dots" (each layer, keeping the results of its matrix products).
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
  rope: RopeConfig = RopeConfig()
  tie_embeddings: bool = False
  qk_norm: bool = False
  max_position: int | None = None
  param_dtype: DTypeLike = jnp.float32
  dtype: DTypeLike = jnp.float32
  remat: Literal["none", "block", "dots"] = "none"
  scan_layers: bool | None = None
  sharding: ShardingRules = ShardingRules()

  def __post_init__(self):
    sizes = "num_layers vocab_size embed_dim hidden_dim num_heads num_kv_heads head_dim"
    for name in sizes.split():
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} must be even for rotary embedding")
    if self.remat not in ("none", "block", "dots"):
      raise ValueError(f"remat {self.remat!r} must be 'none', 'block' or 'dots'")

  @property
  def scanned(self) -> bool:
    """Whether the layers run by `lax.scan`."""
    if self.scan_layers is not None:
      return self.scan_layers
    on_cpu = jax.default_backend() == "cpu"
    return not on_cpu or self.num_layers >= UNROLL_BELOW_LAYERS
