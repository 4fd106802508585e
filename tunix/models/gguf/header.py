"""Reader of the header of a GGUF file, which may come from a stranger.

Every count, length and offset is compared with the size of the file before it is used,
so that no memory is allocated on the word of a header. Long lists of texts stay in the
file and are decoded one by one.
"""

from __future__ import annotations

import array
import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.models.files.stored_tensor import brief, check_file, sizes
from tunix.utils import optional

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEY = 1 << 16  # bytes of a key or of a tensor's name
_MAX_TEXT = 1 << 20  # bytes of one text; the longest chat templates have 100,000
_MAX_ALIGNMENT = 1 << 16
_MAX_AXES = 4
_TEXT, _LIST = 8, 9
_AGAIN = "Download the file again"
# Codes of the values with a fixed size -> their type in NumPy.
_NAMES = "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"
_TYPES = {code: np.dtype(name) for code, name in enumerate(_NAMES) if name}


@dataclasses.dataclass(frozen=True)
class Info:
  """One tensor of a file.

  Attributes:
    kind: its `gguf.GGMLQuantizationType`.
    shape: its shape in NumPy's order.
    row: bytes of one row, the numbers along the last axis.
    offset: position of its first byte in the file.
  """

  kind: Any
  shape: tuple[int, ...]
  row: int
  offset: int

  @property
  def nbytes(self) -> int:
    """Number of bytes in the file."""
    return math.prod(self.shape[:-1]) * self.row


@dataclasses.dataclass(frozen=True)
class Header:
  """The header of a file.

  Attributes:
    file: the file.
    metadata: its values by key: a number, a text, `Texts`, or an array of numbers.
    tensors: its tensors by name.
  """

  file: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, Info]


class Texts(Sequence[str]):
  """A list of texts that stay in the file until they are read.

  Args:
    data: the bytes of the file.
    starts: position of each text's length in the file.
  """

  def __init__(self, data: mmap.mmap, starts: array.array[int]):
    self._data = data
    self._starts = starts

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int | slice) -> Any:
    if isinstance(index, slice):
      return Texts(self._data, self._starts[index])
    start = self._starts[index]
    length = int.from_bytes(self._data[start : start + 8], "little")
    return _utf8(self._data[start + 8 : start + 8 + length])


def library() -> Any:
  """Returns the package `gguf`.

  Raises:
    ImportError: it is missing; the message names the extra.
  """
  return optional.require("gguf", "a GGUF file", "'tunix[gguf]'")


def read(file: pathlib.Path) -> Header:
  """Returns the header of a file.

  Raises:
    FileNotFoundError: the file does not exist.
    ImportError: the package `gguf` is missing.
    ValueError: the file is truncated, is no GGUF file of this machine's byte order, is
      a part of several files, or its header contradicts itself.
  """
  check_file(file)
  try:
    if (size := file.stat().st_size) < len(_MAGIC):  # an empty file cannot be mapped
      raise ValueError(f"it has {size} bytes")
    with file.open("rb") as stream:
      data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return _Walk(data).header(file)
  except ValueError as error:
    raise ValueError(
      f"{file} cannot be read as a GGUF file: {brief(error, 500)}"
    ) from error


def _utf8(raw: bytes) -> str:
  try:
    return raw.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"the text {brief(raw)} is no UTF-8. {_AGAIN}") from error


