"""Images of records: opened, written as soft tokens, and turned into pixels.

An image is decoded in the input pipeline each time its record is drawn, and never kept.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from tunix.data import image_parts
from tunix.data.turns.trained_spans import Segment
from tunix.models.images import opening, pillow
from tunix.models.images.processor import Processor
from tunix.models.images.prompt_images import PromptImages

_FILES = ("processor_config.json", "preprocessor_config.json")


class Picture(NamedTuple):
  """One image of a record.

  Attributes:
    name: path of the image, or the kind of its data.
    image: RGB pixels.
    grid: the processor's grid of the image.
    num_tokens: number of its soft tokens.
  """

  name: str
  image: UInt8[np.ndarray, "Y X 3"]
  grid: tuple[int, ...]
  num_tokens: int

  def __str__(self) -> str:
    height, width = self.image.shape[:2]
    return f"{self.name}, {width} x {height} pixels, {self.num_tokens:,} tokens"


class ImageReader:
  """Reads the images of records for a model with a vision tower.

  The files of the folder are read with the first image, so that texts need neither
  these files nor Pillow.

  Args:
    folder: folder with the processor's files, usually that of the model.
    config: configuration of the model, a `VisionLanguageConfig`.
    max_pixels: largest accepted height times width of an image.

  Raises:
    TypeError: the configuration is that of a text model.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    config: Any,
    *,
    max_pixels: int = opening.MAX_PIXELS,
  ):
    if not hasattr(config, "image_sizes"):
      raise TypeError(
        f"config is a {type(config).__module__}.{type(config).__name__}; expected that "
        "of a model with a vision tower. Load the model with images=True"
      )
    self.folder, self.max_pixels = pathlib.Path(folder), max_pixels
    # The ids of tokens whose embeddings are replaced by vectors of images.
    self.soft_token = config.soft_token
    self._sizes = config.image_sizes

  def __repr__(self) -> str:  # Grain saves this text in the state of a loader
    return f"ImageReader({self.fingerprint})"

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 of the processor's files, and the limit of pixels."""
    files = [self.folder / name for name in _FILES]
    contents = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(repr((contents, self.max_pixels)).encode()).hexdigest()

  @functools.cached_property
  def processor(self) -> Processor:
    """The image processor of the folder.

    Raises:
      FileNotFoundError, ImportError: the folder has no files of a processor, or Pillow
        is not installed.
      ValueError: the processor is not offered, or makes images of another size than the
        tower reads.
    """
    # It imports JAX, which texts do not need.
    from tunix.models.images.folder import read_processor

    processor = read_processor(self.folder)
    if processor.sizes != self._sizes:
      raise ValueError(
        f"the image processor of {self.folder} has the sizes {processor.sizes} and the "
        f"vision tower {self._sizes} (pixels of an edge, tokens); expected "
        f"equal ones. Copy {' and '.join(_FILES)} from the model's original folder"
      )
    return processor

  def open(
    self, sources: Sequence[Any], folder: pathlib.Path | None, where: str
  ) -> tuple[Picture, ...]:
    """Opens the images of a record.

    Args:
      sources: the images, see `image_parts.sources`.
      folder: folder that relative paths begin in; None: the working directory.
      where: place of the record.

    Raises:
      ImportError: Pillow is not installed.
      ValueError: an image is missing, damaged, too large, or of a shape that the model
        cannot take; begins with `where`.
    """
    pictures = []
    for number, source in enumerate(sources, start=1):
      try:
        image = opening.open_image(_located(source, folder), max_pixels=self.max_pixels)
        grid = self.processor.grid(*image.shape[:2])
      except (OSError, ValueError, TypeError) as error:
        problem = error
        if isinstance(error, FileNotFoundError) and error.filename is not None:
          problem = f"there is no file {os.fspath(error.filename)!r}; correct the path"
        raise ValueError(f"{where}: image {number}: {problem}") from error
      tokens = self.processor.num_tokens(grid)
      pictures.append(Picture(image_parts.name(source), image, grid, tokens))
    return tuple(pictures)

  def expand(
    self, pictures: Sequence[Picture], segments: Sequence[Segment]
  ) -> list[Segment]:
    """Replaces the placeholders of a rendered chat by the text of the images.

    Raises:
      ValueError: the chat has another number of placeholders, or trains one.
    """
    mark = re.escape(self.processor.PLACEHOLDER)
    count = sum(len(re.findall(mark, segment.text)) for segment in segments)
    trained = any(re.search(mark, s.text) for s in segments if s.trained)
    if count != len(pictures) or trained:
      place = "a trained answer" if trained else "the chat"
      raise ValueError(
        f"{place} has {count} times {self.processor.PLACEHOLDER!r} for {len(pictures)} "
        "images; expected one for each, in the turns of the user. Use the template of "
        "the model with images, and leave this text out of the records"
      )
    texts = (self.processor.text(picture.grid) for picture in pictures)
    return [
      Segment(re.sub(mark, lambda _: next(texts), s.text), s.trained) for s in segments
    ]

  def expand_text(self, pictures: Sequence[Picture], text: str) -> str:
    """Replaces the placeholders of a rendered prompt, see `expand`."""
    return self.expand(pictures, [Segment(text, False)])[0].text

  def check(self, tokens: np.ndarray, pictures: Sequence[Picture]) -> None:
    """Refuses a row whose soft tokens are not those of its images.

    Args:
      tokens: token ids [T].
      pictures: images of the row.

    Raises:
      ValueError: the numbers differ.
    """
    found = int(np.sum(tokens == self.soft_token))
    expected = sum(picture.num_tokens for picture in pictures)
    if found != expected:
      raise ValueError(
        f"the row has {found} image tokens (id {self.soft_token}), and its "
        f"{len(pictures)} images need {expected}; expected equal numbers. Use the "
        "model's own tokenizer, leave texts of image tokens out, and do not cut rows "
        "within images (raise the largest length, or set overlong to 'drop')"
      )

  def row(self, pictures: Sequence[Picture], max_tokens: int) -> Any:
    """Returns the argument `images` of the model for one row, see `Processor.row`."""
    pixels = [self.processor(picture.image) for picture in pictures]
    return self.processor.row(pixels, max_tokens)

  def prompt(
    self, pictures: Sequence[Picture], max_tokens: int | None = None
  ) -> PromptImages | None:
    """Returns the images of a prompt for a sampler, see `PromptImages.of`, or None."""
    if not pictures:
      return None
    pixels = [self.processor(picture.image) for picture in pictures]
    return PromptImages.of(self.processor, pixels, max_tokens)


def reference(source: Any, image: UInt8[np.ndarray, "Y X 3"], folder: Any) -> str:
  """Returns an image as text, which JSON can hold: an absolute path or a data URI.

  Args:
    source: the image of a record.
    image: its pixels, which are written as PNG if the source is no file.
    folder: see `ImageReader.open`.
  """
  source = _located(source, folder)
  if isinstance(source, str) and re.match("data:", source, re.I):
    return source
  if isinstance(source, str | os.PathLike):
    return os.path.abspath(source)
  if not isinstance(source, bytes):
    file = io.BytesIO()
    pillow.module("Image").fromarray(image).save(file, "PNG")
    source = file.getvalue()
  return f"data:;base64,{base64.b64encode(source).decode()}"


def _located(source: Any, folder: pathlib.Path | None) -> Any:
  """Returns an image with its path made absolute."""
  if isinstance(source, Mapping):  # a cell of the type Image of `datasets`
    source = source.get("bytes") or source.get("path")
  is_text = isinstance(source, str) and not re.match(r"data:|https?://", source, re.I)
  if folder is None or not is_text:
    return source
  return str(folder / pathlib.Path(source).expanduser())
