"""Conversion of image files to RGB pixels of 8 bits.

The rule: the first frame, turned as its EXIF orientation says. 16-bit values keep
their high byte. Transparent pixels are laid on white. Palettes, gray, CMYK and YCbCr
become RGB by Pillow's formulas, and color profiles are not applied.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import os
import re
import struct
import zlib
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tunix.models.images import pillow

# 8192 x 8192, below the size at which Pillow itself warns. Reading takes up to 12 bytes
# a pixel.
MAX_PIXELS = 2**26

# Formats of photographs and screenshots. Pillow's others include EPS, which starts a
# program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

_LONGEST_PATH = 4096
_DATA_URI = re.compile(r"data:[^,]*;base64,", re.I)

# Exceptions that Pillow raises for damaged files.
_DAMAGE = (
  *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error),
  *(KeyError, IndexError, TypeError, OverflowError, AttributeError),
)


class _Refused(ValueError):
  """An image that is whole but cannot be taken."""


def open_image(
  source: str | os.PathLike[str] | bytes | np.ndarray | Any,
  *,
  max_pixels: int = MAX_PIXELS,
) -> UInt8[np.ndarray, "Y X 3"]:
  """Reads one image as RGB; see the rule above.

  Args:
    source: a path, a data URI ("data:image/png;base64,..."), the bytes of a file, a
      Pillow image, or a uint8 array [height, width, 3], which is returned as it is.
    max_pixels: largest accepted height times width. It is compared before the pixels
      are read. Pillow itself refuses files of more than 178,956,970 pixels.

  Raises:
    FileNotFoundError: the path does not exist.
    ImportError: Pillow is not installed.
    TypeError: the source is of another type, or an array is not uint8.
    ValueError: the file is damaged, of an unknown format or too large; or the text is
      no path or data URI.
  """
  if isinstance(source, np.ndarray):
    return check_pixels(source, max_pixels=max_pixels)
  name, library = _name(source), pillow.module("Image")
  turn = pillow.module("ImageOps").exif_transpose
  with _file(source, name) as file:
    try:
      is_open = isinstance(file, library.Image)
      image = file if is_open else library.open(file, formats=FORMATS)
      width, height = image.size
      _check_size(name, height, width, max_pixels)
      image.load()
      if image.format == "PPM" and image.mode == "I":  # gray of 16 bits in 32
        image = library.fromarray(np.asarray(image).astype(np.uint16))
      return _rgb(turn(image), name)
    except _Refused:
      raise
    except library.UnidentifiedImageError as error:
      raise ValueError(
        f"{name} is no image that can be read; expected {', '.join(FORMATS)}. Convert "
        "it, or save it again"
      ) from error
    except library.DecompressionBombError as error:
      raise ValueError(
        f"{name} is too large ({error}); expected 1 to {max_pixels} pixels. Make it "
        "smaller"
      ) from error
    except _DAMAGE as error:
      why = " ".join(str(error).split())[:200] or type(error).__name__
      raise ValueError(
        f"{name} is damaged ({why}): save it again from its source"
      ) from error


def check_pixels(
  image: Any, name: str = "image", *, max_pixels: int | None = None
) -> UInt8[np.ndarray, "Y X 3"]:
  """Returns RGB pixels unchanged.

  Raises:
    TypeError: the image is no array of uint8.
    ValueError: the image has another shape, is empty, or has over `max_pixels` pixels.
  """
  if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
    kind = getattr(image, "dtype", type(image).__name__)
    raise TypeError(
      f"{name} holds {kind}, expected an array of uint8 from 0 to 255: do not scale it "
      "before, and read files with open_image"
    )
  if image.ndim != 3 or image.shape[-1] != 3 or 0 in image.shape:
    raise ValueError(
      f"{name} has shape {image.shape}, expected [height, width, 3]: convert it to RGB "
      "with the channels last"
    )
  if max_pixels is not None:
    _check_size(name, image.shape[0], image.shape[1], max_pixels)
  return image


def _check_size(name: str, height: int, width: int, max_pixels: int) -> None:
  if not 0 < height * width <= max_pixels:
    raise _Refused(
      f"{name} has {width} x {height} pixels; expected 1 to {max_pixels} pixels. Make "
      "it smaller, or raise max_pixels"
    )


def _name(source: Any) -> str:
  """Returns the source as messages name it, without its data."""
  if isinstance(source, bytes):
    return f"image of {len(source)} bytes"
  if isinstance(source, str) and source.startswith("data:"):
    return f"data URI of {len(source)} characters"
  if isinstance(source, str | os.PathLike):
    return f"image {os.fspath(source)!r:.200}"
  return "image"


def _file(source: Any, name: str) -> contextlib.AbstractContextManager[Any]:
  """Opens the file of a source; a Pillow image is returned as it is."""
  if isinstance(source, str):
    if start := _DATA_URI.match(source):
      return io.BytesIO(_decoded(source[start.end() :], name))
    if re.match(r"data:|https?://", source, re.I) or len(source) > _LONGEST_PATH:
      raise ValueError(
        f"{name} is no path; expected a path or data:image/...;base64,... . Download "
        "what a URL names, and write base64 text as a data URI"
      )
  if isinstance(source, bytes):
    return io.BytesIO(source)
  if isinstance(source, str | os.PathLike):
    return open(source, "rb")
  if isinstance(source, pillow.module("Image").Image):
    return contextlib.nullcontext(source)
  raise TypeError(
    f"image is of type {type(source).__name__}; expected a path, a data URI, bytes, a "
    "Pillow image or an array"
  )


def _decoded(text: str, name: str) -> bytes:
  try:
    return base64.b64decode("".join(text.split()), validate=True)
  except (binascii.Error, ValueError) as error:
    raise ValueError(f"{name} is no base64 ({error}): encode the file again") from error


def _rgb(image: Any, name: str) -> UInt8[np.ndarray, "Y X 3"]:
  if image.mode.startswith("I;16"):
    gray = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=-1)
  if image.mode in ("I", "F"):
    raise _Refused(
      f"{name} has values of 32 bits (mode {image.mode!r}); expected 8 or 16 bits. "
      "Save it with 8 bits a channel"
    )
  if image.has_transparency_data:
    library, image = pillow.module("Image"), image.convert("RGBA")
    white = library.new("RGBA", image.size, "white")
    image = library.alpha_composite(white, image)
  return np.asarray(image.convert("RGB"))
