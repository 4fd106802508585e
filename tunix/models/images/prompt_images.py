"""The images of prompts, on their way from a processor to a sampler."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tunix.models.images.processor import Pixels, Processor


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImages:
  """The images of one prompt, whose token ids have a soft token for each vector.

  Attributes:
    pixels: argument `images` of the model for one row, see `Processor.row`.
    counts: number of soft tokens of each image, in the order of the prompt.
    digests: a hash of each image's pixels. Equal digests mean equal images.
  """

  pixels: Any
  counts: tuple[int, ...]
  digests: tuple[bytes, ...]

  @classmethod
  def of(
    cls, processor: Processor, images: Sequence[Pixels], max_tokens: int | None = None
  ) -> Self:
    """Joins the images of a prompt.

    Args:
      processor: the processor that made the images.
      images: at least one image, in the order of the prompt.
      max_tokens: largest number of soft tokens of a row, as in `Processor.row`; None:
        a power of two. Each number compiles a program of its own.
    """
    counts = tuple(image.num_tokens for image in images)
    if max_tokens is None:
      max_tokens = 1 << (sum(counts) - 1).bit_length()
    digests = tuple(map(_digest, images))
    return cls(processor.row(images, max_tokens), counts, digests)

  @classmethod
  def of_row(cls, pixels: Any, num_tokens: int) -> Self | None:
    """Returns the images of one row of a batch, which count as one image.

    They have one digest. The result is None if `num_tokens` is 0.

    Args:
      pixels: the row of the argument `images` of the model.
      num_tokens: number of soft tokens of the row's prompt.
    """
    if not num_tokens:
      return None
    hashed = hashlib.blake2b(digest_size=16)
    for array in pixels if isinstance(pixels, tuple) else (pixels,):
      hashed.update(np.ascontiguousarray(array).data)
    return cls(pixels, (num_tokens,), (hashed.digest(),))

  @property
  def num_tokens(self) -> int:
    """Number of soft tokens of all images."""
    return sum(self.counts)


def stacked(rows: Sequence[PromptImages | None], count: int | None = None) -> Any:
  """Returns the argument `images` of the model for rows; None if no row has images.

  Args:
    rows: the images of each row, or None. Rows are padded to the longest one.
    count: number of rows of the result, at least that of `rows`; None: equal.
  """
  given = {n: row.pixels for n, row in enumerate(rows) if row is not None}
  if not given:
    return None

  def stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    shape = max(map(len, parts)), *parts[0].shape[1:]
    out = np.zeros((len(rows) if count is None else count, *shape), parts[0].dtype)
    for number, part in zip(given, parts):
      out[number, : len(part)] = part
    return out

  if isinstance(next(iter(given.values())), tuple):  # patches and their grids
    return tuple(map(stack, zip(*given.values())))
  return stack(list(given.values()))


def _digest(image: Pixels) -> bytes:
  shape = repr((image.values.shape, image.grid.tolist()))
  hashed = hashlib.blake2b(shape.encode(), digest_size=16)
  hashed.update(np.ascontiguousarray(image.values).data)
  return hashed.digest()
