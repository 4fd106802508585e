"""Safetensors files: read through a memory map, written as a stream.

The format is an 8-byte length, a JSON header {name: dtype, shape, data_offsets}, and
the raw bytes. Reading maps the bytes, so that only the slices that a device needs are
touched; writing holds one tensor at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES: Mapping[str, Any] = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": jnp.bfloat16,
  "F8_E4M3": jnp.float8_e4m3fn,
  "F8_E5M2": jnp.float8_e5m2,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a file, not read yet.

  Attributes:
    name: its key. file: where it lies. offset: of its first byte.
  """

  name: str
  file: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int

  def map(self) -> np.ndarray:
    """A read-only view of the file; bytes are read when touched."""
    if math.prod(self.shape) == 0:
      return np.empty(self.shape, self.dtype)
    return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


@dataclasses.dataclass(frozen=True)
class NewTensor:
  """One tensor to be written; `read` is called once, when its turn comes."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object.

  Raises:
    FileNotFoundError: no such file.
    ValueError: the file is not a JSON object.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"{path.parent} has no {path.name}: it is not a Hugging Face model folder"
    ) from error
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{path} is not valid JSON ({error}): download it again"
    ) from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds {type(value).__name__}, expected a JSON object")
  return value


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
  """The tensors of one file.

  Raises:
    FileNotFoundError: no such file.
    ValueError: the file is truncated or no safetensors file.
  """
  size = file.stat().st_size
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
      raise _damaged(file, f"{size} bytes, a header of {length} announced")
    raw = stream.read(length)
  try:
    header = json.loads(raw)
    entries = {k: v for k, v in header.items() if k != "__metadata__"}
    tensors = {k: _entry(file, k, v, 8 + length) for k, v in entries.items()}
    end = max((v["data_offsets"][1] for v in entries.values()), default=0)
  except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
    raise _damaged(file, f"unreadable header: {error}") from error
  if size != 8 + length + end:
    raise _damaged(file, f"{size} bytes, {8 + length + end} expected")
  return tensors


def _entry(file: pathlib.Path, name: str, entry: Any, start: int) -> StoredTensor:
  if entry["dtype"] not in _DTYPES:
    raise ValueError(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
  dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
  first, last = entry["data_offsets"]
  if first < 0 or last - first != math.prod(shape) * dtype.itemsize:
    raise ValueError(f"tensor {name!r} of shape {shape} lies at {first}..{last}")
  return StoredTensor(name, file, dtype, shape, start + first)


def _damaged(file: pathlib.Path, what: str) -> ValueError:
  return ValueError(
    f"{file} is damaged or no safetensors file ({what}): download or save it again"
  )


def open_folder(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """The tensors of a model folder: one file, or several with an index.

  Raises:
    FileNotFoundError: no safetensors file, or one that the index names is missing.
    ValueError: a damaged file or index.
  """
  single, index = folder / SINGLE, folder / INDEX
  if single.exists():
    return read_header(single)
  if index.exists():
    return _open_index(index)
  files = sorted(folder.glob("model*.safetensors"))
  if not files:
    raise FileNotFoundError(
      f"{folder} has no *.safetensors file: save the model in that format "
      "(save_pretrained of transformers does)"
    )
  return {k: v for file in files for k, v in read_header(file).items()}


def _open_index(index: pathlib.Path) -> dict[str, StoredTensor]:
  places = read_json(index).get("weight_map")
  if not isinstance(places, dict) or not places:
    raise ValueError(f"{index} has no weight_map: download it again")
  tensors: dict[str, StoredTensor] = {}
  headers: dict[str, dict[str, StoredTensor]] = {}
  for name in sorted({str(place) for place in places.values()}):
    # By name, not by where a link leads: hub caches link their files elsewhere.
    if pathlib.PurePath(name).name != name or name in ("", ".", ".."):
      raise ValueError(
        f"{index} names {name!r}, which leaves the folder: only names of files beside "
        "the index are read"
      )
    if not (index.parent / name).exists():
      raise FileNotFoundError(
        f"{index} names {name}, which is not there: download the folder again"
      )
    headers[name] = read_header(index.parent / name)
    tensors |= headers[name]
  for key, place in places.items():
    if key not in headers[place]:
      raise ValueError(
        f"{index} says that {place} holds {key!r}, it does not: download both again"
      )
    tensors[key] = headers[place][key]
  return tensors


def write_file(path: pathlib.Path, tensors: Sequence[NewTensor]) -> None:
  """Writes and syncs one file.

  Raises:
    OSError: the disk is full or not writable.
  """
  # Large elements first, so that every tensor starts at a multiple of its own size.
  tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  at = 0
  for tensor in tensors:
    header[tensor.name] = {
      "dtype": _CODES[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [at, at + tensor.nbytes],
    }
    at += tensor.nbytes
  raw = json.dumps(header, separators=(",", ":")).encode()
  raw += b" " * (-len(raw) % 8)
  with path.open("wb") as stream:
    stream.write(len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors:
      value = tensor.read()
      assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape), tensor.name
      stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    stream.flush()
    os.fsync(stream.fileno())


def write_shards(
  folder: pathlib.Path, tensors: Sequence[NewTensor], max_shard_bytes: int
) -> None:
  """Writes `model.safetensors`, or numbered files and their index."""
  shards: list[list[NewTensor]] = [[]]
  held = 0
  for tensor in tensors:
    if shards[-1] and held + tensor.nbytes > max_shard_bytes:
      shards.append([])
      held = 0
    shards[-1].append(tensor)
    held += tensor.nbytes
  if len(shards) == 1:
    write_file(folder / SINGLE, shards[0])
    return
  places = {}
  for i, shard in enumerate(shards, 1):
    name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    write_file(folder / name, shard)
    places |= {tensor.name: name for tensor in shard}
  total = sum(tensor.nbytes for tensor in tensors)
  index = {"metadata": {"total_size": total}, "weight_map": places}
  (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@contextlib.contextmanager
def staged_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A temporary folder beside `folder` that takes its place when all went well.

  A new folder appears whole or not at all. In one that exists, files are replaced one
  by one after everything was written, weight files of an earlier save are removed, and
  other files stay. After an error (a full disk) the folder is as it was.

  Raises:
    NotADirectoryError: `folder` is a file.
    OSError: the disk is full or not writable.
  """
  if folder.exists() and not folder.is_dir():
    raise NotADirectoryError(f"{folder} is a file: give a folder to save into")
  folder.parent.mkdir(parents=True, exist_ok=True)
  staging = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
  staging.mkdir()
  try:
    yield staging
    if folder.exists() and any(folder.iterdir()):
      _replace_files(staging, folder)
    else:
      os.replace(staging, folder)
  finally:
    shutil.rmtree(staging, ignore_errors=True)


def _replace_files(staging: pathlib.Path, folder: pathlib.Path) -> None:
  new = {file.name for file in staging.iterdir()}
  for name in sorted(new):
    os.replace(staging / name, folder / name)
  if any(_WEIGHTS.fullmatch(name) for name in new):
    for file in list(folder.iterdir()):
      if _WEIGHTS.fullmatch(file.name) and file.name not in new:
        file.unlink()
