"""Protocol Buffers' encoding of single fields (https://protobuf.dev/programming-guides/encoding).

The protocol uses few messages of few fields, so the service reads and writes them
without the package protobuf and without the SDK's generated code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tunix.tinker.errors import TinkerError

Value = int | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
  """Yields the fields of a message: a number, and an int or bytes.

  Fixed-width numbers are bytes.

  Raises:
    TinkerError: the data is no message.
  """
  position = 0
  while position < len(data):
    key, position = _varint(data, position)
    kind = key & 7
    if kind == _VARINT:
      value, position = _varint(data, position)
      yield key >> 3, value
      continue
    if kind == _BYTES:
      size, position = _varint(data, position)
    elif kind in (_FIXED64, _FIXED32):
      size = 8 if kind == _FIXED64 else 4
    else:
      raise _malformed()
    if position + size > len(data):
      raise _malformed()
    yield key >> 3, data[position : position + size]
    position += size


def as_bytes(value: Value) -> bytes:
  """Returns the bytes of a field.

  Raises:
    TinkerError: the field is a number.
  """
  if not isinstance(value, bytes):
    raise _malformed()
  return value


def as_text(value: Value) -> str:
  """Returns the text of a field.

  Raises:
    TinkerError: the field is a number, or no UTF-8.
  """
  try:
    return as_bytes(value).decode()
  except UnicodeDecodeError as error:
    raise _malformed() from error


def as_int(value: Value) -> int:
  """Returns the signed integer of a field.

  Raises:
    TinkerError: the field is no integer.
  """
  if not isinstance(value, int):
    raise _malformed()
  return value - 2**64 if value >= 2**63 else value


def as_double(value: Value) -> float:
  """Returns the float of a field of type `double`.

  Raises:
    TinkerError: the field has another type.
  """
  data = as_bytes(value)
  if len(data) != 8:
    raise _malformed()
  return struct.unpack("<d", data)[0]


def integers(value: Value) -> list[int]:
  """Returns the numbers of a repeated integer field, packed or not.

  Raises:
    TinkerError: the field has another type.
  """
  if isinstance(value, int):
    return [as_int(value)]
  out, position = [], 0
  while position < len(value):
    number, position = _varint(value, position)
    out.append(as_int(number))
  return out


def number(field: int, value: int) -> bytes:
  """Returns an integer field; nothing for 0, which is the default."""
  return _key(field, _VARINT) + _to_varint(value) if value else b""


def data(field: int, value: bytes | str) -> bytes:
  """Returns a field of bytes, text or a message."""
  raw = value.encode() if isinstance(value, str) else value
  return _key(field, _BYTES) + _to_varint(len(raw)) + raw


def double(field: int, value: float) -> bytes:
  """Returns a field of type `double`."""
  return _key(field, _FIXED64) + struct.pack("<d", value)


def _key(field: int, kind: int) -> bytes:
  return _to_varint(field << 3 | kind)


def _to_varint(value: int) -> bytes:
  out = bytearray()
  value &= 2**64 - 1
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)


def _varint(data: bytes, position: int) -> tuple[int, int]:
  value = 0
  for shift in range(0, 70, 7):
    if position >= len(data):
      break
    byte = data[position]
    position += 1
    value |= (byte & 127) << shift
    if byte < 128:
      return value & (2**64 - 1), position
  raise _malformed()


def _malformed() -> TinkerError:
  return TinkerError(
    "the body is no message of the protocol; expected Protocol Buffers as the SDK "
    "sends them. Check Content-Type and the version of the SDK"
  )
