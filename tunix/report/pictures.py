"""Small pictures of image files, for pages that hold everything they show."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

from tunix.models.images import opening, pillow

_EDGE = 160  # pixels of the longer edge
_MOST = 4  # pictures of a group


def shown(names: Any) -> list[str]:
  """Returns data URIs of image files; files that cannot be read are left out.

  Args:
    names: the column of images of a group, as samples hold it; anything else has none.
  """
  if not isinstance(names, list):
    return []
  paths = [x for x in names if isinstance(x, str) and os.path.isfile(x)]
  return [uri for path in paths[:_MOST] if (uri := _data_uri(path)) is not None]


def _data_uri(path: str) -> str | None:
  try:
    levels = opening.open_image(path)
  except (ImportError, OSError, ValueError):  # no Pillow, gone, or damaged since
    return None
  picture = pillow.module("Image").fromarray(levels)
  picture.thumbnail((_EDGE, _EDGE))
  file = io.BytesIO()
  picture.save(file, "PNG")
  return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
