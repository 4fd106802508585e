"""Images in the messages of a record.

A content with images is a list of parts {"type": "text", "text": ...} and {"type":
"image", "image": ...}. The image is a path, a data URI, bytes, or an object that
`tunix.models.images.opening.open_image` reads. `gathered` makes this form of:

  OpenAI   {"type": "image_url", "image_url": {"url": "data:..."}}
  TRL      {"type": "image"} in the messages, and the images in a column "images"
  LLaVA    "<image>" in the text, and the images in a column "image" or "images"

Completions that are whole conversations repeat the placeholders of the prompt, which
stand for the same images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = ("images", "image")
_MARK = "<image>"
# Columns that may repeat the prompt.
_COMPLETIONS = ("chosen", "rejected", "completion")
# Keys of a part that hold its image, in order of preference.
_SOURCES = ("image", "path", "url")

Part = dict[str, Any]


def gathered(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
  """Returns a record whose messages hold their images; others are returned unchanged.

  Args:
    record: a record in our own form.
    where: place of the record, for messages.

  Raises:
    ValueError: the numbers of placeholders and of images in the columns differ.
  """
  names = [name for name in COLUMNS if record.get(name) is not None]
  given = [image for name in names for image in _listed(record[name])]
  if not given and not any(map(_has_parts, record.values())):
    return record
  # Placeholders of the prompt, and those of each completion.
  waiting: dict[str, list[Part]] = {name: [] for name in ("", *_COMPLETIONS)}
  changed: dict[str, Any] = {}
  for name, column in record.items():
    value: Any = column
    is_prompt = name in ("prompt", "prompts")
    if is_prompt and isinstance(value, str) and given and _MARK in value:
      value = [{"role": "user", "content": value}]
    if _has_messages(value):
      turns: list[Any] = list(value)
      value = [_with_parts(turn, bool(given)) for turn in turns]
      places = [part for turn in value for part in _empty(turn.get("content"))]
      waiting[name if name in _COMPLETIONS else ""] += places
    if name not in names:
      changed[name] = value
  for places in [x for x in waiting.values() if x] or [[]]:
    if len(places) != len(given):
      raise ValueError(
        f"{where}: {len(places)} placeholders of images and {len(given)} images in "
        f"{' and '.join(map(repr, names)) or 'the columns'}; expected equal numbers. "
        f'Put {{"type": "image"}} into the messages, or {_MARK} into the text, for '
        'each image of a column. Without a column, give each part its "image"'
      )
    for part, image in zip(places, given, strict=True):
      part["image"] = image
  return changed


def has_places(prompt: Any) -> bool:
  """Returns True if a text or messages have an image or a placeholder of one."""
  if not _has_messages(prompt):
    return isinstance(prompt, str) and _MARK in prompt
  contents = [turn.get("content") for turn in prompt]
  return any(
    _MARK in content if isinstance(content, str) else any(map(_is_image, content or ()))
    for content in contents
  )


def parts(message: Mapping[str, Any]) -> Iterator[Part]:
  """Yields the parts of a message that are images."""
  content = message.get("content")
  if isinstance(content, list | tuple):
    yield from (part for part in content if part["type"] == "image")


def sources(*texts: str | Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns the images of texts or lists of messages, in order."""
  messages = [turn for text in texts if not isinstance(text, str) for turn in text]
  return [part["image"] for turn in messages for part in parts(turn)]


def bare(message: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a message as chat templates read it: its images are {"type": "image"}."""
  if not any(parts(message)):
    return message
  content = [
    {"type": "image"} if part["type"] == "image" else part
    for part in message["content"]
  ]
  return {**message, "content": content}


def outline(value: Any) -> Any:
  """Returns messages in any form without the data of their images, for measuring."""
  if isinstance(value, list | tuple):
    return [outline(turn) if isinstance(turn, Mapping) else turn for turn in value]
  content = value.get("content") if isinstance(value, Mapping) else None
  if not isinstance(content, list | tuple):
    return value
  bare = [{"type": "image"} if _is_image(part) else part for part in content]
  return {**value, "content": bare}


def named(value: Any) -> Any:
  """Returns a text or messages whose images are their names, for people to read."""
  if not _has_messages(value):
    return value
  return [
    turn
    if not any(parts(turn))
    else {
      **turn,
      "content": [
        {**part, "image": name(part["image"])} if part["type"] == "image" else part
        for part in turn["content"]
      ],
    }
    for turn in value
  ]


def shown(column: str, value: Any) -> Any:
  """Returns a value of a column; images are their names, other values unchanged."""
  if column not in COLUMNS or not isinstance(value, list):
    return named(value)
  return [name(x) if isinstance(x, str | bytes) else x for x in value]


def surrounded(parts: Sequence[Part], before: str, after: str) -> list[Part]:
  """Returns the parts of a message with texts around them.

  Adjacent texts become one part: templates may strip each part.
  """
  out = [dict(part) for part in parts]
  for text, place in ((before, 0), (after, -1)):
    if out[place]["type"] != "text":
      out.insert(place if place == 0 else len(out), {"type": "text", "text": ""})
    have = out[place]["text"]
    out[place]["text"] = text + have if place == 0 else have + text
  return [part for part in out if part.get("text") != ""]


def name(source: Any) -> str:
  """Returns an image as reports name it: a path, or the kind of its data."""
  if isinstance(source, Mapping):
    return name(source.get("path") or source.get("bytes"))
  if isinstance(source, str):
    return "data URI" if source[:5].lower() == "data:" else source
  return f"{len(source)} bytes" if isinstance(source, bytes) else type(source).__name__


def _listed(value: Any) -> Sequence[Any]:
  return value if isinstance(value, list | tuple) else [value]


def _has_messages(value: object) -> bool:
  return (
    isinstance(value, list)
    and bool(value)
    and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
  )


def _has_parts(value: Any) -> bool:
  return _has_messages(value) and any(
    isinstance(turn.get("content"), list) for turn in value
  )


def _with_parts(turn: Mapping[str, Any], splits: bool) -> dict[str, Any]:
  """Returns a message with parts in one form.

  Args:
    turn: the message.
    splits: "<image>" in a text stands for an image.
  """
  content = turn.get("content")
  if isinstance(content, list):
    new = [_part(part) for part in content]
  elif splits and isinstance(content, str) and _MARK in content:
    new = []
    for number, text in enumerate(content.split(_MARK)):
      new += [{"type": "image"}] * bool(number)
      new += [{"type": "text", "text": text}] * bool(text)
  else:
    return dict(turn)
  return {**turn, "content": new}


def _is_image(part: Any) -> bool:
  return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _part(part: Any) -> Any:
  if not _is_image(part):
    return part
  image = part.get("image_url")
  if isinstance(image, Mapping):
    image = image.get("url")
  found = (part[key] for key in _SOURCES if part.get(key) is not None)
  image = next(found, image)
  return {"type": "image"} | ({} if image is None else {"image": image})


def _empty(content: object) -> list[Part]:
  """Returns the parts of a content that are placeholders."""
  if not isinstance(content, list):
    return []
  return [p for p in content if isinstance(p, dict) and p == {"type": "image"}]
