"""Changes that llama.cpp makes to tensors of a Hugging Face folder, in both directions.

`to_gguf` takes whole arrays. `to_hf` reads rows only, so that a large tensor is never
decoded as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Source(Protocol):
  """A tensor of a GGUF file that is decoded by indexing.

  Attributes:
    shape: its shape in NumPy's order.
  """

  @property
  def shape(self) -> tuple[int, ...]: ...

  def __getitem__(self, index: Any) -> np.ndarray:
    """Returns decoded numbers; `index` is for the first axis or the first axes."""
    ...


class Change(Protocol):
  """The relation between Hugging Face tensors and GGUF tensors."""

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns all GGUF tensors of a link, given all its Hugging Face tensors."""
    ...

  def shape(self, gguf: Sequence[Source]) -> tuple[int, ...]:
    """Returns the shape of each Hugging Face tensor, given the GGUF tensors.

    Raises:
      ValueError: the GGUF tensors have shapes that the change cannot have made.
    """
    ...

  def to_hf(self, gguf: Sequence[Source], number: int, rows: slice) -> np.ndarray:
    """Returns rows of the Hugging Face tensor at this number of the link."""
    ...


@dataclasses.dataclass(frozen=True)
class Plain:
  """One tensor, stored with a number added.

  Attributes:
    offset: the number. It is 1 for Gemma's norms, whose scale is 1 + weight.
  """

  offset: float = 0.0

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [hf[0] + np.float32(self.offset) if self.offset else hf[0]]

  def shape(self, gguf: Sequence[Source]) -> tuple[int, ...]:
    return gguf[0].shape

  def to_hf(self, gguf: Sequence[Source], number: int, rows: slice) -> np.ndarray:
    value = gguf[0][rows]
    return value - np.float32(self.offset) if self.offset else value


@dataclasses.dataclass(frozen=True)
class Interleaved:
  """Rows of queries or keys, in the order of the original Llama's rotary embedding.

  Hugging Face rotates the dimensions i and i + H/2 of a head together, this order has
  them side by side.

  Attributes:
    heads: number of heads N. The rows are N H.
  """

  heads: int

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [hf[0][self._order(len(hf[0]), (self.heads, 2, -1))]]

  def shape(self, gguf: Sequence[Source]) -> tuple[int, ...]:
    if gguf[0].shape[0] % (2 * self.heads):
      raise ValueError(
        f"{gguf[0].shape[0]} rows of queries or keys; expected a multiple of twice "
        f"their {self.heads} heads"
      )
    return gguf[0].shape

  def to_hf(self, gguf: Sequence[Source], number: int, rows: slice) -> np.ndarray:
    return gguf[0][self._order(gguf[0].shape[0], (self.heads, -1, 2))[rows]]

  def _order(self, count: int, split: tuple[int, int, int]) -> np.ndarray:
    return np.arange(count).reshape(split).swapaxes(1, 2).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Stacked:
  """The tensors of all experts [out, in], stored as one [E, out, in]."""

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.stack(hf)]

  def shape(self, gguf: Sequence[Source]) -> tuple[int, ...]:
    _, outputs, inputs = gguf[0].shape
    return outputs, inputs

  def to_hf(self, gguf: Sequence[Source], number: int, rows: slice) -> np.ndarray:
    return gguf[0][number, rows]


@dataclasses.dataclass(frozen=True)
class Swapped:
  """One tensor [E, in, out], stored as [E, out, in]."""

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [hf[0].swapaxes(1, 2)]

  def shape(self, gguf: Sequence[Source]) -> tuple[int, ...]:
    experts, outputs, inputs = gguf[0].shape
    return experts, inputs, outputs

  def to_hf(self, gguf: Sequence[Source], number: int, rows: slice) -> np.ndarray:
    return gguf[0][rows].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Alternating:
  """Gate and up of gpt-oss, whose outputs alternate in one Hugging Face tensor.

  The tensor is [E, in, 2 F], and [E, 2 F] for biases. The GGUF tensors are [E, F, in],
  and [E, F] for biases.
  """

  def to_gguf(self, hf: Sequence[np.ndarray]) -> list[np.ndarray]:
    outputs_first = hf[0] if hf[0].ndim == 2 else hf[0].swapaxes(1, 2)
    return [outputs_first[:, 0::2], outputs_first[:, 1::2]]

  def shape(self, gguf: Sequence[Source]) -> tuple[int, ...]:
    gate, up = (part.shape for part in gguf)
    if gate != up:
      raise ValueError(f"gate has shape {gate} and up {up}; expected the same")
    experts, outputs, *inputs = gate
    return (experts, *inputs, 2 * outputs)

  def to_hf(self, gguf: Sequence[Source], number: int, rows: slice) -> np.ndarray:
    both = np.stack([part[rows] for part in gguf], axis=2)
    joined = both.reshape(len(both), -1, *both.shape[3:])
    return joined if joined.ndim == 2 else joined.swapaxes(1, 2)
