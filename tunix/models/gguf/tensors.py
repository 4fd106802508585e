"""Tensors of a GGUF file under their Hugging Face names, decoded when they are read."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from tunix.models.files.stored_tensor import StoredTensor, brief
from tunix.models.gguf import architectures, convert, header as headers, rope
from tunix.models.gguf.changes import Change, Plain
from tunix.models.gguf.file import File
from tunix.models.gguf.header import Header, Info

NAME = "model.gguf"  # of the file in a model folder
_MAX_TABLE = 1 << 16  # numbers of a table of rotary factors
_KINDS = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
  """A tensor that is decoded when it is read.

  Attributes:
    stored: the GGUF tensors that hold it.
    change: their relation to this tensor.
    number: see `Change.to_hf`.
  """

  stored: tuple[Info, ...] = dataclasses.field(kw_only=True)
  change: Change = dataclasses.field(kw_only=True)
  number: int = dataclasses.field(kw_only=True)

  def map(self) -> GgufTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
    """Returns this object, whose slices are arrays of decoded numbers."""
    return self

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice; `index` has a slice for every axis."""
    sources = [_Decoded(self.file, info) for info in self.stored]
    values = self.change.to_hf(sources, self.number, index[0])
    return values[(slice(None), *index[1:])]


class _Decoded:
  """A GGUF tensor in its own order, decoded by indexing; see `Change.to_hf`."""

  def __init__(self, file: pathlib.Path, info: Info):
    self.shape = info.shape
    self._kind = info.kind
    self._dtype = _KINDS.get(info.kind.name)
    columns = info.shape[-1] if self._dtype else info.row
    shape = (*info.shape[:-1], columns)
    self._stored = np.memmap(file, self._dtype or np.uint8, "r", info.offset, shape)

  def __getitem__(self, index: Any) -> np.ndarray:
    if self._dtype is not None:
      return self._stored[index]
    if len(self.shape) == 1:  # blocks of a vector are decoded together
      return self._dequantized(self._stored)[index]
    return self._dequantized(self._stored[index])

  def _dequantized(self, rows: np.ndarray) -> np.ndarray:
    return headers.library().quants.dequantize(rows, self._kind)


def open_file(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a file by their Hugging Face names.

  A tensor that its architecture does not have keeps its name.

  Raises:
    ImportError, ValueError: see `header.read` and `convert.config_of`.
  """
  header = headers.read(file)
  hf = config_json(header)
  rest = dict(header.tensors)
  for name in rope.TABLES:
    rest.pop(name, None)
  tensors: dict[str, StoredTensor] = {}
  for link in convert.links(architecture_of(header), hf):
    if not all(name in rest for name in link.gguf):
      continue
    stored = tuple(rest.pop(name) for name in link.gguf)
    tensors |= {tensor.name: tensor for tensor in _tensors(file, link, stored)}
  for name, info in rest.items():
    (tensor,) = _tensors(file, convert.Link((name,), (name,), Plain()), (info,))
    tensors[name] = tensor
  return tensors


def as_bytes(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a file by their GGUF names, as the bytes that are stored.

  Raises:
    ImportError, ValueError: see `header.read`.
  """
  return {
    name: StoredTensor(name, file, np.dtype(np.uint8), (info.nbytes,), info.offset)
    for name, info in headers.read(file).tensors.items()
  }


def architecture_of(header: Header) -> architectures.Architecture:
  """Returns the architecture of a file of a whole model.

  Raises:
    ValueError: the architecture is unknown, or the file holds something else.
  """
  kind = header.metadata.get("general.type", "model")
  if kind != "model":
    raise ValueError(
      f"general.type is {brief(kind)}; expected 'model'. Give the file of a whole model"
    )
  return architectures.of_name(header.metadata.get("general.architecture"))


def config_json(header: Header) -> dict[str, Any]:
  """Returns the `config.json` of a file, without token ids.

  `dtype` is float32 if the embedding table is, and bfloat16 otherwise: most files in
  float16 were made of weights in bfloat16, and some models overflow in float16.

  Raises:
    ValueError: see `convert.config_of`.
  """
  architecture = architecture_of(header)
  prefix = f"{architecture.name}."
  metadata = {
    key.removeprefix(prefix): _short(value)
    for key, value in header.metadata.items()
    if key.startswith(prefix)
  }
  shapes = {name: info.shape for name, info in header.tensors.items()}
  hf = convert.config_of(architecture, File(metadata, shapes, _floats(header)))
  kind = header.tensors[convert.EMBEDDING].kind.name
  return hf | {"dtype": "float32" if kind in ("F32", "F64") else "bfloat16"}


def _short(value: Any) -> Any:
  """Returns a float32 number as the shortest decimal that means it: 1e-05."""
  is_float32 = isinstance(value, float) and float(np.float32(value)) == value
  return float(str(np.float32(value))) if is_float32 else value


def _floats(header: Header) -> Callable[[str], np.ndarray | None]:
  def read(name: str) -> np.ndarray | None:
    info = header.tensors.get(name)
    if info is None:
      return None
    if len(info.shape) != 1 or info.shape[0] > _MAX_TABLE:
      raise ValueError(
        f"tensor {name!r} has shape {info.shape}; expected one axis, of at most "
        f"{_MAX_TABLE} numbers. Use another file of this model"
      )
    return np.array(_Decoded(header.file, info)[:], np.float32)

  return read


def _tensors(
  file: pathlib.Path, link: convert.Link, stored: tuple[Info, ...]
) -> Iterator[GgufTensor]:
  """Yields the Hugging Face tensors of a link."""
  first = stored[0]
  try:
    shape = link.change.shape(stored)
  except (ValueError, IndexError) as error:
    raise ValueError(
      f"tensor {link.gguf[0]!r} of shape {first.shape} has no place in this "
      f"architecture ({error}). Use another file of this model"
    ) from error
  dtype = _KINDS.get(first.kind.name, np.dtype(np.float32))
  for number, name in enumerate(link.hf):
    where = {"stored": stored, "change": link.change, "number": number}
    yield GgufTensor(name, file, dtype, shape, first.offset, **where)
