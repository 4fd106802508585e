"""The only file that loads Pillow, and the one resize."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import UInt8

from tunix.utils import optional

# Pillow's numbers of its filters, as the files of model folders name them.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3


def module(name: str) -> Any:
  """Imports a module of Pillow, such as "Image".

  Raises:
    ImportError: Pillow is not installed; the message names the extra.
  """
  return optional.require(f"PIL.{name}", "reading images", "'tunix[images]'")


def resize(
  image: UInt8[np.ndarray, "Y X 3"], height: int, width: int, resample: int
) -> UInt8[np.ndarray, "y x 3"]:
  """Resizes with antialiasing and rounds to 8 bits, as Pillow does.

  Args:
    image: RGB pixels.
    height, width: size of the result in pixels.
    resample: Pillow's number of the filter.
  """
  library = module("Image")
  return np.asarray(library.fromarray(image).resize((width, height), resample))
