"""Thumbnails of image files for self-contained report pages."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

from tunix.models.images import opening, pillow

_EDGE = 160  # pixels of the longer edge
_MAX_PICTURES = 4  # pictures of a group


def thumbnails(names: Any) -> list[str]:
  """Returns data URIs of thumbnails of the first 4 image files that exist.

  Data URIs and unreadable files are left out.

  Args:
    names: list of paths and data URIs, the column of images of a group of samples;
      other types return an empty list.
  """
  if not isinstance(names, list):
    return []
  paths = [x for x in names if isinstance(x, str) and os.path.isfile(x)]
  return [uri for path in paths[:_MAX_PICTURES] if (uri := _data_uri(path)) is not None]


def _data_uri(path: str) -> str | None:
  try:
    levels = opening.open_image(path)
  except (ImportError, OSError, ValueError):
    return None  # Pillow is missing, or the file was deleted or damaged.
  picture = pillow.module("Image").fromarray(levels)
  picture.thumbnail((_EDGE, _EDGE))
  file = io.BytesIO()
  picture.save(file, "PNG")
  return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
