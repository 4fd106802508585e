"""The steps that the image processors of all families share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from tunix.models.images import opening, pillow
from tunix.utils import checks

Color = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Pixels:
  """One image as its vision tower reads it.

  The pixels of several images are the concatenations of `values` and of `grid` along
  their first axes.

  Attributes:
    values: squares [n, S, S, 3], or flat patches [P, patch * patch * 3], in which the
      values lie by row, column and channel.
    grid: one row of numbers, whose meaning the family's class states.
    num_tokens: number of the image's soft tokens, which the tower's vectors replace.
  """

  values: Float32[np.ndarray, "n S S 3"] | Float32[np.ndarray, "P D"]
  grid: Int32[np.ndarray, "1 k"]
  num_tokens: int


def padded(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
  """Returns an array of zeros that begins with the parts, one after the other."""
  out, start = np.zeros(shape, parts[0].dtype if parts else np.float32), 0
  for part in parts:
    out[start : start + len(part)] = part
    start += len(part)
  return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor(abc.ABC):
  """An image processor of one family; call it with RGB pixels.

  Attributes:
    mean, std: values become (level * scale - mean) / std for each channel.
    scale: factor of the 256 levels.
    resample: Pillow's number of the filter that resizes.
  """

  mean: Color = (0.5, 0.5, 0.5)
  std: Color = (0.5, 0.5, 0.5)
  scale: float = 1 / 255
  resample: int = pillow.BICUBIC

  # Text that stands for one image in the output of the family's chat template.
  PLACEHOLDER: ClassVar[str]
  # The family's fields -> their keys in a model folder's files, see folder.py.
  KEYS: ClassVar[Mapping[str, str]]

  def __post_init__(self):
    # All integers count something, but for the number of the filter.
    found = dataclasses.fields(self)
    ranges = {field.name: checks.COUNT for field in found if field.type == "int"}
    ranges |= {"resample": checks.Range(0, 5), "std": checks.POSITIVE}
    checks.fields(self, scale=checks.POSITIVE, **ranges)
    for field in ("mean", "std"):
      if len(getattr(self, field)) != 3:
        raise ValueError(
          f"{field} is {getattr(self, field)}; expected a number for each of 3 channels"
        )

  def __call__(self, image: UInt8[np.ndarray, "Y X 3"]) -> Pixels:
    """Resizes, cuts and scales one image.

    Args:
      image: RGB pixels, see `opening.open_image`.

    Raises:
      TypeError, ValueError: the image is no array uint8 [height, width, 3], or the
        family cannot take its shape.
    """
    opening.check_pixels(image)
    grid = self.grid(*image.shape[:2])
    row = np.array([grid], np.int32)
    return Pixels(self.values(image, grid), row, self.num_tokens(grid))

  @abc.abstractmethod
  def grid(self, height: int, width: int) -> tuple[int, ...]:
    """Returns the grid of an image of `height` x `width` pixels.

    Raises:
      ValueError: the family cannot take an image of this shape.
    """

  @abc.abstractmethod
  def num_tokens(self, grid: Sequence[int]) -> int:
    """Returns the number of soft tokens of an image with this grid."""

  @abc.abstractmethod
  def text(self, grid: Sequence[int]) -> str:
    """Returns the text that replaces `PLACEHOLDER` before the prompt is tokenized."""

  @abc.abstractmethod
  def values(self, image: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Returns `Pixels.values` of an image with this grid."""

  @property
  @abc.abstractmethod
  def sizes(self) -> tuple[int, int]:
    """The sizes that the tower must share, see `VisionLanguageConfig.image_sizes`."""

  @abc.abstractmethod
  def row(self, images: Sequence[Pixels], max_tokens: int) -> Any:
    """Returns the images of one row of tokens, padded to one shape for all rows.

    Args:
      images: the images in the order of their soft tokens, possibly none.
      max_tokens: largest number of soft tokens of a row, at least those of `images`.

    Returns:
      Squares [M, S, S, 3], or a pair of patches [P, patch * patch * 3] and grids
      [N, k]; padding is 0.
    """

  def resized(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns the image with another size, uint8 [height, width, 3]."""
    return pillow.resize(image, height, width, self.resample)

  def scaled(self, levels: UInt8[np.ndarray, "*n 3"]) -> Float32[np.ndarray, "*n 3"]:
    """Returns the values of levels, rounded as float32 after each step."""
    table = (np.arange(256) * self.scale).astype(np.float32)[:, None]
    mean, std = (np.asarray(x, np.float32) for x in (self.mean, self.std))
    return ((table - mean) / std)[levels, np.arange(3)]
