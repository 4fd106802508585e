"""Where the decoder's parameters live in a Hugging Face checkpoint.

One table per family serves the loader, the saver, LoRA adapters and the rollout
engines. A family whose names differ changes entries of `DECODER`; it writes no code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class HfName:
  """One parameter's tensor in a Hugging Face checkpoint.

  Attributes:
    key: name of the tensor; `{i}` stands for the layer.
    transpose: the tensor is [out, in] where ours is [in, out].
  """

  key: str
  transpose: bool = False


def _linear(module: str) -> HfName:
  return HfName(f"model.layers.{{i}}.{module}.weight", transpose=True)


def _norm(module: str) -> HfName:
  return HfName(f"model.layers.{{i}}.{module}.weight")


NameTable = Mapping[str, HfName]

# Our dotted parameter path, without layer numbers -> its tensor.
DECODER: NameTable = {
  "embed_tokens.embedding": HfName("model.embed_tokens.weight"),
  "layers.input_layernorm.scale": _norm("input_layernorm"),
  "layers.attn.q_proj.kernel": _linear("self_attn.q_proj"),
  "layers.attn.k_proj.kernel": _linear("self_attn.k_proj"),
  "layers.attn.v_proj.kernel": _linear("self_attn.v_proj"),
  "layers.attn.o_proj.kernel": _linear("self_attn.o_proj"),
  "layers.post_attention_layernorm.scale": _norm("post_attention_layernorm"),
  "layers.mlp.gate_proj.kernel": _linear("mlp.gate_proj"),
  "layers.mlp.up_proj.kernel": _linear("mlp.up_proj"),
  "layers.mlp.down_proj.kernel": _linear("mlp.down_proj"),
  "norm.scale": HfName("model.norm.weight"),
  "lm_head.kernel": HfName("lm_head.weight", transpose=True),
}

QK_NORM: NameTable = {
  "layers.attn.q_norm.scale": _norm("self_attn.q_norm"),
  "layers.attn.k_norm.scale": _norm("self_attn.k_norm"),
}

# Buffers that old writers stored and that are computed from the config.
HARMLESS = (
  r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
  r"model\.rotary_emb\.inv_freq",
)


@dataclasses.dataclass(frozen=True)
class Placement:
  """The tensors that one of our parameters is made of.

  Attributes:
    path: our dotted parameter path.
    keys: one tensor, or one a layer when `stacked`.
    stacked: our parameter carries a leading layer axis.
    transpose: see `HfName`.
  """

  path: str
  keys: tuple[str, ...]
  stacked: bool
  transpose: bool

  def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of each tensor, from the shape of our parameter."""
    one = shape[1:] if self.stacked else shape
    return one[::-1] if self.transpose else one


def split_layer(path: str) -> tuple[str, int | None]:
  """'layers.3.mlp.up_proj' -> ('layers.mlp.up_proj', 3); the layer is None for a
  stacked module and outside the layers."""
  parts = path.split(".")
  if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit():
    return ".".join([parts[0], *parts[2:]]), int(parts[1])
  return path, None


def place(names: NameTable, path: str, num_layers: int) -> Placement:
  """The tensors of one parameter, of a stacked or an unstacked model.

  Raises:
    ValueError: the table has no entry for the parameter.
  """
  generic, layer = split_layer(path)
  entry = names.get(generic)
  if entry is None:
    raise ValueError(
      f"parameter {path!r} has no Hugging Face name: add {generic!r} to the family's "
      "name table"
    )
  stacked = layer is None and "{i}" in entry.key
  layers: Iterable[int | None] = range(num_layers) if stacked else (layer,)
  keys = tuple(entry.key.replace("{i}", str(i)) for i in layers)
  return Placement(path, keys, stacked, entry.transpose)
