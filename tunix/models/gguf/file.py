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
    """Returns a whole number >= 0.

    Raises:
      ValueError: the key is missing and has no default, or has another value.
    """
    if default is not None and key not in self.metadata:
      return default
    return values.integer(self.metadata, key, checks.NOT_NEGATIVE)

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
    if not isinstance(value, list):
      return [self.whole(key)] * layers
    if len(value) != layers:
      raise ValueError(
        f"{key} has {len(value)} numbers; expected {layers}, one a layer"
      )
    return [values.integer({key: x}, key, checks.NOT_NEGATIVE) for x in value]
