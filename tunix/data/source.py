"""A source: records with the settings that convert each record to a batch element."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from tunix.data import render
from tunix.data.batching.prompts import PromptText
from tunix.data.chat import Rendered
from tunix.data.images import ImageReader
from tunix.data.reading import stored
from tunix.data.reading.stream import Streamed
from tunix.data.records import PAIRS, PROMPT_ROWS, SFT, Kind
from tunix.data.rows import OneRow, Overlong, SideBySide
from tunix.data.turns.reasoning import Reasoning
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils.setting import named_values

Unusable = Literal["error", "drop"]
Layout = OneRow | SideBySide | PromptText


def layout_type(kind: Kind) -> type[Layout]:
  """Returns the class of the layout that records of a kind need."""
  if kind is SFT:
    return OneRow
  return PromptText if kind is PROMPT_ROWS else SideBySide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """Records, and the settings of their rendering and layout.

  Attributes:
    records: dicts (see `tunix.data.records`), in memory or on disk; or a stream, whose
      items the methods take in place of record numbers.
    kind: kind that the records are read as.
    tokenizer: tokenizer with the chat template.
    layout: layout of the rows: OneRow for SFT, PromptText for PROMPT_ROWS, SideBySide
      for all other kinds.
    overlong: treatment of records that are too long: "error", "truncate" (see
      `rows.fit_row` and `rows.fit_apart`) or "drop".
    unusable: treatment of empty completions, and of a chosen completion that equals the
      rejected one: "error" or "drop". Neither has a useful gradient.
    chat: True treats plain-text prompts as user turns of a chat. None does so if the
      tokenizer has a chat template.
    template_kwargs: further variables of the chat template.
    reasoning: treatment of trained turns that reason under a template that turns
      reasoning off: "error", "strip" (trains the answer alone) or "keep". If "strip"
      leaves nothing of an answer, it is an empty completion, and a record of
      fine-tuning is left out.
    images: reads the images of records; None refuses records with images.
    image_tokens: largest number of image tokens of a row, which decides how many pixels
      each row has. 0: rows have no field `images`. None: as many as a row, or a prompt
      beside its completions, has tokens. Unused for PROMPT_ROWS, which
      keep paths and data URIs.
  """

  records: Sequence[Mapping[str, Any]] | Streamed
  kind: Kind
  tokenizer: TokenizerAdapter
  layout: Layout
  overlong: Overlong = "error"
  unusable: Unusable = "error"
  chat: bool | None = None
  template_kwargs: Mapping[str, Any] | None = None
  reasoning: Reasoning = "error"
  images: ImageReader | None = None
  image_tokens: int | None = None

  def __post_init__(self):
    choices = {"overlong": Overlong, "unusable": Unusable, "reasoning": Reasoning}
    for name, value in named_values(self, choices).items():
      if value not in (known := get_args(choices[name])):
        raise ValueError(f"{name} {value!r} is unknown; use one of {list(known)}")
    needed = layout_type(self.kind)
    if not isinstance(self.layout, needed):
      raise ValueError(
        f"layout is {self.layout}; expected {needed.__name__} for records of the kind "
        f"{self.kind.name!r}"
      )
    if not isinstance(self.records, Streamed) and not len(self.records):
      raise ValueError("records is empty; give at least one record")
    self.tokenizer.check_template_variables(
      self.template_kwargs or {}, "template_kwargs"
    )

  def __len__(self) -> int:
    if isinstance(self.records, Streamed):
      raise TypeError(f"{self.records.name} is a stream and has no length")
    return len(self.records)

  @property
  def has_images(self) -> bool:
    """True if rows have the field `images`."""
    is_rows = self.kind is not PROMPT_ROWS
    return self.images is not None and is_rows and self.image_tokens != 0

  @property
  def pad_id(self) -> int:
    """Token id of padding."""
    return self.tokenizer.pad_id() or 0

  @property
  def stack(self) -> Callable[..., dict[str, Any]]:
    """(elements, first=, count=) -> a batch of a range of the elements."""
    return functools.partial(
      self.layout.stack, names=self.kind.completions, pad_id=self.pad_id
    )

  def where(self, index: object) -> str:
    """Returns the place of record `index`, for messages."""
    return stored.place(self.records, index)

  def render(self, index: Any) -> Rendered:
    """Returns all tokens of record `index`.

    Raises:
      ValueError: the record is malformed or trains no token; names its place.
    """
    return render.render_record(
      self.records[index],
      self.kind,
      self.tokenizer,
      where=self.where(index),
      chat=self.chat,
      template_kwargs=self.template_kwargs,
      reasoning=self.reasoning,
      images=self.images,
      folder=stored.folder(self.records, index),
    )

  def fit(self, rendered: Rendered, index: object) -> Rendered | None:
    """Returns record `index` within the lengths of the layout, None if it is dropped.

    Raises:
      ValueError: the record is longer and `overlong` is "error"; names its place.
    """
    try:
      fitted = self.layout.fit(rendered, self.overlong, self.tokenizer.bos_id())
      if self.images is not None and fitted is not None:
        if rendered.pictures or self.has_images:
          tokens = np.concatenate([fitted.prompt, *fitted.completions])
          self.images.check(tokens, rendered.pictures)
        if fitted is not rendered:
          fitted = fitted._replace(pictures=rendered.pictures)
      return fitted
    except ValueError as error:
      tokens = sum(picture.num_tokens for picture in rendered.pictures)
      more = f" ({tokens} of the tokens are of images)" if tokens else ""
      raise ValueError(f"{self.where(index)}: {error}{more}") from error

  def fault(self, rendered: Rendered, fitted: Rendered, index: Any) -> str | None:
    """Returns why a record is unusable: "empty", "equal" or None.

    Args:
      rendered: all tokens of the record.
      fitted: its tokens within the lengths; cutting may make two completions equal.
      index: number of the record.

    Raises:
      ValueError: the record is unusable and `unusable` is "error"; names its place.
    """
    fault, problem = None, ""
    if rendered.empty:
      name = self.kind.completions[rendered.empty[0]]
      # Fine-tuning records have the field "response", or the answer is a message, so
      # the name of the completion may not be a field of the record.
      field = f'"{name}"' if name in self.records[index] else "the answer"
      fault, problem = "empty", f"{field} is empty"
    elif self.kind is PAIRS and render.are_equal(fitted):
      fault, problem = "equal", '"chosen" and "rejected" are equal'
      if not render.are_equal(rendered):
        problem += f" in their first {len(fitted.completions[0])} tokens"
    # In fine-tuning only "strip" makes an answer empty, and leaves its record out.
    if fault and self.unusable == "error" and self.kind is not SFT:
      raise ValueError(
        f"{self.where(index)}: {problem}, so that training on it has no effect; "
        'correct the record, or set unusable to "drop"'
      )
    return fault

  def element(self, index: object) -> Any | None:
    """Returns record `index` as an element of a batch, None if it is dropped.

    Raises:
      ValueError: as for `render`, `fit` and `fault`.
    """
    rendered = self.render(index)
    fitted = self.fit(rendered, index)
    if fitted is None or self.fault(rendered, fitted, index):
      return None
    if self.images is not None and self.has_images:
      assert not isinstance(self.layout, PromptText)
      limit = self.image_tokens or self._prompt_limit
      tokens = sum(picture.num_tokens for picture in fitted.pictures)
      if tokens > limit:
        raise ValueError(
          f"{self.where(index)}: the record has {tokens} image tokens and image_tokens "
          f"is {limit}; expected at most as many. Raise image_tokens"
        )
      return self.layout.element(fitted, self.images.row(fitted.pictures, limit))
    if fitted.pictures and self.kind is not PROMPT_ROWS:
      raise ValueError(
        f"{self.where(index)}: the record has images, and the records that were "
        "scanned at the start have none; expected images in them too, because all rows "
        "of a run have one form. Move a record with images to the start of the data"
      )
    return self.layout.element(fitted)

  @property
  def _prompt_limit(self) -> int:
    """Largest number of tokens that may be of images."""
    if isinstance(self.layout, SideBySide):
      return self.layout.max_prompt_length
    assert isinstance(self.layout, OneRow)
    return self.layout.max_length

  def none_left(self, scanned: int | None = None) -> str:
    """Returns the error message for a source whose records are all dropped.

    Args:
      scanned: number of records that were scanned; None for all.
    """
    what, count = ("", len(self)) if scanned is None else ("scanned ", scanned)
    which = (
      f"the only {what}record is" if count == 1 else f"all {count} {what}records are"
    )
    nothing = "nothing but reasoning, or " if self.reasoning == "strip" else ""
    why = self.layout.why_dropped(self.kind.completions)
    return f"{which} {nothing}{why}"
