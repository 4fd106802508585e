"""Reader and writer of the weight files of a model folder.

A safetensors file is an 8-byte length, a JSON header {name: dtype, shape, data_offsets}
and the raw bytes. It is read through a memory map and written as a stream. The package
`safetensors` is not used, for two reasons: its NumPy slices copy and lack float8, and
its writer needs all tensors in memory at once, where this one holds one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.models.files import safetensors_header, sums as file_sums, torch_files
from tunix.models.files.stored_tensor import (
  DTYPES,
  MAX_JSON,
  StoredTensor,
  brief,
  check_file,
  strict_json,
)
from tunix.utils import coordination, io

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SINGLE = "pytorch_model.bin"

# Bytes of a header, room for more than 200,000 tensors. Parsed, it takes up to 25 times
# as many.
_MAX_HEADER = 32_000_000

_CODES = {dtype: code for code, dtype in DTYPES.items()}

# Files other than weights that a user of the folder needs; copied from the source.
_COMPANIONS = (
  "added_tokens.json",
  "additional_chat_templates/*.jinja",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "merges.txt",
  "preprocessor_config.json",
  "processor_config.json",
  "special_tokens_map.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "vocab.json",
)


@dataclasses.dataclass(frozen=True)
class NewTensor:
  """One tensor to write.

  Attributes:
    name: its key in the file.
    dtype, shape: those of the array that `read` returns.
    read: returns the array. It is called once, just before the array is written.
  """

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Size of the elements in bytes."""
    return math.prod(self.shape) * self.dtype.itemsize


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object in which no object, at any depth, names a key twice.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file does not hold a JSON object.
  """
  if not path.exists():
    raise FileNotFoundError(
      f"{path.parent} has no {path.name}: it is not a Hugging Face model folder"
    )
  check_file(path)
  if path.stat().st_size > MAX_JSON:
    raise ValueError(f"{path} has more than {MAX_JSON} bytes: it is no settings file")
  try:
    value = strict_json(path.read_bytes())
  except ValueError as error:
    raise ValueError(
      f"{path} is not valid JSON ({brief(error)}): download it again"
    ) from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds {type(value).__name__}, expected a JSON object")
  return value


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of one safetensors file, by name.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is truncated, is no safetensors file, or its header contradicts
      itself (see `safetensors_header`).
  """
  size = file.stat().st_size
  check_file(file)
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
      raise _damaged(
        file,
        f"{size} bytes, a header of {length} announced; at most {_MAX_HEADER} are read",
      )
    raw = stream.read(length)
  try:
    return safetensors_header.parse(file, raw, 8 + length, size)
  except ValueError as error:
    # The error holds a name that was cut already, and what is wrong with it.
    raise _damaged(file, brief(error, 500)) from error


def _damaged(file: pathlib.Path, what: str) -> ValueError:
  return ValueError(
    f"{file} is damaged or no safetensors file ({what}): download or save it again"
  )


_Read = Callable[[pathlib.Path], dict[str, StoredTensor]]


