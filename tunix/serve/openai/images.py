"""Images in the messages of a chat request: data URIs, decoded within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tunix.data.images import Picture
from tunix.models.images import opening
from tunix.serve.http.bodies import Call
from tunix.serve.http.errors import bad
from tunix.serve.http.fields import shown
from tunix.serve.openai.context import Context

Messages = Sequence[dict[str, Any]]


def read_size(call: Call) -> float:
  """Returns the bytes of a request's body, or infinity if it has images.

  An image of few bytes can have many pixels, so such a request is a long one.
  """
  messages = call.body.get("messages")
  contents = [
    message.get("content")
    for message in (messages if isinstance(messages, list) else [])
    if isinstance(message, dict)
  ]
  parts = [part for c in contents if isinstance(c, list) for part in c]
  is_image = (isinstance(p, dict) and p.get("type") == "image_url" for p in parts)
  return math.inf if any(is_image) else call.size


def read_images(
  messages: Messages, context: Context
) -> tuple[list[dict[str, Any]], list[Picture]]:
  """Decodes the images of messages.

  Returns:
    The messages as chat templates read them, and the images in their order.

  Raises:
    ApiError: 400 if the model reads text only, an image is no data URI, damaged, or too
      large, or all of them have more pixels or tokens than the server takes.
  """
  bare, pictures = [], []
  pixels, tokens = context.settings.max_image_pixels, context.max_tokens
  for i, message in enumerate(messages):
    content = message.get("content")
    if not isinstance(content, list):
      bare.append(message)
      continue
    parts = []
    for j, part in enumerate(content):
      if part["type"] != "image_url":
        parts.append(part)
        continue
      name = f"messages[{i}].content[{j}]"
      picture = _open(part, name, context, pixels)
      pixels -= picture.image.shape[0] * picture.image.shape[1]
      tokens -= picture.num_tokens
      if tokens < 0:
        raise bad(
          name,
          f"{name}: this image and those before it have more than {context.max_tokens} "
          "tokens, the maximum context length of this server (--max_tokens). Send "
          "fewer or smaller images",
          "context_length_exceeded",
        )
      pictures.append(picture)
      parts.append({"type": "image"})
    bare.append({**message, "content": parts})
  return bare, pictures


def _open(part: dict[str, Any], name: str, context: Context, pixels: int) -> Picture:
  """Decodes the image of a part of at most `pixels` pixels."""
  if context.images is None:
    raise bad(
      name,
      f"{name} is an image, expected a part of type text: this model reads text only",
      "unsupported_parameter",
    )
  image = part.get("image_url")
  url = image.get("url") if isinstance(image, dict) else None
  # A path would read a file of the server, and a URL its network.
  if not isinstance(url, str) or url[:5].lower() != "data:":
    raise bad(
      name,
      f"{name}.image_url.url is {shown(url)}, expected data:image/...;base64,... : "
      "this server opens no URLs and no files. Send the bytes of the file as a data "
      "URI",
      "invalid_image",
    )
  try:
    levels = opening.open_image(url, max_pixels=pixels)
    return context.images.open([levels], None, name)[0]
  except ValueError as error:
    raise bad(
      name,
      f"{name}: {error}. The images of a request have at most "
      f"{context.settings.max_image_pixels} pixels together (--max_image_pixels)",
      "invalid_image",
    ) from error
