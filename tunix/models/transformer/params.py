"""Table of the decoder's parameters and their tensors in a Hugging Face checkpoint.

The loader, the saver, LoRA adapters and the rollout engines use the same table of a
family. A family with other names only changes entries of `DECODER`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tunix.models.transformer.config import MoEConfig


@dataclasses.dataclass(frozen=True)
class HfName:
  """The tensor of one parameter in a Hugging Face checkpoint.

  Attributes:
    key: name of the tensor; `{i}` stands for the layer, `{e}` for the expert.
    transpose: True if the tensor is [out, in] and the parameter [in, out], see
      `axes_of`.
  """

  key: str
  transpose: bool = False


NameTable = Mapping[str, HfName]


def _linears(prefix: str, modules: Mapping[str, str]) -> dict[str, HfName]:
  """Returns the entries of kernels and biases.

  Args:
    prefix: beginning of the tensor names.
    modules: maps our module path to Hugging Face's.
  """
  names = {}
  for module, hf in modules.items():
    names[f"layers.{module}.kernel"] = HfName(f"{prefix}{hf}.weight", transpose=True)
    names[f"layers.{module}.bias"] = HfName(f"{prefix}{hf}.bias")
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
_PROJECTIONS = {
  f"attn.{x}_proj": f"self_attn.{x}_proj" for x in ("q", "k", "v", "o", "qkv")
}
_GATED = ("gate", "up", "down")
_MLP = {f"mlp.{x}_proj": f"mlp.{x}_proj" for x in (*_GATED, "gate_up")}
_MOE = {"mlp.router": "mlp.gate"} | {
  f"mlp.experts.{x}_proj": f"mlp.experts.{{e}}.{x}_proj" for x in _GATED
}

# The MLP that all tokens of a mixture use, and the correction of its router.
_SHARED = {f"mlp.shared.{x}_proj": f"mlp.shared_experts.{x}_proj" for x in _GATED}
_CORRECTION = {
  "layers.mlp.correction": HfName(f"{_LAYER}mlp.gate.e_score_correction_bias")
}

# Maps a dotted parameter path, without layer numbers, to its tensor. It has an entry
# for every parameter that a decoder can have; a model uses those of its parameters.
DECODER: NameTable = {
  "embed_tokens.embedding": HfName("model.embed_tokens.weight"),
  **{f"layers.{k}.scale": HfName(f"{_LAYER}{v}.weight") for k, v in _NORMS.items()},
  **_linears(_LAYER, _PROJECTIONS | _MLP | _MOE | _SHARED),
  **_CORRECTION,
  "norm.scale": HfName("model.norm.weight"),
  "lm_head.kernel": HfName("lm_head.weight", transpose=True),
  "score.kernel": HfName("score.weight", transpose=True),
}

# Buffers that old writers stored. The decoder computes them from the configuration.
HARMLESS = (
  r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
  r"model\.rotary_emb\.inv_freq",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPNames:
  """Tensor names of a layer for further tokens (MTP), see `generate.engine.mtp`.

  `{n}` stands for the number of the model's layers.

  Attributes:
    count: field of `config.json` with the number of such layers.
    prefix: beginning of the names of all its tensors.
    layer: beginning of the names of its decoder layer.
    embed_norm, hidden_norm: norms of the embedding and of the hidden state.
    join: linear map from both, in this order, to the input of the layer.
    norm: norm of the layer's output.
  """

  count: str
  prefix: str
  layer: str
  embed_norm: str
  hidden_norm: str
  join: str
  norm: str

  def of(self, layers: int) -> MTPNames:
    """Returns the names in a checkpoint with so many layers."""
    named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return MTPNames(**{k: v.replace("{n}", str(layers)) for k, v in named.items()})


def axes_of(ndim: int) -> tuple[int, ...]:
  """Returns the order of a transposed tensor's axes; it is its own inverse.

  A matrix is [out, in], a stack of matrices [E, out, in], and the kernel of a
  convolution over two dimensions [out, in, height, width]; ours are [in, out],
  [E, in, out] and [width, height, in, out].
  """
  return (0, 2, 1) if ndim == 3 else tuple(reversed(range(ndim)))


@dataclasses.dataclass(frozen=True)
class Placement:
  """The tensors that one parameter consists of.

  Attributes:
    path: the dotted path of the parameter.
    keys: names of the tensors: one, one per layer, one per expert, or one per expert of
      each layer, in the order of the parameter's leading axes.
    lead: sizes of these leading axes: (), (L,), (E,) or (L, E).
    transpose: see `HfName`.
  """

  path: str
  keys: tuple[str, ...]
  lead: tuple[int, ...]
  transpose: bool

  def _order(self, ndim: int) -> tuple[int, ...]:
    return axes_of(ndim) if self.transpose else tuple(range(ndim))

  def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of each tensor, given the shape of the parameter."""
    one = shape[len(self.lead) :]
    return tuple(one[axis] for axis in self._order(len(one)))

  def split(self, value: np.ndarray) -> list[np.ndarray]:
    """Returns the parameter's tensors, views in the order of `keys`."""
    parts = value.reshape(len(self.keys), *value.shape[len(self.lead) :])
    return [part.transpose(self._order(part.ndim)) for part in parts]

  def join(self, tensors: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the parameter of this shape, given its tensors in the order of `keys`."""
    parts = [part.transpose(self._order(part.ndim)) for part in tensors]
    return np.stack(parts).reshape(shape)


def numbered(path: str) -> tuple[str, int | None]:
  """Turns 'blocks.3.attn.q' into ('blocks.{i}.attn.q', 3).

  The table of a user's model names its layers in this form. The first number is the
  layer's; a path without a number is returned with None.
  """
  parts = path.split(".")
  for at, part in enumerate(parts):
    if part.isdigit():
      return ".".join([*parts[:at], "{i}", *parts[at + 1 :]]), int(part)
  return path, None


def without_structure(path: str, config: object) -> str:
  """Turns "layers.dense.mlp.up_proj" into "layers.mlp.up_proj".

  Args:
    path: dotted path of a parameter or module of a stacked model.
    config: the model's configuration. Only a decoder with several structures has paths
      that name them, see `TransformerConfig.structures`.
  """
  first, _, rest = path.partition(".")
  name, _, inner = rest.partition(".")
  named = first == "layers" and name and name in getattr(config, "stacks", ())
  return f"layers.{inner}" if named else path


class Stacks(Protocol):
  """The fields of a configuration that describe stacked parameters."""

  @property
  def moe(self) -> MoEConfig | None: ...

  def layers_of(self, path: str) -> Sequence[int]: ...


def place(names: NameTable, path: str, config: Any) -> Placement:
  """Returns the tensors of one parameter of a stacked or unstacked model.

  Args:
    names: the family's table. For a user's model it has one entry per parameter, whose
      path has `{i}` in place of the layer's number.
    path: the dotted path of the parameter.
    config: the model's configuration; for stacked parameters it must match `Stacks`.

  Raises:
    ValueError: the table has no entry for the parameter.
  """
  pattern, number = numbered(path)
  if number is not None and pattern in names:
    key = names[pattern].key.replace("{i}", str(number))
    return Placement(path, (key,), (), names[pattern].transpose)
  # The decoder's table has no number in its paths, for stacked and unstacked layers.
  in_layers = pattern.startswith("layers.{i}.")
  generic = (
    pattern.replace(".{i}", "") if in_layers else without_structure(path, config)
  )
  layer = number if in_layers else None
  entry = names.get(generic)
  if entry is None:
    raise ValueError(
      f"parameter {path!r} has no Hugging Face name: add {generic!r} (or {pattern!r}) "
      "to the family's name table"
    )
  if "{" not in entry.key:
    return Placement(path, (entry.key,), (), entry.transpose)
  numbers = config.layers_of(path)
  num_experts = 0 if config.moe is None else config.moe.num_experts
  stacked, by_expert = layer is None and "{i}" in entry.key, "{e}" in entry.key
  layers: Iterable[int | None] = numbers if stacked else (layer,)
  experts: Iterable[int | None] = range(num_experts) if by_expert else (None,)
  keys = tuple(
    entry.key.replace("{i}", str(i)).replace("{e}", str(e))
    for i in layers
    for e in experts
  )
  lead = ((len(numbers),) if stacked else ()) + ((num_experts,) if by_expert else ())
  return Placement(path, keys, lead, entry.transpose)