def open_folder(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a model folder, by name.

  The folder holds one weight file, or several with or without an index. torch's files
  (`pytorch_model*.bin`) are read if the folder has no safetensors files.

  Raises:
    FileNotFoundError: the folder has no weights, or lacks a file that its index names.
    ValueError: a file or the index is damaged, or two files hold the same tensor.
  """
  kinds: tuple[tuple[str, str, str, _Read], ...] = (
    (SINGLE, INDEX, "model*.safetensors", read_header),
    (TORCH_SINGLE, TORCH_INDEX, "pytorch_model*.bin", torch_files.read_file),
  )
  for single, index, pattern, read in kinds:
    if (folder / single).exists():
      return read(folder / single)
    if (folder / index).exists():
      return _open_index(folder / index, read)
    files = sorted(folder.glob(pattern))
    if files:
      return _merged(files, read)
  raise FileNotFoundError(
    f"{folder} has no *.safetensors file and no {TORCH_SINGLE}: save the model as "
    "safetensors (save_pretrained of transformers does)"
  )


def _merged(files: Iterable[pathlib.Path], read: _Read) -> dict[str, StoredTensor]:
  tensors: dict[str, StoredTensor] = {}
  for file in files:
    for key, tensor in read(file).items():
      if key in tensors:
        raise ValueError(
          f"{tensors[key].file} and {file.name} both hold {brief(key)}: remove the "
          "files that do not belong to the model, or download it again"
        )
      tensors[key] = tensor
  return tensors


def _open_index(index: pathlib.Path, read: _Read) -> dict[str, StoredTensor]:
  places = read_json(index).get("weight_map")
  if not isinstance(places, dict) or not places:
    raise ValueError(f"{index} has no weight_map: download it again")
  for key, name in places.items():
    if not isinstance(name, str):
      raise ValueError(f"{index} places {brief(key)} in {brief(name)}, no file name")
  names = sorted(set(places.values()))
  tensors = _merged([_beside(index, name) for name in names], read)
  for key, name in places.items():
    if key not in tensors or tensors[key].file.name != name:
      raise ValueError(
        f"{index} lists {brief(key)} in {name}, which does not have it. Download both "
        "files again"
      )
  return tensors


def _beside(index: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of a file that an index names.

  Raises:
    FileNotFoundError: there is no such file beside the index.
    ValueError: the name is no plain file name.
  """
  # The name is checked, not the target of a link: hub caches link to other folders.
  plain = name.isprintable() and len(name) <= 255 and name not in ("", ".", "..")
  if not plain or pathlib.PurePath(name).name != name:
    raise ValueError(
      f"{index} names {brief(name)}, which leaves the folder or is no file name: only "
      "names of files beside the index are read"
    )
  if not (index.parent / name).exists():
    raise FileNotFoundError(
      f"{index} names {name}, which does not exist. Download the folder again"
    )
  return index.parent / name


def write_file(
  path: pathlib.Path, tensors: Sequence[NewTensor], *, mine: bool = True
) -> None:
  """Writes one file and flushes it to the disk.

  Args:
    path: the file.
    tensors: its contents.
    mine: if False, another process writes the file, and this process only reads the
      tensors. Reading a tensor that is spread over processes needs all of them.

  Raises:
    OSError: the disk is full or not writable.
  """
  # Large elements first, so that every tensor starts at a multiple of its element size.
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
  raw += b" " * (-len(raw) % 8)  # the tensors start at a multiple of 8 bytes
  if not mine:
    for tensor in tensors:
      tensor.read()
    return
  with path.open("wb") as stream:
    stream.write(len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors:
      value = tensor.read()
      assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape), tensor.name
      stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    stream.flush()
    os.fsync(stream.fileno())


def write_shards(
  folder: pathlib.Path,
  tensors: Sequence[NewTensor],
  max_shard_bytes: int,
  *,
  together: bool = False,
) -> None:
  """Writes `model.safetensors`, or numbered files and their index.

  Args:
    folder: an existing folder.
    tensors: the contents, in the order of the files.
    max_shard_bytes: largest size of a file in bytes; a larger tensor gets its own file.
    together: if True, all processes call this and each writes its share of the files.
  """
  writers, me = (jax.process_count(), jax.process_index()) if together else (1, 0)
  if together:
    share = -(-sum(tensor.nbytes for tensor in tensors) // writers)
    max_shard_bytes = min(max_shard_bytes, share)
  shards: list[list[NewTensor]] = [[]]
  held = 0
  for tensor in tensors:
    if shards[-1] and held + tensor.nbytes > max_shard_bytes:
      shards.append([])
      held = 0
    shards[-1].append(tensor)
    held += tensor.nbytes
  if len(shards) == 1:
    write_file(folder / SINGLE, shards[0], mine=me == 0)
    return
  places = {}
  for i, shard in enumerate(shards, 1):
    name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    write_file(folder / name, shard, mine=me == i % writers)
    places |= {tensor.name: name for tensor in shard}
  total = sum(tensor.nbytes for tensor in tensors)
  index = {"metadata": {"total_size": total}, "weight_map": places}
  if me == 0:
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def is_spread(model: nnx.Module) -> bool:
  """Returns True if the module's arrays are spread over several processes.

  All of these processes must then take part in saving it.
  """
  leaves = jax.tree.leaves(nnx.state(model))
  return not all(x.is_fully_addressable for x in leaves if isinstance(x, jax.Array))


@contextlib.contextmanager
def staged_folder(
  folder: pathlib.Path, *, together: bool = False
) -> Iterator[pathlib.Path]:
  """Yields a temporary folder that replaces `folder` if the block raises no error.

  A new folder appears whole or not at all. If the folder exists, its files are replaced
  one by one after everything was written. Weight files of an earlier save are then
  removed, and other files stay. After an error, such as a full disk, the folder is
  unchanged.

  Args:
    folder: the final folder.
    together: if True, all processes write into one temporary folder on a shared file
      system. The first process makes the folder and moves it into place.

  Raises:
    NotADirectoryError: `folder` is a file.
    OSError: the disk is full or not writable.
    coordination.AbsentError: another process did not write its part.
  """
  if folder.exists() and not folder.is_dir():
    raise NotADirectoryError(f"{folder} is a file: give a folder to save into")
  first = not together or jax.process_index() == 0

  def meet(what: str, value: object = None) -> Any:
    return coordination.gather(f"{what} {folder}", value)[0] if together else value

  folder.parent.mkdir(parents=True, exist_ok=True)
  staging = folder.parent / meet("naming", io.unfinished(folder.name))
  if first:
    staging.mkdir()
  meet("making")
  try:
    yield staging
    meet("writing")
    if not first:
      pass
    elif folder.exists() and any(folder.iterdir()):
      # Checksums of the earlier files would refuse the new ones.
      (folder / file_sums.NAME).unlink(missing_ok=True)
      _replace_files(staging, folder)
    else:
      os.replace(staging, folder)
    meet("placing")
  finally:
    if first:
      shutil.rmtree(staging, ignore_errors=True)


def _replace_files(staging: pathlib.Path, folder: pathlib.Path) -> None:
  files = [file for file in staging.rglob("*") if file.is_file()]
  new = {str(file.relative_to(staging)) for file in files}
  for name in sorted(new):
    (folder / name).parent.mkdir(exist_ok=True)
    os.replace(staging / name, folder / name)
  if any(_WEIGHTS.fullmatch(name) for name in new):
    for file in list(folder.iterdir()):
      if _WEIGHTS.fullmatch(file.name) and file.name not in new:
        file.unlink()


def copy_companions(origin: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies the files of a model that are neither weights nor `config.json`."""
  for file in (file for pattern in _COMPANIONS for file in origin.glob(pattern)):
    target = folder / file.relative_to(origin)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)
