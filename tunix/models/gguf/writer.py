"""Writer of GGUF files: whole models, and adapters in the form of llama.cpp."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tunix.models import families, safetensors_saver
from tunix.models.adapters import lora_modules, token_rows, whole_modules
from tunix.models.files.tensor_files import NewTensor
from tunix.models.gguf import architectures, convert, rope
from tunix.models.gguf.architectures import Architecture
from tunix.models.gguf.changes import Stacked, hollow
from tunix.models.gguf.convert import Link
from tunix.models.gguf.header import library
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.params import Placement
from tunix.utils import mesh as mesh_lib

# Name of a type of tensors -> its name in `gguf.LlamaFileType`.
KINDS = {
  "f32": "ALL_F32",
  "f16": "MOSTLY_F16",
  "bf16": "MOSTLY_BF16",
  "q8_0": "MOSTLY_Q8_0",
}


class _Group(NamedTuple):
  """GGUF tensors that are made together.

  Attributes:
    names, shapes: their names and shapes.
    read: returns them as float32 arrays. Groups are read in order.
  """

  names: Sequence[str]
  shapes: Sequence[tuple[int, ...]]
  read: Callable[[], Sequence[np.ndarray]]


def check(config: TransformerConfig) -> None:
  """Refuses a model that llama.cpp does not have.

  Args:
    config: the configuration of the model.

  Raises:
    ImportError, ValueError: see `write_model`.
  """
  library()
  _described(config)


def write_model(
  model: Transformer, file: pathlib.Path, kind: str, tokenizer: Mapping[str, Any]
) -> None:
  """Writes a model, with adapters merged, as llama.cpp's converter would.

  Vectors, norms and routers are float32 in files of every kind. Rows that are no whole
  number of blocks are float16 in a file of kind q8_0. One parameter at a time is in
  host memory.

  Args:
    model: the model, whose weights are in this process. It is unchanged.
    file: the file, whose name should be temporary: it stays after an error.
    kind: one of `KINDS`.
    tokenizer: metadata of the tokenizer by key.

  Raises:
    ImportError: the package `gguf` is missing.
    ValueError: llama.cpp has no such model, or a number is too large for float16.
    OSError: the disk is full or not writable.
  """
  architecture, hf, metadata = _described(model.config)
  family = families.of_config(model.config)
  tensors = safetensors_saver.new_tensors(model, family, jnp.float32, [])
  groups = [
    *_rope_tables(hf, metadata.get(f"{architecture.name}.rope.dimension_count")),
    *_model_groups(tensors, _links_by_name(architecture, hf)),
  ]
  metadata = {"general.type": "model", **metadata, **tokenizer}
  _write(file, architecture, kind, metadata, groups)


def write_adapter(model: Transformer, file: pathlib.Path, kind: str) -> None:
  """Writes the adapters of a model as llama.cpp's adapter file.

  Args:
    model, file, kind: see `write_model`.

  Raises:
    ImportError: the package `gguf` is missing.
    ValueError: llama.cpp has no such model or adapter, or the model has no adapters.
    OSError: the disk is full or not writable.
  """
  lora_modules.require_adapters(model)
  adapters = lora_modules.adapted(model)
  if whole := list(whole_modules.of(model)):
    raise _refused(f"modules_to_save holds {whole[0]}, which is trained whole")
  if token_rows.of(model):
    raise _refused("rows of the embedding are trained (trainable_token_indices)")
  if any(linear.lora_magnitude is not None for linear in adapters.values()):
    raise _refused("use_dora is true")
  architecture, hf, _ = _described(model.config)
  links = _links_by_name(architecture, hf)
  # llama.cpp scales all pairs by alpha / rank, with one alpha.
  alpha = max(
    x.lora_scale * lora_modules.pair_of(x)[0].shape[-1] for x in adapters.values()
  )
  names = families.of_config(model.config).names
  groups = [
    group
    for path, linear in adapters.items()
    for place in [params.place(names, f"{path}.kernel", model.config)]
    for group in _pairs(linear, place, links, alpha)
  ]
  if not groups:
    raise ValueError("every adapter is zero throughout: there is nothing to save")
  metadata = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": float(alpha),
  }
  _write(file, architecture, kind, metadata, groups)


def _described(
  config: TransformerConfig,
) -> tuple[Architecture, dict[str, Any], dict[str, Any]]:
  """Returns the architecture of a model, its `config.json` and its metadata."""
  hf = safetensors_saver.described(config, families.of_config(config))
  if config.num_scores:
    raise ValueError(
      "the model has a head of scores; a GGUF file of tunix holds models that write "
      "text. Export safetensors instead"
    )
  architecture = architectures.of_model_type(hf["model_type"])
  return architecture, hf, convert.metadata_of(architecture, hf)


def _refused(what: str) -> ValueError:
  return ValueError(
    f"{what}; an adapter file of llama.cpp holds pairs of matrices only. Export the "
    "merged model"
  )


def _links_by_name(
  architecture: Architecture, hf: Mapping[str, Any]
) -> dict[str, Link]:
  links = convert.links(architecture, hf)
  return {name: link for link in links for name in link.hf}


def _link(links: Mapping[str, Link], name: str) -> Link:
  if name not in links:
    raise ValueError(
      f"tensor {name!r} has no place in llama.cpp's architecture of this model. Export "
      "safetensors instead"
    )
  return links[name]


def _rope_tables(hf: Mapping[str, Any], rotated: int | None) -> Iterator[_Group]:
  tables = rope.tables(rope.parse(hf), rotated or hf["head_dim"])
  for name, table in tables.items():
    yield _Group([name], [table.shape], lambda table=table: [table])


def _model_groups(
  tensors: Iterable[NewTensor], links: Mapping[str, Link]
) -> Iterator[_Group]:
  """Yields the GGUF tensors of Hugging Face tensors, in their order.

  The tensors of one link follow each other.
  """
  parts: list[NewTensor] = []
  for tensor in tensors:
    link = _link(links, tensor.name)
    parts.append(tensor)
    if len(parts) < len(link.hf):
      continue
    assert [part.name for part in parts] == list(link.hf)
    shapes = [x.shape for x in link.change.to_gguf(hollow(parts))]

    def read(link=link, parts=parts):
      return link.change.to_gguf([part.read() for part in parts])

    yield _Group(link.gguf, shapes, read)
    parts = []


def _pairs(
  linear: Linear, place: Placement, links: Mapping[str, Link], alpha: float
) -> Iterator[_Group]:
  """Yields the pairs of one module, one for each GGUF tensor that has an adapter."""
  a, b = (
    np.asarray(mesh_lib.to_host(x), np.float32) for x in lora_modules.pair_of(linear)
  )
  b = b * np.float32(linear.lora_scale * a.shape[-1] / alpha)
  down, up = place.split(a), place.split(b)
  at = 0
  while at < len(place.keys):
    link = _link(links, place.keys[at])
    here = slice(at, at + len(link.hf))
    at = here.stop
    if not any(part.any() for part in up[here]):
      continue
    # The change is one of the outputs, which only B has.
    inputs = np.stack(down[here]) if isinstance(link.change, Stacked) else down[here][0]
    inputs = inputs if place.transpose else inputs.swapaxes(-1, -2)
    for name, outputs in zip(link.gguf, link.change.to_gguf(up[here])):
      pair = [inputs, outputs]
      shapes = [x.shape for x in pair]
      yield _Group([f"{name}.lora_a", f"{name}.lora_b"], shapes, lambda pair=pair: pair)


def _write(
  file: pathlib.Path,
  architecture: Architecture,
  kind: str,
  metadata: Mapping[str, Any],
  groups: Sequence[_Group],
) -> None:
  gguf = library()
  writer = gguf.GGUFWriter(file, architecture.name)
  adders = {
    bool: writer.add_bool,
    int: writer.add_uint32,
    float: writer.add_float32,
    str: writer.add_string,
    list: writer.add_array,
  }
  for key, value in metadata.items():
    adders[type(value)](key, value)
  writer.add_file_type(gguf.LlamaFileType[KINDS[kind]])
  writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
  for group in groups:
    for name, shape in zip(group.names, group.shapes):
      chosen = _kind_of(name, shape, kind)
      block, size = gguf.GGML_QUANT_SIZES[chosen]
      nbytes = math.prod(shape) // block * size
      writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, chosen)
  try:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for group in groups:
      for name, value in zip(group.names, group.read()):
        writer.write_tensor_data(
          _encoded(name, value, _kind_of(name, value.shape, kind))
        )
  finally:
    writer.close()
  with file.open("rb") as stream:
    os.fsync(stream.fileno())


def _kind_of(name: str, shape: Sequence[int], kind: str) -> Any:
  """Returns the type of a tensor, which llama.cpp's converter would choose too."""
  gguf = library()
  is_matrix = name.endswith((".weight", ".lora_a", ".lora_b")) and len(shape) > 1
  if not is_matrix or name.endswith(("_norm.weight", "ffn_gate_inp.weight")):
    return gguf.GGMLQuantizationType.F32
  chosen = gguf.GGMLQuantizationType[kind.upper()]
  whole = shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] == 0
  return chosen if whole else gguf.GGMLQuantizationType.F16


def _encoded(name: str, value: np.ndarray, kind: Any) -> np.ndarray:
  """Returns the numbers of a tensor as the bytes of a type."""
  with np.errstate(over="ignore"):
    out = library().quants.quantize(np.ascontiguousarray(value, np.float32), kind)
  if kind.name == "F16" and not np.isfinite(out).all():
    raise ValueError(
      f"tensor {name!r} has numbers that float16 cannot hold; expected at most 65504. "
      "Export bf16 instead"
    )
  return out
