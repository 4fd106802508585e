"""Conversion of pictures to the pixels that the vision tower reads.

It follows the settings of the published Gemma 3 processors. Every picture is resized to
a square with an antialiased bilinear filter and scaled by x / 127.5 - 1. Nothing is
cropped: "pan and scan" is off in these settings and not implemented here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

_ONE = 2.0**22  # fixed-point 1 of Pillow's weights


def preprocess(
  images: Sequence[Any], image_size: int = 896
) -> Float[np.ndarray, "n Y X C"]:
  """Resizes and scales pictures.

  The resize is Pillow's, written in NumPy, so that the result does not depend on
  installed packages. Every gray level equalled that of `Gemma3ImageProcessorPil` of
  transformers 5.23 with Pillow 13, on noise of ten shapes from 9x7 to 1900x1200. Older
  Pillows always resize the width first: for pictures that shrink more in height, a
  quarter of the values differ by one level of 255. torchvision's resize was not
  measured.

  Args:
    images: uint8 arrays [height, width, 3], or Pillow images of any mode.
    image_size: edge of the result in pixels.

  Returns:
    float32 in [-1, 1].

  Raises:
    TypeError: an array is not uint8.
    ValueError: an array has another shape, or is empty.
  """
  out = np.empty((len(images), image_size, image_size, 3), np.float32)
  for i, image in enumerate(images):
    pixels = resize(_as_array(image, i), image_size, image_size)
    out[i] = pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)
  return out


def _as_array(image: Any, number: int) -> np.ndarray:
  if hasattr(image, "convert"):  # a Pillow image, recognized without importing Pillow
    image = image.convert("RGB")
  array = np.asarray(image)
  if array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
    raise ValueError(
      f"image {number} has shape {array.shape}, expected [height, width, 3]: convert "
      "it to RGB with the channels last"
    )
  if array.dtype != np.uint8:
    raise TypeError(
      f"image {number} holds {array.dtype}, expected uint8 from 0 to 255: do not scale "
      "it before"
    )
  return array


def resize(
  image: UInt8[np.ndarray, "Y X C"], height: int, width: int
) -> UInt8[np.ndarray, "y x C"]:
  """Resizes bilinearly with antialiasing, and rounds to gray levels after each axis.

  The order of the axes changes the last bit. As in Pillow 13 the width is resized
  first, unless the height shrinks, and by more than the width.
  """
  shrinks = height / image.shape[0]
  if shrinks < 1 and shrinks < width / image.shape[1]:
    return _resize_width(_resize_height(image, height), width)
  return _resize_height(_resize_width(image, width), height)


def _resize_height(image: np.ndarray, height: int) -> np.ndarray:
  weights = _filter(image.shape[0], height)
  return _round(np.einsum("yxc,oy->oxc", image, weights, optimize=True))


def _resize_width(image: np.ndarray, width: int) -> np.ndarray:
  weights = _filter(image.shape[1], width)
  return _round(np.einsum("yxc,ox->yoc", image, weights, optimize=True))


def _round(x: np.ndarray) -> np.ndarray:
  return np.clip(np.floor(x + 0.5), 0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=32)
def _filter(size: int, new_size: int) -> Float[np.ndarray, "o i"]:
  """Returns the weights of the old pixels in each new one.

  They form a triangle around the new pixel's centre that reaches one old pixel to each
  side, or one new pixel if the picture shrinks.
  """
  ratio = size / new_size
  reach = max(ratio, 1.0)
  centres = (np.arange(new_size) + 0.5) * ratio
  distance = np.abs(np.arange(size) + 0.5 - centres[:, None])
  weights = np.maximum(0.0, 1.0 - distance / reach)
  weights = weights / weights.sum(axis=1, keepdims=True)
  # Pillow's weights have 22 fractional bits. float64 sums them exactly, so that sums
  # half way between two gray levels round as in Pillow.
  return np.floor(weights * _ONE + 0.5) / _ONE
