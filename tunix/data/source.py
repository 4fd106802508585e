"""Records as examples, rendered when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.data import chat, examples, formats, packing
from tunix.generate.tokenizer_adapter import TokenizerAdapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleSource:
  """What turns record `i` into an example of at most `max_length` tokens.

  Attributes:
    records: dicts (see `tunix.data.formats`), in memory or on disk.
    tokenizer: encodes text and renders chats.
    max_length: longest example, tokens.
    overlong: what happens to longer ones: "error", "truncate" or "drop".
    chat: whether plain prompts are user turns; None when there is a chat template.
    template_kwargs: further names for the chat template.
  """

  records: Sequence[Mapping[str, Any]]
  tokenizer: TokenizerAdapter
  max_length: int
  overlong: examples.Overlong = "error"
  chat: bool | None = None
  template_kwargs: Mapping[str, Any] | None = None

  def __post_init__(self):
    examples.check_policy(self.max_length, self.overlong)
    if not len(self.records):
      raise ValueError("there are no records; give at least one")
    self.tokenizer.check_template_variables(
      self.template_kwargs or {}, "template_kwargs"
    )

  def __len__(self) -> int:
    return len(self.records)

  def where(self, index: int) -> str:
    """The place of record `index`, for messages."""
    return formats.place(self.records, index)

  def render(self, index: int) -> examples.Example:
    """Record `index` in full.

    Raises:
      ValueError: the record cannot be trained on; names its place.
    """
    return chat.render(
      self.records[index],
      self.tokenizer,
      where=self.where(index),
      chat=self.chat,
      template_kwargs=self.template_kwargs,
    )

  def fit(self, example: examples.Example, index: int) -> examples.Example | None:
    """The example at most `max_length` long, None when it is dropped.

    Raises:
      ValueError: it is longer and `overlong` is "error"; names the record's place.
    """
    bos = self.tokenizer.bos_id()
    try:
      return examples.fit(example, self.max_length, self.overlong, bos_id=bos)
    except ValueError as error:
      raise ValueError(f"{self.where(index)}: {error}") from error

  def element(self, index: int) -> packing.Row | None:
    """Record `index` as what packing starts from, None when it is dropped.

    Raises:
      ValueError: see `render` and `fit`.
    """
    example = self.fit(self.render(index), index)
    return None if example is None else packing.to_element(example)

  def none_left(self) -> str:
    """What is said when every record is dropped."""
    return (
      f"all {len(self)} records are longer than {self.max_length} tokens and were "
      "dropped; raise max_length or set overlong to 'truncate'"
    )
