"""Tensors of single experts, as views that hold all experts of a layer.

Folders of mixtures come in two layouts. One has `experts.gate_up_proj` [E, 2 F, D],
whose first F rows are the gate, and `experts.down_proj` [E, D, F]. The other has a
tensor for each map of each expert, as `transformers` writes for some families. The name
table of a family with fused experts uses the first layout, and this module translates
the second one without reading a file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np

from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.transformer.params import NameTable

# Tensor of all experts -> tensors of one expert that its rows are.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclasses.dataclass(frozen=True)
class JoinedTensor(StoredTensor):
  """A tensor [experts, rows, columns] that is assembled when it is read.

  Attributes:
    parts: the stored tensors of each expert, whose rows follow each other.
  """

  parts: tuple[tuple[StoredTensor, ...], ...] = dataclasses.field(kw_only=True)

  def map(self) -> _View:  # pyright: ignore[reportIncompatibleMethodOverride]
    """Returns an object whose slices are arrays."""
    return _View(self.parts)


@dataclasses.dataclass(frozen=True)
class _View:
  """The numbers of a joined tensor, read by slicing.

  Attributes:
    parts: see `JoinedTensor`.
  """

  parts: tuple[tuple[StoredTensor, ...], ...]

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice; `index` has a slice for every axis."""
    experts, rows, columns = index
    return np.stack(
      [np.concatenate([*_rows(parts, rows, columns)]) for parts in self.parts[experts]]
    )


def _rows(
  parts: tuple[StoredTensor, ...], rows: slice, columns: slice
) -> Iterator[np.ndarray]:
  """Yields the part of each tensor in a slice of all rows."""
  height = parts[0].shape[0]
  first, last, _ = rows.indices(height * len(parts))
  for number, part in enumerate(parts):
    low, high = (min(max(x - number * height, 0), height) for x in (first, last))
    yield part.map()[low:high, columns]


def join(
  tensors: Mapping[str, StoredTensor], names: NameTable
) -> dict[str, StoredTensor]:
  """Returns the tensors with those of single experts as one `JoinedTensor` a layer.

  Args:
    tensors: the tensors of a checkpoint by name.
    names: the family's table. If it has no fused experts whose rows are outputs,
      nothing is joined.

  Raises:
    ValueError: tensors of some experts are missing, or have other dtypes or shapes.
  """
  out = dict(tensors)
  entry = names.get("layers.mlp.experts.gate_up_proj.kernel")
  if entry is None or not entry.transpose:
    return out
  counts: dict[str, int] = {}
  for key in tensors:
    if match := _SINGLE.fullmatch(key):
      counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
  for holder, count in counts.items():
    for fused, parts in _PARTS.items():
      keys = [[f"{holder}.{e}.{x}.weight" for x in parts] for e in range(count)]
      out[f"{holder}.{fused}"] = _joined(f"{holder}.{fused}", keys, out)
  return out


def _joined(
  name: str, keys: list[list[str]], tensors: dict[str, StoredTensor]
) -> JoinedTensor:
  """Takes the tensors out of a checkpoint and returns the tensor of all experts."""
  missing = next((key for row in keys for key in row if key not in tensors), None)
  if missing is not None:
    raise ValueError(
      f"tensor {missing!r} is missing; expected those of {len(keys)} experts. Download "
      "the folder again"
    )
  parts = tuple(tuple(tensors.pop(key) for key in row) for row in keys)
  first = parts[0][0]
  for part in (part for row in parts for part in row):
    if (part.shape, part.dtype) != (first.shape, first.dtype) or len(part.shape) != 2:
      raise ValueError(
        f"tensor {part.name!r} is {part.dtype}{part.shape}; expected a matrix "
        f"{first.dtype}{first.shape} like {first.name!r}. Download the folder again"
      )
  rows, columns = first.shape
  shape = (len(parts), rows * len(parts[0]), columns)
  return JoinedTensor(name, first.file, first.dtype, shape, first.offset, parts=parts)
