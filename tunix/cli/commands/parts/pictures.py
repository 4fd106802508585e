"""Images of the option `--image`, before the text of each prompt, and of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunix.cli.make import model_folders
from tunix.data import image_parts
from tunix.data.images import ImageReader
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.images.prompt_images import PromptImages


def prompts_with_images(
  folder: str, files: Sequence[str], texts: Sequence[str], tokenizer: TokenizerAdapter
) -> tuple[list[list[int]], list[PromptImages | None]]:
  """Returns the ids and the images of user turns with images before their text.

  Args:
    folder: folder of the model.
    files: image files; every turn gets all of them. At least one.
    texts: the text of each turn.
    tokenizer: a tokenizer with a chat template.

  Raises:
    ValueError: the model reads text only, or an image cannot be read.
  """
  reader = model_folders.image_reader(folder, True)
  if reader is None:
    raise ValueError(
      f"model is {folder}, which has no vision tower; expected a model that reads "
      "images. See docs/guides/images.md for the families, or leave --image out"
    )
  pictures = reader.open(files, None, "--image")
  out = []
  for text in texts:
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    turn = [{"role": "user", "content": parts}]
    rendered = tokenizer.apply_chat_template(turn)
    out.append(tokenizer.encode(reader.expand_text(pictures, rendered)))
  return out, [reader.prompt(pictures)] * len(texts)


def conversation(
  reader: ImageReader | None,
  messages: Sequence[Mapping[str, Any]],
  tokenizer: TokenizerAdapter,
) -> tuple[list[int], PromptImages | None]:
  """Returns the ids of a conversation, and its images.

  Args:
    reader: reader of the images; None: the model reads text alone.
    messages: messages, which may have parts {"type": "image", "image": file}.
    tokenizer: a tokenizer with a chat template.

  Raises:
    ValueError: an image cannot be read, or the model reads text alone.
  """
  sources = image_parts.sources(messages)
  if not sources:
    return tokenizer.apply_chat_template(messages, tokenize=True), None
  reader = reading(reader)
  pictures = reader.open(sources, None, "the conversation")
  rendered = tokenizer.apply_chat_template([*map(image_parts.bare, messages)])
  ids = tokenizer.encode(reader.expand_text(pictures, rendered))
  return ids, reader.prompt(pictures)


def reading(reader: ImageReader | None) -> ImageReader:
  """Returns the reader.

  Raises:
    ValueError: there is none.
  """
  if reader is None:
    raise ValueError(
      "the model reads text alone; expected one with a vision tower. Give --images if "
      "its folder has one (docs/guides/images.md lists the families)"
    )
  return reader
