"""Image processors whose towers read patches: Gemma 4, Qwen3-VL and Pixtral.

The image keeps its aspect ratio approximately. The tower merges `merge_size` x
`merge_size` patches into one soft token.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tunix.models.images.processor import Color, Pixels, Processor, padded

_CLIP_MEAN: Color = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Color = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Patches(Processor):
  """A processor that gives flat patches; the grid is their (rows, columns).

  Attributes:
    patch_size: edge of a patch in pixels.
    merge_size: edge of a soft token in patches.
  """

  patch_size: int = 16
  merge_size: int = 2

  @property
  def step(self) -> int:
    """Edge of a soft token in pixels, which divides the edges of the resized image."""
    return self.patch_size * self.merge_size

  @property
  def sizes(self) -> tuple[int, int]:
    return self.patch_size, self.merge_size

  def row(
    self, images: Sequence[Pixels], max_tokens: int
  ) -> tuple[np.ndarray, np.ndarray]:
    patches = max_tokens * self.merge_size**2
    values = padded([x.values for x in images], (patches, self.patch_size**2 * 3))
    # An image has at least one soft token.
    sizes = padded([x.grid for x in images], (max_tokens, len(self.grid(64, 64))))
    return values, sizes.astype(np.int32)

  @abc.abstractmethod
  def size(self, height: int, width: int) -> tuple[int, int]:
    """Returns the height and width in pixels to which an image is resized."""

  def grid(self, height: int, width: int) -> tuple[int, ...]:
    height, width = self.size(height, width)
    return height // self.patch_size, width // self.patch_size

  def num_tokens(self, grid: Sequence[int]) -> int:
    return math.prod(grid) // self.merge_size**2

  def values(self, image: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    rows, columns = grid[-2:]
    image = self.resized(image, rows * self.patch_size, columns * self.patch_size)
    return self.scaled(self.patches(image)).reshape(rows * columns, -1)

  def patches(self, image: np.ndarray) -> np.ndarray:
    """Returns the patches row by row, [rows, columns, patch, patch, 3]."""
    rows, columns = (n // self.patch_size for n in image.shape[:2])
    cut = image.reshape(rows, self.patch_size, columns, self.patch_size, 3)
    return cut.transpose(0, 2, 1, 3, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4(_Patches):
  """The processor of Gemma 4: as many soft tokens as fit into a budget.

  Attributes:
    max_soft_tokens: largest number of soft tokens of an image.
  """

  mean: Color = (0.0, 0.0, 0.0)
  std: Color = (1.0, 1.0, 1.0)
  merge_size: int = 3
  max_soft_tokens: int = 280

  PLACEHOLDER: ClassVar = "<|image|>"
  KEYS: ClassVar = {
    "patch_size": "patch_size",
    "merge_size": "pooling_kernel_size",
    "max_soft_tokens": "max_soft_tokens",
  }

  def size(self, height: int, width: int) -> tuple[int, int]:
    step = self.step
    factor = math.sqrt(self.max_soft_tokens * step**2 / (height * width))
    rows, columns = int(factor * height / step), int(factor * width / step)
    # A side too short for one soft token still gets one row or column.
    if not rows:
      rows, columns = 1, min(width // height, self.max_soft_tokens)
    elif not columns:
      rows, columns = min(height // width, self.max_soft_tokens), 1
    return rows * step, columns * step

  def text(self, grid: Sequence[int]) -> str:
    return f"<|image>{'<|image|>' * self.num_tokens(grid)}<image|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VL(_Patches):
  """The processor of Qwen3-VL and Qwen3.5 (arXiv:2409.12191, section 2.1).

  The grid is (1, rows, columns): images have one frame. The tower's temporal patch
  covers two frames, and an image is both of them. `Pixels.values` has each patch once.
  The patches of one soft token follow each other.

  Attributes:
    min_pixels, max_pixels: smallest and largest number of pixels after the resize.
  """

  min_pixels: int = 65_536
  max_pixels: int = 16_777_216

  PLACEHOLDER: ClassVar = "<|image_pad|>"
  KEYS: ClassVar = {
    "patch_size": "patch_size",
    "merge_size": "merge_size",
    "min_pixels": "size.shortest_edge",
    "max_pixels": "size.longest_edge",
  }

  def size(self, height: int, width: int) -> tuple[int, int]:
    if max(height, width) > 200 * min(height, width):
      raise ValueError(
        f"image has {width} x {height} pixels; expected a longer side of at most 200 "
        "times the shorter one. Crop it"
      )
    step = self.step
    rows, columns = round(height / step), round(width / step)
    if rows * columns * step**2 > self.max_pixels:
      shrink = math.sqrt(height * width / self.max_pixels)
      rows = max(1, math.floor(height / shrink / step))
      columns = max(1, math.floor(width / shrink / step))
    elif rows * columns * step**2 < self.min_pixels:
      grow = math.sqrt(self.min_pixels / (height * width))
      rows = math.ceil(height * grow / step)
      columns = math.ceil(width * grow / step)
    return rows * step, columns * step

  def grid(self, height: int, width: int) -> tuple[int, ...]:
    return (1, *super().grid(height, width))

  def patches(self, image: np.ndarray) -> np.ndarray:
    patches, merge = super().patches(image), self.merge_size
    rows, columns = (n // merge for n in patches.shape[:2])
    blocks = patches.reshape(rows, merge, columns, merge, *patches.shape[2:])
    return blocks.transpose(0, 2, 1, 3, 4, 5, 6)

  def text(self, grid: Sequence[int]) -> str:
    # The chat template writes <|vision_start|> and <|vision_end|> around it.
    return "<|image_pad|>" * self.num_tokens(grid)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pixtral(_Patches):
  """The processor of Ministral 3 and of Pixtral (arXiv:2410.07073, section 2.2).

  Attributes:
    longest_edge: images with a longer side are made smaller; others keep their size.
  """

  mean: Color = _CLIP_MEAN
  std: Color = _CLIP_STD
  patch_size: int = 14
  longest_edge: int = 1540

  PLACEHOLDER: ClassVar = "[IMG]"
  KEYS: ClassVar = {
    "patch_size": "processor.patch_size",
    "merge_size": "processor.spatial_merge_size",
    "longest_edge": "size.longest_edge",
  }

  def size(self, height: int, width: int) -> tuple[int, int]:
    ratio = max(height / self.longest_edge, width / self.longest_edge)
    if ratio > 1:
      height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not height or not width:
      raise ValueError(
        f"image is too narrow: resized to {self.longest_edge} pixels, its longer side "
        "leaves no pixel of the other one. Crop it"
      )
    # Up to whole soft tokens.
    rows, columns = (-(-n // self.step) for n in (height, width))
    return rows * self.step, columns * self.step

  def text(self, grid: Sequence[int]) -> str:
    row = "[IMG]" * (grid[1] // self.merge_size)
    return "[IMG_BREAK]".join([row] * (grid[0] // self.merge_size)) + "[IMG_END]"
