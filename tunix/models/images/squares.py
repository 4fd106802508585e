"""Image processors whose towers read squares of one size: Gemma 3 and SmolVLM.

Their grid is (rows, columns) of the crops or tiles, (0, 0) if the image is not cut.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tunix.models.images import pillow
from tunix.models.images.processor import Pixels, Processor, padded
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Squares(Processor):
  """A processor that gives squares.

  Attributes:
    tokens_per_square: soft tokens of each square.
  """

  tokens_per_square: int = 256

  def num_tokens(self, grid: Sequence[int]) -> int:
    return (1 + grid[0] * grid[1]) * self.tokens_per_square

  def values(self, image: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    return np.stack([self.scaled(x) for x in self.squares(image, *grid)])

  @property
  @abc.abstractmethod
  def edge(self) -> int:
    """Edge of a square in pixels."""

  @property
  def sizes(self) -> tuple[int, int]:
    return self.edge, self.tokens_per_square

  def row(self, images: Sequence[Pixels], max_tokens: int) -> np.ndarray:
    count = max(1, max_tokens // self.tokens_per_square)
    shape = (count, self.edge, self.edge, 3)
    return padded([image.values for image in images], shape)

  @abc.abstractmethod
  def squares(self, image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """Returns the whole image and its parts as equal squares, in the tower's order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(_Squares):
  """The processor of Gemma 3 (arXiv:2503.19786, section 2.1).

  The image is resized to one square. With pan and scan, an image that is long enough
  is cut along its longer side, and its crops follow as further squares.

  Attributes:
    size: edge of the square in pixels.
    pan_and_scan: if True, long images are also cut.
    min_crop_size: shortest edge of a crop in pixels; shorter crops are not made.
    max_num_crops: largest number of crops.
    min_ratio: ratio of the longer to the shorter side from which images are cut.
  """

  resample: int = pillow.BILINEAR
  size: int = 896
  pan_and_scan: bool = False
  min_crop_size: int = 256
  max_num_crops: int = 4
  min_ratio: float = 1.2

  PLACEHOLDER: ClassVar = "<start_of_image>"
  KEYS: ClassVar = {
    "size": "size.height",
    "tokens_per_square": "processor.image_seq_length",
    "pan_and_scan": "do_pan_and_scan",
    "min_crop_size": "pan_and_scan_min_crop_size",
    "max_num_crops": "pan_and_scan_max_num_crops",
    "min_ratio": "pan_and_scan_min_ratio_to_activate",
  }

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, min_ratio=checks.POSITIVE)

  @property
  def edge(self) -> int:
    return self.size

  def grid(self, height: int, width: int) -> tuple[int, int]:
    long, short = max(height, width), min(height, width)
    if not self.pan_and_scan or long / short < self.min_ratio:
      return 0, 0
    # The ratio rounded half up, but at least 2 crops, which are not too short.
    crops = min(math.floor(long / short + 0.5), long // self.min_crop_size)
    crops = min(max(crops, 2), self.max_num_crops)
    if min(math.ceil(long / crops), short) < self.min_crop_size:
      return 0, 0
    return (1, crops) if width >= height else (crops, 1)

  def squares(self, image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    parts = [image]
    if rows:
      height, width = image.shape[:2]
      edges = math.ceil(height / rows), math.ceil(width / columns)
      parts += _cut(image, rows, columns, *edges)
    return [self.resized(part, self.size, self.size) for part in parts]

  def text(self, grid: Sequence[int]) -> str:
    soft = "<image_soft_token>" * self.tokens_per_square
    image = f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
    if crops := grid[0] * grid[1]:
      return (
        f"Here is the original image {image} and here are some crops to help you see "
        "better " + " ".join([image] * crops)
      )
    return image


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLM(_Squares):
  """The processor of SmolVLM2 (arXiv:2504.05299), of SmolVLM and of Idefics3.

  The longer edge is resized to `longest_edge`, then both edges up to multiples of
  `tile`. The tiles come row by row, and the whole image in one square follows them.

  Attributes:
    longest_edge: longer edge of the resized image in pixels.
    tile: edge of a tile in pixels.
    split: if False, the image becomes one square.
  """

  resample: int = pillow.LANCZOS
  tokens_per_square: int = 64
  longest_edge: int = 2048
  tile: int = 512
  split: bool = True

  PLACEHOLDER: ClassVar = "<image>"
  KEYS: ClassVar = {
    "tokens_per_square": "processor.image_seq_len",
    "longest_edge": "size.longest_edge",
    "tile": "max_image_size.longest_edge",
    "split": "do_image_splitting",
  }

  def __post_init__(self):
    super().__post_init__()
    # Above this, the published models' own processor resizes once more.
    checks.fields(self, longest_edge=checks.Range(1, 4096))

  @property
  def edge(self) -> int:
    return self.tile

  def size(self, height: int, width: int) -> tuple[int, int]:
    """Returns the height and width after the first resize.

    The longer edge is `longest_edge`. The other one is rounded up to an even number.
    """
    ratio = width / height
    if width >= height:
      other = int(self.longest_edge / ratio)
      return max(other + other % 2, 1), self.longest_edge
    other = int(self.longest_edge * ratio)
    return self.longest_edge, max(other + other % 2, 1)

  def grid(self, height: int, width: int) -> tuple[int, int]:
    if not self.split:
      return 0, 0
    height, width = self.size(height, width)
    ratio = width / height
    if width >= height:
      columns = math.ceil(width / self.tile)
      rows = math.ceil(int(columns * self.tile / ratio) / self.tile)
    else:
      rows = math.ceil(height / self.tile)
      columns = math.ceil(int(rows * self.tile * ratio) / self.tile)
    return (rows, columns) if rows * columns > 1 else (0, 0)

  def squares(self, image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    image = self.resized(image, *self.size(*image.shape[:2]))
    if not rows:
      return [self.resized(image, self.tile, self.tile)]
    image = self.resized(image, rows * self.tile, columns * self.tile)
    whole = self.resized(image, self.tile, self.tile)
    return [*_cut(image, rows, columns, self.tile, self.tile), whole]

  def text(self, grid: Sequence[int]) -> str:
    around, soft = "<fake_token_around_image>", "<image>" * self.tokens_per_square
    rows = [
      "".join(f"{around}<row_{y}_col_{x}>{soft}" for x in range(1, grid[1] + 1)) + "\n"
      for y in range(1, grid[0] + 1)
    ]
    whole = f"{around}<global-img>{soft}{around}"
    return "".join([*rows, "\n", whole]) if rows else whole


def _cut(
  image: np.ndarray, rows: int, columns: int, height: int, width: int
) -> list[np.ndarray]:
  """Returns the parts of an image, row by row; the last ones may be smaller."""
  return [
    image[y * height : (y + 1) * height, x * width : (x + 1) * width]
    for y in range(rows)
    for x in range(columns)
  ]
