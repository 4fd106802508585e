"""Table of llama.cpp's architectures: configurations, tensor names and tensor changes.

A record holds each fact once, for reading and for writing. Metadata keys stand without
the name of their architecture: "block_count" for "llama.block_count".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunix.models.gguf import rope
from tunix.models.gguf.changes import Alternating, Change, Swapped
from tunix.models.gguf.file import File

Json = dict[str, Any]

_FIELDS = {
  "max_position_embeddings": "context_length",
  "hidden_size": "embedding_length",
  "num_hidden_layers": "block_count",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "head_dim": "attention.key_length",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_FINAL, _INNER = "final_logit_softcapping", "attn_logit_softcapping"
_CAP = {_FINAL: _FINAL}
_COUNT, _USED = "expert_count", "expert_used_count"
_WIDTH = "expert_feed_forward_length"
_EXPERTS = {"num_experts": _COUNT, "moe_intermediate_size": _WIDTH}
_LOCAL_THETA = "rope.freq_base_swa"
_PATTERN = "attention.sliding_window_pattern"
_KEY, _VALUE = "attention.key_length", "attention.value_length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """One architecture of llama.cpp.

  Attributes:
    name: value of `general.architecture`.
    model_types: values of `model_type` in `config.json` that are stored as this
      architecture. A file is read as the first one, unless `read` names another.
    fields: field of `config.json` -> metadata key, for one number.
    fixed: returns the fields of `config.json` that llama.cpp's program fixes, given the
      other fields. Files do not have them, and a model with other values cannot be
      stored.
    interleaved: True if the rows of queries and keys are stored as in
      `changes.Interleaved`.
    norm_offset: number that is added to the scales of all norms.
    names: Hugging Face name -> GGUF names, where the library's table has another one.
      "{i}" stands for the layer; () means that there is no such tensor.
    changes: end of a Hugging Face name -> change of the tensor, if it is no other one.
    read: returns further fields of `config.json`, given the fields so far.
    write: returns further metadata of a `config.json`.
  """

  name: str
  model_types: tuple[str, ...]
  fields: Mapping[str, str] = dataclasses.field(default_factory=lambda: _FIELDS)
  fixed: Callable[[Json], Json] = lambda hf: _SILU
  interleaved: bool = False
  norm_offset: float = 0.0
  names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  changes: Mapping[str, Change] = dataclasses.field(default_factory=dict)
  read: Callable[[File, Json], Json] = lambda file, hf: {
    "rope_parameters": rope.read(file)
  }
  write: Callable[[Json], Json] = lambda hf: {}


_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _types(sliding: list[bool]) -> Json:
  names = ("full_attention", "sliding_attention")
  return {"layer_types": [names[x] for x in sliding]}


def _every(hf: Json, step: int) -> Json:
  """Returns `layer_types` with full attention in each layer `step`; 0: in none."""
  windowed = hf.get("sliding_window") is not None
  count = hf["num_hidden_layers"]
  return _types([windowed and (not step or (i + 1) % step != 0) for i in range(count)])


def _three_of_four(hf: Json) -> list[int]:
  return [int((i + 1) % 4 != 0) for i in range(hf["num_hidden_layers"])]


def _scalar(hf: Json, layers: int) -> Json:
  """Returns Gemma's divisor of squared logits.

  Args:
    hf: the fields so far.
    layers: number of layers of the size whose divisor is hidden_size / heads.
  """
  if hf["num_hidden_layers"] == layers:
    return {"query_pre_attn_scalar": hf["hidden_size"] // hf["num_attention_heads"]}
  return {"query_pre_attn_scalar": hf["head_dim"]}


def _both_ropes(file: File, theta: float, local: float) -> Json:
  sliding = {"rope_type": "default", "rope_theta": file.number(_LOCAL_THETA, local)}
  full = rope.read(file, theta)
  return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _write_gemma2(hf: Json) -> Json:
  if not (hf[_FINAL] and hf[_INNER]):
    raise ValueError(
      f"{_FINAL} is {hf[_FINAL]!r} and {_INNER} {hf[_INNER]!r}; llama.cpp computes "
      "'gemma2' with both caps only. Export safetensors instead"
    )
  return {}


def _local_theta(hf: Json) -> Json:
  return {_LOCAL_THETA: hf["rope_parameters"]["sliding_attention"]["rope_theta"]}


def _read_olmo(file: File, hf: Json) -> Json:
  if not file.whole("attention.sliding_window", 0):
    return {"rope_parameters": rope.read(file), "sliding_window": None}
  theta = file.number("rope.freq_base")
  return {
    "model_type": "olmo3",
    **_windows(file, hf, 4),
    **_both_ropes(file, theta, theta),
  }


def _windows(file: File, hf: Json, step: int) -> Json:
  """Returns `layer_types` of a file that may name each layer's kind."""
  given = file.metadata.get(_PATTERN, step)
  if isinstance(given, np.ndarray):
    return _types([x > 0 for x in file.by_layer(_PATTERN, hf["num_hidden_layers"])])
  return _every(hf, file.whole(_PATTERN, step))


