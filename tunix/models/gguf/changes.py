"""Changes that llama.cpp makes to tensors of a Hugging Face folder, in both directions.

`to_gguf` takes whole arrays. `to_hf` reads rows only, so that a large tensor is never
decoded as a whole.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np


def hollow(tensors: Sequence[Any]) -> list[np.ndarray]:
  """Returns arrays of the same shapes that take no memory."""
  return [np.broadcast_to(np.float32(0), tensor.shape) for tensor in tensors]


class Change(abc.ABC):
  """The relation between Hugging Face tensors and GGUF tensors.

  Attributes:
    axis: the axis of the GGUF tensors that has the rows of a Hugging Face tensor.
  """

  axis: ClassVar[int] = 0

  @abc.abstractmethod
  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns all GGUF tensors of a link, given all its Hugging Face tensors."""

  @abc.abstractmethod
  def to_hf(self, gguf: Sequence[Any], number: int, rows: slice) -> np.ndarray:
    """Returns rows of a Hugging Face tensor.

    Args:
      gguf: the GGUF tensors: arrays, or objects that decode what is indexed.
      number: position of the Hugging Face tensor in the link.
      rows: the rows.
    """

  def shape(self, gguf: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of each Hugging Face tensor, given the GGUF tensors.

    Raises:
      ValueError, IndexError: the change cannot have made GGUF tensors of these shapes.
    """
    row = self.to_hf(hollow(gguf), 0, slice(0, 1))
    return (gguf[0].shape[self.axis], *row.shape[1:])


@dataclasses.dataclass(frozen=True)
class Plain(Change):
  """One tensor, stored with a number added.

  Attributes:
    offset: the number. It is 1 for Gemma's norms, whose scale is 1 + weight.
  """

  offset: float = 0.0

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [hf[0] + np.float32(self.offset) if self.offset else hf[0]]

  def to_hf(self, gguf: Sequence[Any], number: int, rows: slice) -> np.ndarray:
    value = gguf[0][rows]
    return value - np.float32(self.offset) if self.offset else value


@dataclasses.dataclass(frozen=True)
class Interleaved(Change):
  """Rows of queries or keys, in the order of the original Llama's rotary embedding.

  Hugging Face rotates the dimensions i and i + H/2 of a head together, this order has
  them side by side.

  Attributes:
    heads: number of heads N. The rows are N H.
  """

  heads: int

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [hf[0][self._order(len(hf[0]), (self.heads, 2, -1))]]

  def to_hf(self, gguf: Sequence[Any], number: int, rows: slice) -> np.ndarray:
    return gguf[0][self._order(gguf[0].shape[0], (self.heads, -1, 2))[rows]]

  def _order(self, count: int, split: tuple[int, int, int]) -> np.ndarray:
    return np.arange(count).reshape(split).swapaxes(1, 2).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Stacked(Change):
  """The tensors of all experts [out, in], stored as one [E, out, in]."""

  axis = 1

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.stack(hf)]

  def to_hf(self, gguf: Sequence[Any], number: int, rows: slice) -> np.ndarray:
    return gguf[0][number, rows]


@dataclasses.dataclass(frozen=True)
class Swapped(Change):
  """One tensor [E, in, out], stored as [E, out, in]."""

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [hf[0].swapaxes(1, 2)]

  def to_hf(self, gguf: Sequence[Any], number: int, rows: slice) -> np.ndarray:
    return gguf[0][rows].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Alternating(Change):
  """Gate and up of gpt-oss, whose outputs alternate in one Hugging Face tensor.

  The tensor is [E, in, 2 F], and [E, 2 F] for biases. The GGUF tensors are [E, F, in],
  and [E, F] for biases.
  """

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    outputs_first = hf[0] if hf[0].ndim == 2 else hf[0].swapaxes(1, 2)
    return [outputs_first[:, 0::2], outputs_first[:, 1::2]]

  def to_hf(self, gguf: Sequence[Any], number: int, rows: slice) -> np.ndarray:
    both = np.stack([part[rows] for part in gguf], axis=2)
    joined = both.reshape(len(both), -1, *both.shape[3:])
    return joined if joined.ndim == 2 else joined.swapaxes(1, 2)
