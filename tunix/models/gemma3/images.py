"""Conversion of pictures to the pixels that Gemma 3's vision tower reads.

`tunix.models.images` has the processors of all families, and the files they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from tunix.models.images.opening import open_image
from tunix.models.images.squares import Gemma3


def preprocess(
  images: Sequence[Any], image_size: int = 896
) -> Float[np.ndarray, "n Y X C"]:
  """Resizes pictures to squares and scales them, without pan and scan.

  Args:
    images: uint8 arrays [height, width, 3], Pillow images of any mode, or what else
      `open_image` reads.
    image_size: edge of the result in pixels.

  Returns:
    float32 in [-1, 1].

  Raises:
    ImportError: Pillow is not installed (extra `images`).
    TypeError, ValueError: a picture cannot be read; see `open_image`.
  """
  processor = Gemma3(size=image_size)
  squares = [processor(open_image(image)).values for image in images]
  return np.concatenate(
    squares or [np.empty((0, image_size, image_size, 3), np.float32)]
  )