def _write_olmo(hf: Json) -> Json:
  if hf["model_type"] == "olmo2":
    return {}
  return {_PATTERN: [kind == "sliding_attention" for kind in hf["layer_types"]]}


def _read_phi(file: File, hf: Json) -> Json:
  dim = file.whole("rope.dimension_count", hf["head_dim"])
  return {
    "rope_parameters": rope.read(file),
    "partial_rotary_factor": dim / hf["head_dim"],
    "original_max_position_embeddings": file.whole(
      "rope.scaling.original_context_length", hf["max_position_embeddings"]
    ),
    "sliding_window": file.whole("attention.sliding_window", 0) or None,
  }


def _write_phi(hf: Json) -> Json:
  return {
    "rope.dimension_count": int(hf["partial_rotary_factor"] * hf["head_dim"]),
    "attention.sliding_window": hf["sliding_window"] or 0,
  }


def _read_granite(file: File, hf: Json) -> Json:
  scale = file.number("attention.scale", hf["head_dim"] ** -0.5)
  return {"rope_parameters": rope.read(file), "attention_multiplier": scale}


def _read_gemma4(file: File, hf: Json) -> Json:
  count = hf["num_hidden_layers"]
  types = _windows(file, hf, 6)["layer_types"]
  full = [i for i in range(count) if types[i] == "full_attention"] or [count - 1]
  sliding = [i for i in range(count) if i not in full] or full
  shared = file.whole("attention.shared_kv_layers", 0)
  own = [i for i in full if i < count - shared]  # with keys and values of their own
  heads = file.by_layer("attention.head_count_kv", count)
  widths = file.by_layer("feed_forward_length", count)
  table = file.shapes.get("per_layer_token_embd.weight", (hf["vocab_size"],))
  return {
    "layer_types": types,
    "num_key_value_heads": heads[sliding[0]],
    "num_global_key_value_heads": heads[full[-1]],
    "head_dim": file.whole("attention.key_length_swa"),
    "global_head_dim": file.whole(_KEY),
    "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file.shapes for i in own),
    "intermediate_size": widths[0],
    "use_double_wide_mlp": widths[-1] != widths[0],
    "num_kv_shared_layers": shared,
    "hidden_size_per_layer_input": file.whole("embedding_length_per_layer_input", 0),
    "vocab_size_per_layer_input": table[0],
    "enable_moe_block": file.whole("expert_count", 0) > 0,
    # llama.cpp caps at 30 if the file does not say otherwise; 0 means no cap.
    _FINAL: 30.0 if _FINAL not in file.metadata else file.scalar(_FINAL),
    **_both_ropes(file, 1_000_000.0, 10_000.0),
  }


def _write_gemma4(hf: Json) -> Json:
  sliding = [kind == "sliding_attention" for kind in hf["layer_types"]]
  shared, count = hf["num_kv_shared_layers"], hf["num_hidden_layers"]
  heads = hf["num_key_value_heads"]
  full_heads = hf["num_global_key_value_heads"] or heads
  wide = 2 if hf["use_double_wide_mlp"] else 1
  width = hf["intermediate_size"]
  return _local_theta(hf) | {
    _PATTERN: sliding,
    "attention.head_count_kv": [heads if x else full_heads for x in sliding],
    "feed_forward_length": [
      width * (wide if i >= count - shared else 1) for i in range(count)
    ],
    _KEY: hf["global_head_dim"],
    _VALUE: hf["global_head_dim"],
    "attention.key_length_swa": hf["head_dim"],
    "attention.value_length_swa": hf["head_dim"],
    "attention.shared_kv_layers": shared,
    "embedding_length_per_layer_input": hf["hidden_size_per_layer_input"],
    "rope.dimension_count": hf["global_head_dim"],
    "rope.dimension_count_swa": hf["head_dim"],
    _FINAL: float(hf[_FINAL] or 0),
  }


_LLAMA = Architecture(
  name="llama",
  model_types=("llama", "mistral"),
  fixed=lambda hf: _SILU | {"sliding_window": None},
  interleaved=True,
  write=lambda hf: {
    "vocab_size": hf["vocab_size"],
    "rope.dimension_count": hf["head_dim"],
  },
)
_QWEN3 = Architecture(
  name="qwen3",
  model_types=("qwen3",),
  fixed=lambda hf: _SILU | {"use_sliding_window": False},
)
_QWEN_EXPERTS = {
  "norm_topk_prob": True,
  "decoder_sparse_step": 1,
  "mlp_only_layers": [],
}
_GEMMA = Architecture(
  name="gemma", model_types=("gemma",), fixed=lambda hf: _GELU, norm_offset=1.0
)
_BY_LAYER = "num_key_value_heads", "intermediate_size", "head_dim"
_GEMMA4_FIELDS = {
  field: key for field, key in _FIELDS.items() if field not in _BY_LAYER
}

