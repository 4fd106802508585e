"""Records as rows of tokens, rendered when they are asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from tunix.data import render, rows, stored
from tunix.data.records import PAIRS, SFT, Kind
from tunix.data.render import Rendered
from tunix.data.rows import OneRow, Overlong, SideBySide
from tunix.generate.tokenizer_adapter import TokenizerAdapter

Unusable = Literal["error", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """What turns record `i` into what rows are made of.

  Attributes:
    records: dicts (see `tunix.data.records`), in memory or on disk.
    kind: what they are read as.
    tokenizer: encodes text and renders chats.
    layout: of the rows, with their lengths: OneRow for records of fine-tuning,
      SideBySide for the others.
    overlong: what happens to longer ones: "error", "truncate" (see `rows.fit_row` and
      `rows.fit_apart`) or "drop".
    unusable: what happens to an empty completion and to a chosen one that equals the
      rejected one, neither of which teaches: "error" or "drop".
    chat: whether plain prompts are user turns; None when there is a chat template.
    template_kwargs: further names for the chat template.
  """

  records: Sequence[Mapping[str, Any]]
  kind: Kind
  tokenizer: TokenizerAdapter
  layout: OneRow | SideBySide
  overlong: Overlong = "error"
  unusable: Unusable = "error"
  chat: bool | None = None
  template_kwargs: Mapping[str, Any] | None = None

  def __post_init__(self):
    for name, known in (("overlong", Overlong), ("unusable", Unusable)):
      if getattr(self, name) not in get_args(known):
        raise ValueError(
          f"{name} {getattr(self, name)!r} is unknown; use one of "
          f"{list(get_args(known))}"
        )
    if (self.kind is SFT) != isinstance(self.layout, OneRow):
      raise ValueError(
        f"records of the kind {self.kind.name!r} in the layout {self.layout}: those of "
        "fine-tuning go into OneRow, the others SideBySide"
      )
    if not len(self.records):
      raise ValueError("there are no records; give at least one")
    self.tokenizer.check_template_variables(
      self.template_kwargs or {}, "template_kwargs"
    )

  def __len__(self) -> int:
    return len(self.records)

  @property
  def pad_id(self) -> int:
    """Token id behind what a row holds."""
    return self.tokenizer.pad_id() or 0

  @property
  def stack(self) -> Callable[..., rows.Row]:
    """(elements, first, count) -> a batch of some of them."""
    if isinstance(self.layout, OneRow):
      return functools.partial(self.layout.stack, pad_id=self.pad_id)
    return functools.partial(
      self.layout.stack, names=self.kind.completions, pad_id=self.pad_id
    )

  def where(self, index: int) -> str:
    """The place of record `index`, for messages."""
    return stored.place(self.records, index)

  def render(self, index: int) -> Rendered:
    """Record `index` in full.

    Raises:
      ValueError: the record is malformed or trains nothing; names its place.
    """
    return render.render_record(
      self.records[index],
      self.kind,
      self.tokenizer,
      where=self.where(index),
      chat=self.chat,
      template_kwargs=self.template_kwargs,
    )

  def fit(self, rendered: Rendered, index: int) -> Rendered | None:
    """The same within the lengths, None when it is dropped.

    Raises:
      ValueError: it is longer and `overlong` is "error"; names the record's place.
    """
    try:
      return self.layout.fit(rendered, self.overlong, self.tokenizer.bos_id())
    except ValueError as error:
      raise ValueError(f"{self.where(index)}: {error}") from error

  def fault(self, rendered: Rendered, fitted: Rendered, index: int) -> str | None:
    """Why a record teaches nothing: "empty", "equal" or None.

    Raises:
      ValueError: it teaches nothing and `unusable` is "error"; names its place.
    """
    why, what = None, ""
    if rendered.empty:
      name = rendered.empty[0]
      # Files of fine-tuning call it "response", or have it as a message.
      which = f'"{name}"' if name in self.records[index] else "the answer"
      why, what = "empty", f"{which} is empty"
    elif self.kind is PAIRS and render.are_equal(fitted):
      why, what = "equal", '"chosen" and "rejected" are equal'
      if not render.are_equal(rendered):
        what += f" in their first {len(fitted.completions[0])} tokens"
    if why and self.unusable == "error":
      raise ValueError(
        f"{self.where(index)}: {what}, which teaches nothing; correct the record, or "
        'set unusable to "drop"'
      )
    return why

  def element(self, index: int) -> Any | None:
    """Record `index` as what rows are made of, None when it is dropped.

    Raises:
      ValueError: see `render`, `fit` and `fault`.
    """
    rendered = self.render(index)
    fitted = self.fit(rendered, index)
    if fitted is None or self.fault(rendered, fitted, index):
      return None
    return self.layout.element(fitted)

  def none_left(self, looked_at: int | None = None) -> str:
    """What is said when every record is dropped."""
    which = f"{len(self)} records"
    if looked_at is not None:
      which = f"{looked_at} records looked at"
    return (
      f"all {which} are {self.layout.words(self.kind.completions)} and were dropped; "
      "raise the length or set overlong to 'truncate'"
    )