class _Walk:
  """A position in the bytes of a file, which never moves beyond their end."""

  def __init__(self, data: mmap.mmap):
    self.data = data
    self.at = 0

  def header(self, file: pathlib.Path) -> Header:
    self._check_kind()
    tensors, pairs = self._number(8), self._number(8)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
      key = self._name(metadata)
      metadata[key] = self._value(key, self._number(4))
    if (parts := metadata.get("split.count", 1)) != 1:
      raise ValueError(
        f"split.count is {brief(parts)}; expected 1, a whole model in one file. Join "
        "the parts: llama-gguf-split --merge FIRST_PART WHOLE_FILE"
      )
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
      name = self._name(entries)
      axes = self._number(4)
      if not 1 <= axes <= _MAX_AXES:
        raise ValueError(f"tensor {brief(name)} has {axes} axes. {_AGAIN}")
      shape = [self._number(8) for _ in range(axes)][::-1]
      shape = sizes(shape, f"tensor {brief(name)}: shape")
      entries[name] = shape, self._number(4), self._number(8)
    return Header(file, metadata, self._placed(entries, metadata))

  def _check_kind(self) -> None:
    if (magic := self._take(4)) != _MAGIC:
      raise ValueError(f"it begins with {magic!r}; expected {_MAGIC!r}")
    raw = self._take(4)
    version = int.from_bytes(raw, "little")
    if int.from_bytes(raw, "big") in _VERSIONS:
      raise ValueError(
        "it is big-endian; expected little-endian. Convert it on a big-endian machine: "
        "gguf-convert-endian FILE little"
      )
    if version not in _VERSIONS:
      raise ValueError(
        f"its version is {version}; expected one of {_VERSIONS}. Convert the model anew"
      )

  def _placed(
    self, entries: dict[str, Any], metadata: dict[str, Any]
  ) -> dict[str, Info]:
    """Returns the tensors with their places, which do not overlap."""
    alignment = metadata.get("general.alignment", 32)
    usual = isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT
    if not usual or alignment & (alignment - 1):
      raise ValueError(
        f"general.alignment is {brief(alignment)}; expected a power of 2 up to "
        f"{_MAX_ALIGNMENT}. {_AGAIN}"
      )
    start = self.at + -self.at % alignment
    tensors: dict[str, Info] = {}
    end = start
    for name, (shape, code, offset) in sorted(entries.items(), key=lambda x: x[1][2]):
      kind, row = _row(name, shape[-1], code)
      info = tensors[name] = Info(kind, shape, row, start + offset)
      if offset % alignment or info.offset < end:
        raise ValueError(
          f"tensor {brief(name)} begins at byte {info.offset}; expected a multiple of "
          f"{alignment} after the tensor before it. {_AGAIN}"
        )
      end = info.offset + info.nbytes
      if end > len(self.data):
        raise ValueError(
          f"tensor {brief(name)} ends at byte {end}, the file has {len(self.data)}. "
          f"{_AGAIN}"
        )
    return tensors

  def _value(self, key: str, code: int) -> Any:
    if code == _TEXT:
      return self._text(_MAX_TEXT)
    if code != _LIST:
      return self._numbers(key, code, 1)[0].item()
    item, count = self._number(4), self._number(8)
    if item != _TEXT:
      return self._numbers(key, item, count)
    return self._texts(brief(key), count)

  def _texts(self, key: str, count: int) -> Texts:
    starts = array.array("q")
    length_of = struct.Struct("<Q").unpack_from
    at, size = self.at, len(self.data)
    for _ in range(count):
      starts.append(at)
      at += 8
      at += length_of(self.data, at - 8)[0] if at <= size else 0
      if at > size:
        raise self._short(f"{key} announces {count} texts")
    self.at = at
    return Texts(self.data, starts)

  def _numbers(self, key: str, code: int, count: int) -> np.ndarray:
    if code not in _TYPES:
      raise ValueError(f"{brief(key)} has a value of the unknown type {code}. {_AGAIN}")
    dtype = _TYPES[code]
    return np.frombuffer(self._take(count * dtype.itemsize), dtype)

  def _number(self, nbytes: int) -> int:
    return int.from_bytes(self._take(nbytes), "little")

  def _name(self, taken: Mapping[str, Any]) -> str:
    name = self._text(_MAX_KEY)
    if name in taken:
      raise ValueError(f"{brief(name)} occurs twice. {_AGAIN}")
    return name

  def _text(self, most: int) -> str:
    length = self._number(8)
    if length > most:
      raise ValueError(f"a text of {length} bytes; at most {most} are read. {_AGAIN}")
    return _utf8(self._take(length))

  def _take(self, count: int) -> bytes:
    if count > len(self.data) - self.at:
      raise self._short(f"a value announces {count} bytes")
    self.at += count
    return self.data[self.at - count : self.at]

  def _short(self, what: str) -> ValueError:
    rest = len(self.data) - self.at
    return ValueError(f"{what}, and the file has {rest} more. {_AGAIN}")


def _row(name: str, columns: int, code: int) -> tuple[Any, int]:
  """Returns the type of a tensor, and the bytes of one row, which are whole blocks."""
  gguf = library()
  try:
    kind = gguf.GGMLQuantizationType(code)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
  except (ValueError, KeyError) as error:
    raise ValueError(
      f"tensor {brief(name)} has the unknown type {code}. Install a newer version of "
      "the package gguf"
    ) from error
  if columns % block:
    raise ValueError(
      f"tensor {brief(name)} has rows of {columns} numbers; expected a multiple of "
      f"{block} for {kind.name}. {_AGAIN}"
    )
  return kind, columns // block * nbytes