ARCHITECTURES: Mapping[str, Architecture] = {
  architecture.name: architecture
  for architecture in (
    _LLAMA,
    dataclasses.replace(_QWEN3, name="qwen2", model_types=("qwen2",)),
    _QWEN3,
    Architecture(
      name="qwen3moe",
      model_types=("qwen3_moe",),
      fields=_FIELDS | _EXPERTS | {"num_experts_per_tok": _USED},
      fixed=lambda hf: _QWEN3.fixed(hf) | _QWEN_EXPERTS,
    ),
    _GEMMA,
    dataclasses.replace(
      _GEMMA,
      name="gemma2",
      model_types=("gemma2",),
      fields=_FIELDS | _WINDOW | _CAP | {_INNER: _INNER},
      fixed=lambda hf: _GELU | _scalar(hf, 46) | _every(hf, 2),
      write=_write_gemma2,
    ),
    dataclasses.replace(
      _GEMMA,
      name="gemma3",
      model_types=("gemma3_text",),
      fields=_FIELDS | _WINDOW | _CAP,
      fixed=lambda hf: _GELU | _scalar(hf, 62) | _every(hf, 6),
      read=lambda file, hf: _both_ropes(file, 1_000_000.0, 10_000.0),
      write=_local_theta,
    ),
    Architecture(
      name="gemma4",
      model_types=("gemma4_text", "gemma4"),
      fields=_GEMMA4_FIELDS | _WINDOW | _EXPERTS | {"top_k_experts": _USED},
      fixed=lambda hf: _GELU,
      names={
        "model.layers.{i}.router.scale": ("blk.{i}.ffn_gate_inp.scale",),
        "model.layers.{i}.router.per_expert_scale": ("blk.{i}.ffn_down_exps.scale",),
      },
      read=_read_gemma4,
      write=_write_gemma4,
    ),
    Architecture(
      name="olmo2",
      model_types=("olmo2", "olmo3"),
      fields=_FIELDS | _WINDOW,
      read=_read_olmo,
      write=_write_olmo,
    ),
    Architecture(
      name="phi3",
      model_types=("phi3",),
      # The library's name of both kinds of layers; these layers have gate and up fused.
      names={"model.layers.{i}.mlp.up_proj.weight": ()},
      read=_read_phi,
      write=_write_phi,
    ),
    dataclasses.replace(
      _LLAMA,
      name="granite",
      model_types=("granite",),
      fields=_FIELDS
      | {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "attention_multiplier": "attention.scale",
      },
      fixed=lambda hf: _SILU,
      read=_read_granite,
    ),
    dataclasses.replace(
      _LLAMA,
      name="smollm3",
      model_types=("smollm3",),
      fixed=lambda hf: _SILU | {"no_rope_layers": _three_of_four(hf)},
    ),
    Architecture(
      name="gpt-oss",
      model_types=("gpt_oss",),
      fields=_FIELDS
      | _WINDOW
      | {"num_local_experts": _COUNT, "num_experts_per_tok": _USED}
      | {"intermediate_size": _WIDTH},
      fixed=lambda hf: _SILU | _SWIGLU | _every(hf, 2),
      names={
        f"model.layers.{{i}}.mlp.experts.{fused}{end}": tuple(
          f"blk.{{i}}.ffn_{part}_exps.{kind}" for part in parts
        )
        for fused, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
        for end, kind in (("", "weight"), ("_bias", "bias"))
      },
      changes={
        "experts.gate_up_proj": Alternating(),
        "experts.gate_up_proj_bias": Alternating(),
        "experts.down_proj": Swapped(),
      },
      # llama.cpp rounds the ends of YaRN's ramp; the model was trained without that.
      read=lambda file, hf: {"rope_parameters": {"truncate": False} | rope.read(file)},
      write=lambda hf: {"feed_forward_length": hf["intermediate_size"]},
    ),
  )
}


def of_name(name: object) -> Architecture:
  """Returns the architecture of a file.

  Raises:
    ValueError: the architecture is unknown.
  """
  if isinstance(name, str) and name in ARCHITECTURES:
    return ARCHITECTURES[name]
  raise ValueError(
    f"general.architecture is {name!r}; expected one of {sorted(ARCHITECTURES)}. Use a "
    "Hugging Face folder of this model"
  )


def of_model_type(model_type: str) -> Architecture:
  """Returns the architecture that models of a `model_type` are stored as.

  Raises:
    ValueError: llama.cpp has none, or this package does not know it.
  """
  for architecture in ARCHITECTURES.values():
    if model_type in architecture.model_types:
      return architecture
  known = sorted(t for a in ARCHITECTURES.values() for t in a.model_types)
  raise ValueError(
    f"model_type is {model_type!r}; expected one of {known} for a GGUF file. Export "
    "safetensors instead"
  )
