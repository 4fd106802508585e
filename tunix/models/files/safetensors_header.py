"""Parser of the JSON header of a safetensors file, checked before a byte is mapped.

In the order of their offsets, the tensors must fill the file without overlap or gap.
Therefore no two names share bytes, and every byte belongs to a tensor.
"""

from __future__ import annotations

import pathlib

from tunix.models.files.stored_tensor import (
  DTYPES,
  StoredTensor,
  brief,
  sizes,
  strict_json,
)


def parse(
  file: pathlib.Path, raw: bytes, start: int, size: int
) -> dict[str, StoredTensor]:
  """Returns the tensors that a header describes, by name.

  Args:
    file: the file of the header.
    raw: the header.
    start: position of the first tensor's first byte in the file.
    size: size of the file in bytes.

  Raises:
    ValueError: `raw` is no header, or not the header of a file of this size.
  """
  header = strict_json(raw)
  if not isinstance(header, dict):
    raise ValueError(f"the header is {type(header).__name__}, expected an object")
  notes = header.pop("__metadata__", {})
  if not isinstance(notes, dict) or not all(
    isinstance(note, str) for note in notes.values()
  ):
    raise ValueError("__metadata__ is not an object of strings")
  tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items()}
  end = start
  for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
    if tensor.offset != end:
      kind = "overlaps" if tensor.offset < end else "leaves a gap after"
      raise ValueError(f"tensor {brief(tensor.name)} {kind} the one before it")
    end += tensor.nbytes
  if end != size:
    raise ValueError(f"{size} bytes, {end} expected")
  return tensors


def _tensor(file: pathlib.Path, name: str, entry: object, start: int) -> StoredTensor:
  if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(
    entry
  ):
    raise ValueError(f"tensor {brief(name)} lacks dtype, shape or data_offsets")
  code = entry["dtype"]
  if not isinstance(code, str) or code not in DTYPES:
    raise ValueError(f"tensor {brief(name)} has the unknown dtype {brief(code)}")
  shape = sizes(entry["shape"], f"tensor {brief(name)}: shape")
  offsets = sizes(entry["data_offsets"], f"tensor {brief(name)}: data_offsets")
  first, end = offsets if len(offsets) == 2 else (0, -1)  # no tensor has -1 bytes
  tensor = StoredTensor(name, file, DTYPES[code], shape, start + first)
  if end - first != tensor.nbytes:
    raise ValueError(
      f"tensor {brief(name)} of shape {shape} and {tensor.dtype} needs "
      f"{tensor.nbytes} bytes, data_offsets are {list(offsets)}"
    )
  return tensor
