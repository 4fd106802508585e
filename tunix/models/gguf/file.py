"""The parts of a GGUF file that a configuration is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunix.models.transformer.hf import values
from tunix.utils import checks


@dataclasses.dataclass(frozen=True)
class File:
  """Metadata and shapes of one file, with typed readers.

  Attributes:
    metadata: the architecture's values, by keys without its name: "block_count".
    shapes: shapes of all tensors by name, in NumPy's order.
    floats: returns a small float32 vector of the file by name, or None if the file has
      none of this name.
  """

  metadata: Mapping[str, Any]
  shapes: Mapping[str, tuple[int, ...]]
  floats: Callable[[str], np.ndarray | None]

  def whole(self, key: str, default: int | None = None) -> int:
    """Returns a whole number >= 1, or >= 0 if 0 can mean that there is none.

    Raises:
      ValueError: the key is missing and has no default, or has another value.
    """
    if default is None:
      return values.integer(self.metadata, key)
    return values.integer(
      {key: default} | dict(self.metadata), key, checks.NOT_NEGATIVE
    )

  def scalar(self, key: str) -> int | float | None:
    """Returns a number > 0; None if it is absent or 0. Raises ValueError as `whole`."""
    value = values.number(self.metadata, key, 0.0, checks.NOT_NEGATIVE)
    return self.metadata[key] if value else None

  def number(self, key: str, default: float | None = None) -> float:
    """Returns a positive number. Raises ValueError as `whole` does."""
    return values.number(self.metadata, key, default)

  def text(self, key: str, default: str) -> str:
    """Returns a text. Raises ValueError as `whole` does."""
    return values.text(self.metadata, key, default)

  def by_layer(self, key: str, layers: int) -> list[int]:
    """Returns whole numbers of all layers; one number stands for all.

    Raises:
      ValueError: the key is missing, or has neither a number nor one for each layer.
    """
    value = self.metadata.get(key)
    if not isinstance(value, np.ndarray):
      return [self.whole(key)] * layers
    if len(value) != layers:
      raise ValueError(
        f"{key} has {len(value)} numbers; expected {layers}, one for each layer"
      )
    return value.astype(np.int64).tolist()
