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
from tunix.models.gguf.header import library

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_BIASED = "blk.0.attn_output.bias"
_Q, _K = "self_attn.q_proj", "self_attn.k_proj"
_HEADS = {_Q: "num_attention_heads", _K: "num_key_value_heads"}


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
  _check_sizes(architecture, file)
  width, _ = file.whole("embedding_length"), file.whole("context_length")
  hf: dict[str, Any] = {"model_type": architecture.model_types[0]}
  for field, key in architecture.fields.items():
    if (value := file.scalar(key)) is not None:
      hf[field] = value
  heads = file.whole("attention.head_count")
  hf.setdefault("num_key_value_heads", heads)
  dim = hf.setdefault("head_dim", width // heads)
  rotated = file.whole("rope.dimension_count", dim)
  if architecture.interleaved and rotated != dim:
    raise ValueError(
      f"rope.dimension_count is {rotated}; expected {dim}, all dimensions of a head. "
      "Use another model"
    )
  if EMBEDDING not in file.shapes:
    raise ValueError(f"tensor {EMBEDDING!r} is missing. Use the file of a whole model")
  hf |= {
    "vocab_size": file.shapes[EMBEDDING][0],
    "tie_word_embeddings": HEAD not in file.shapes,
    "attention_bias": _BIASED in file.shapes,
  }
  hf |= architecture.fixed(hf)
  return hf | architecture.read(file, hf)


def _check_sizes(architecture: Architecture, file: File) -> None:
  """Refuses numbers of layers and experts that the file has no tensors for."""
  layers, experts = file.whole("block_count"), file.whole("expert_count", 0)
  if layers > len(file.shapes):
    raise ValueError(
      f"block_count is {layers}, and the file has {len(file.shapes)} tensors. Use "
      "another file of this model"
    )
  known = "expert_count" in architecture.fields.values()
  shape = file.shapes.get("blk.0.ffn_down_exps.weight", (0,))
  if experts != (shape[0] if known else 0):
    raise ValueError(
      f"expert_count is {experts}; expected {shape[0] if known else 0} for the tensors "
      f"of this file and the architecture {architecture.name!r}. Use another model"
    )


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
  gguf_library = library()
  enum = next(
    x for x, n in gguf_library.MODEL_ARCH_NAMES.items() if n == architecture.name
  )
  # The library's table of one layer is enough: the other layers have the same names.
  table = gguf_library.get_tensor_name_map(enum, 1)
  family = families.by_model_type(hf["model_type"])
  for key in dict.fromkeys(entry.key for entry in family.names.values()):
    patterns = architecture.names.get(key, _patterns(table, key))
    if not patterns or ("{e}" in key and not _experts(hf)):
      continue
    for i in range(layers) if "{i}" in key else (0,):
      name, *gguf = (x.replace("{i}", str(i)) for x in (key, *patterns))
      experts = range(_experts(hf)) if "{e}" in name else (0,)
      names = tuple(name.replace("{e}", str(e)) for e in experts)
      yield Link(names, tuple(gguf), _change(architecture, name, hf))


def _patterns(table: Any, key: str) -> tuple[str, ...]:
  """Returns the library's name for a Hugging Face name; both have "{i}" for the layer.

  The result is empty if the architecture has no such tensor.
  """
  stem, _, end = key.replace(".{e}", "").replace("{i}", "0").rpartition(".")
  if end not in ("weight", "bias"):
    stem, end = f"{stem}.{end}", "weight"
  gguf = table.get_name(stem)
  return (f"{gguf.replace('blk.0.', 'blk.{i}.')}.{end}",) if gguf else ()


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
