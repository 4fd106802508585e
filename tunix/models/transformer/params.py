"""Where the decoder's parameters live in a Hugging Face checkpoint.

One table per family serves the loader, the saver, LoRA adapters and the rollout
engines. A family whose names differ changes entries of `DECODER`; it writes no code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tunix.models.transformer.config import MoEConfig


@dataclasses.dataclass(frozen=True)
class HfName:
  """One parameter's tensor in a Hugging Face checkpoint.

  Attributes:
    key: name of the tensor; `{i}` stands for the layer, `{e}` for the expert.
    transpose: the tensor is [out, in] where ours is [in, out].
  """

  key: str
  transpose: bool = False


NameTable = Mapping[str, HfName]


def _linears(prefix: str, modules: Mapping[str, str]) -> dict[str, HfName]:
  """Kernels and biases: our module path -> theirs, below `prefix`."""
  names = {}
  for ours, theirs in modules.items():
    names[f"layers.{ours}.kernel"] = HfName(f"{prefix}{theirs}.weight", transpose=True)
    names[f"layers.{ours}.bias"] = HfName(f"{prefix}{theirs}.bias")
  return names


_LAYER = "model.layers.{i}."
_NORMS = {
  "input_layernorm": "input_layernorm",
  "post_attention_layernorm": "post_attention_layernorm",
  "pre_feedforward_layernorm": "pre_feedforward_layernorm",
  "post_feedforward_layernorm": "post_feedforward_layernorm",
  "attn.q_norm": "self_attn.q_norm",
  "attn.k_norm": "self_attn.k_norm",
}
_PROJECTIONS = {f"attn.{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"}
_MLP = {f"mlp.{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_MOE = {"mlp.router": "mlp.gate"} | {
  f"mlp.experts.{x}_proj": f"mlp.experts.{{e}}.{x}_proj" for x in ("gate", "up", "down")
}

# Our dotted parameter path, without layer numbers -> its tensor. It has entries for
# everything that the decoder may have; a model uses those of the parameters it has.
DECODER: NameTable = {
  "embed_tokens.embedding": HfName("model.embed_tokens.weight"),
  **{f"layers.{k}.scale": HfName(f"{_LAYER}{v}.weight") for k, v in _NORMS.items()},
  **_linears(_LAYER, _PROJECTIONS | _MLP | _MOE),
  "norm.scale": HfName("model.norm.weight"),
  "lm_head.kernel": HfName("lm_head.weight", transpose=True),
  "score.kernel": HfName("score.weight", transpose=True),
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
    keys: one tensor; or one a layer, one an expert, one an expert of each layer, in the
      order of the parameter's leading axes.
    lead: those leading axes: (), (L,), (E,) or (L, E).
    transpose: see `HfName`.
  """

  path: str
  keys: tuple[str, ...]
  lead: tuple[int, ...]
  transpose: bool

  def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of each tensor, from the shape of our parameter."""
    one = shape[len(self.lead) :]
    return one[::-1] if self.transpose else one


def numbered(path: str) -> tuple[str, int | None]:
  """'blocks.3.attn.q' -> ('blocks.{i}.attn.q', 3): how a model of one's own names its
  layers in its table. The first number counts."""
  parts = path.split(".")
  for at, part in enumerate(parts):
    if part.isdigit():
      return ".".join([*parts[:at], "{i}", *parts[at + 1 :]]), int(part)
  return path, None


def split_layer(path: str) -> tuple[str, int | None]:
  """'layers.3.mlp.up_proj' -> ('layers.mlp.up_proj', 3); the layer is None for a
  stacked module and outside the layers."""
  parts = path.split(".")
  if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit():
    return ".".join([parts[0], *parts[2:]]), int(parts[1])
  return path, None


class Stacks(Protocol):
  """What a configuration says of stacked parameters."""

  @property
  def moe(self) -> MoEConfig | None: ...

  def layers_of(self, path: str) -> int: ...


def place(names: NameTable, path: str, config: Any) -> Placement:
  """The tensors of one parameter, of a stacked or an unstacked model.

  Args:
    names: the family's table.
    path: of the parameter, dotted. A model of one's own has one entry a parameter, by
      its path with `{i}` for the layer's number.
    config: of the model; `Stacks` where it has stacked parameters.

  Raises:
    ValueError: the table has no entry for the parameter.
  """
  own, number = numbered(path)
  if number is not None and own in names:
    key = names[own].key.replace("{i}", str(number))
    return Placement(path, (key,), (), names[own].transpose)
  generic, layer = split_layer(path)
  entry = names.get(generic)
  if entry is None:
    raise ValueError(
      f"parameter {path!r} has no Hugging Face name: add {generic!r} (or {own!r}) to "
      "the family's name table"
    )
  if "{" not in entry.key:
    return Placement(path, (entry.key,), (), entry.transpose)
  num_layers = config.layers_of(path)
  num_experts = 0 if config.moe is None else config.moe.num_experts
  stacked, by_expert = layer is None and "{i}" in entry.key, "{e}" in entry.key
  layers: Iterable[int | None] = range(num_layers) if stacked else (layer,)
  experts: Iterable[int | None] = range(num_experts) if by_expert else (None,)
  keys = tuple(
    entry.key.replace("{i}", str(i)).replace("{e}", str(e))
    for i in layers
    for e in experts
  )
  lead = ((num_layers,) if stacked else ()) + ((num_experts,) if by_expert else ())
  return Placement(path, keys, lead, entry.transpose)
