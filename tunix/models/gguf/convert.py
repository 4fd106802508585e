"""Configurations and tensor names of GGUF files as those of folders, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tunix.models import families
from tunix.models.gguf import rope
from tunix.models.gguf.architectures import Architecture
from tunix.models.gguf.changes import Change, Interleaved, Plain, Stacked
from tunix.models.gguf.file import File
from tunix.utils import optional

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_BIASED = "blk.0.attn_output.bias"
_HEADS = {
  "self_attn.q_proj": "num_attention_heads",
  "self_attn.k_proj": "num_key_value_heads",
}


@dataclasses.dataclass(frozen=True)
class Link:
  """Hugging Face tensors and the GGUF tensors with the same numbers.

  Attributes:
    hf: names of the Hugging Face tensors: one, or one per expert.
    gguf: names of the GGUF tensors: one, or gate and up.
    change: the relation of their numbers.
  """

  hf: tuple[str, ...]
  gguf: tuple[str, ...]
  change: Change


def config_of(architecture: Architecture, file: File) -> dict[str, Any]:
  """Returns the `config.json` of a file, without dtype and token ids.

  Raises:
    ValueError: metadata are missing, have values of another kind, or describe a model
      that our families do not compute.
  """
  hf: dict[str, Any] = {"model_type": architecture.model_types[0]}
  for field, key in architecture.fields.items():
    if key in file.metadata:
      hf[field] = file.metadata[key]
  layers, heads = file.whole("block_count"), file.whole("attention.head_count")
  if "head_dim" not in hf:
    hf["head_dim"] = file.whole("embedding_length") // max(heads, 1)
  if EMBEDDING not in file.shapes:
    raise ValueError(f"tensor {EMBEDDING!r} is missing: use the file of a whole model")
  hf |= {
    "num_hidden_layers": layers,
    "vocab_size": file.shapes[EMBEDDING][0],
    "tie_word_embeddings": HEAD not in file.shapes,
    "attention_bias": _BIASED in file.shapes,
  }
  if "expert_count" not in architecture.fields.values() and file.whole(
    "expert_count", 0
  ):
    raise ValueError(
      f"expert_count is {file.metadata['expert_count']}; expected 0, since mixtures of "
      f"architecture {architecture.name!r} are not supported. Use another model"
    )
  hf |= architecture.fixed(hf)
  return hf | architecture.read(file, hf)


def metadata_of(architecture: Architecture, hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the metadata of a model by full keys, without those of its tokenizer.

  Args:
    architecture: the architecture.
    hf: the canonical `config.json`, as a family's `config_to_hf` returns it.

  Raises:
    ValueError: llama.cpp cannot compute the model; the message names the field.
  """
  hf = dict(hf)
  for field, value in architecture.fixed(hf).items():
    if hf.get(field, value) != value:
      raise ValueError(
        f"{field} is {hf[field]!r}; llama.cpp computes {architecture.name!r} with "
        f"{value!r} only. Export safetensors instead"
      )
  out = {
    key: hf[field]
    for field, key in architecture.fields.items()
    if hf.get(field) is not None
  }
  if "attention.key_length" in out:
    out["attention.value_length"] = out["attention.key_length"]
  out |= rope.write(rope.parse(hf)) | architecture.write(hf)
  return {f"{architecture.name}.{key}": value for key, value in out.items()}


def links(architecture: Architecture, hf: Mapping[str, Any]) -> Iterator[Link]:
  """Yields all links of a model; a file or a folder may lack some of the tensors.

  Args:
    architecture: the architecture.
    hf: the `config.json`.

  Raises:
    ImportError: the package `gguf` is missing.
  """
  layers = hf["num_hidden_layers"]
  library = optional.require("gguf", "a GGUF file", "'tunix[gguf]'")
  enum = next(x for x, n in library.MODEL_ARCH_NAMES.items() if n == architecture.name)
  table = library.get_tensor_name_map(enum, layers)
  family = families.by_model_type(hf["model_type"])
  for key in dict.fromkeys(entry.key for entry in family.names.values()):
    for i in range(layers) if "{i}" in key else (0,):
      name = key.replace("{i}", str(i))
      if key in architecture.names:
        gguf = tuple(x.replace("{i}", str(i)) for x in architecture.names[key])
      else:
        stem, dot, end = name.replace(".{e}", "").rpartition(".")
        if end not in ("weight", "bias"):
          stem, dot, end = name, ".", "weight"
        found = table.get_name(stem)
        if found is None:
          continue
        gguf = (f"{found}{dot}{end}",)
      experts = range(_experts(hf)) if "{e}" in name else (0,)
      names = tuple(name.replace("{e}", str(e)) for e in experts)
      yield Link(names, gguf, _change(architecture, name, hf))


def _experts(hf: Mapping[str, Any]) -> int:
  return hf.get("num_experts") or hf.get("num_local_experts") or 0


def _change(architecture: Architecture, name: str, hf: Mapping[str, Any]) -> Change:
  """Returns the change of the tensor with this Hugging Face name."""
  for end, change in architecture.changes.items():
    if name.endswith(end):
      return change
  if ".{e}." in name:
    return Stacked()
  for projection, heads in _HEADS.items():
    if architecture.interleaved and projection in name:
      return Interleaved(hf[heads])
  is_norm = name.endswith("norm.weight")
  return Plain(architecture.norm_offset if is_norm else 0.0)
