"""Preference records as rows of tokens, rendered when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from tunix.data import answer_formats, answers, formats
from tunix.data.answers import Answered
from tunix.data.examples import Overlong
from tunix.generate.tokenizer_adapter import TokenizerAdapter

Kind = Literal["pair", "labelled", "answered", "prompt"]
Unusable = Literal["error", "drop"]
Row = dict[str, Any]

_READ = {
  "pair": answer_formats.read_pair,
  "labelled": answer_formats.read_labelled,
  "answered": answer_formats.read_answered,
  "prompt": answer_formats.read_prompt,
}
NAMES = {
  "pair": ("chosen", "rejected"),
  "labelled": ("completion",),
  "answered": ("response",),
  "prompt": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
  """A record as tokens.

  Attributes:
    answered: in full.
    extra: margin or label.
    empty: names of responses that say nothing.
  """

  answered: Answered
  extra: Mapping[str, float | bool]
  empty: tuple[str, ...]


def render_record(
  record: Mapping[str, Any],
  kind: Kind,
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
  """A record of `tunix.data.answer_formats` as tokens; see `answers.tokenise`.

  Raises:
    ValueError: the record is malformed; begins with `where`.
  """
  read = _READ[kind](record, where)
  variables = dict(template_kwargs or {})
  if read.tools is not None:
    variables["tools"] = read.tools
  answered = answers.tokenise(
    read.prompt,
    [read.responses[name] for name in NAMES[kind]],
    tokenizer,
    where=where,
    chat=chat,
    template_kwargs=variables,
  )
  empty = (n for n in NAMES[kind] if answer_formats.is_empty(read.responses[n]))
  return Rendered(answered=answered, extra=read.extra, empty=tuple(empty))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSource:
  """What turns record `i` into a row of tokens within the limits.

  Attributes:
    records: dicts (see `tunix.data.answer_formats`), in memory or on disk.
    kind: "pair"; "labelled" or "answered" for single responses; "prompt" for none.
    tokenizer: encodes text and renders chats.
    max_prompt_length, max_response_length: in tokens.
    overlong: what happens to longer ones: "error", "truncate" (see `answers.fit`) or
      "drop".
    unusable: what happens to an empty response and to a chosen response that equals the
      rejected one, neither of which teaches: "error" or "drop".
    chat: whether plain prompts are user turns; None when there is a chat template.
    template_kwargs: further names for the chat template.
    keys: what messages call the attributes above, where they come from settings of
      other names; "" for what cannot be set.
  """

  records: Sequence[Mapping[str, Any]]
  kind: Kind
  tokenizer: TokenizerAdapter
  max_prompt_length: int
  max_response_length: int
  overlong: Overlong = "error"
  unusable: Unusable = "error"
  chat: bool | None = None
  template_kwargs: Mapping[str, Any] | None = None
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for name in ("max_prompt_length", "max_response_length"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} {getattr(self, name)} must be at least 1 token")
    for name, known in (("kind", Kind), ("overlong", Overlong), ("unusable", Unusable)):
      if getattr(self, name) not in get_args(known):
        raise ValueError(
          f"{name} {getattr(self, name)!r} is unknown; use one of {get_args(known)}"
        )
    if not len(self.records):
      raise ValueError("there are no records; give at least one")
    self.tokenizer.check_template_variables(
      self.template_kwargs or {}, "template_kwargs"
    )

  def __len__(self) -> int:
    return len(self.records)

  @property
  def names(self) -> tuple[str, ...]:
    """Of the responses of a record."""
    return NAMES[self.kind]

  def key(self, attribute: str) -> str:
    """What messages call an attribute."""
    return self.keys.get(attribute, attribute)

  def where(self, index: int) -> str:
    """The place of record `index`, for messages."""
    return formats.place(self.records, index)

  def render(self, index: int) -> Rendered:
    """Record `index` in full.

    Raises:
      ValueError: the record is malformed; names its place.
    """
    return render_record(
      self.records[index],
      self.kind,
      self.tokenizer,
      where=self.where(index),
      chat=self.chat,
      template_kwargs=self.template_kwargs,
    )

  def fit(self, answered: Answered, index: int) -> Answered | None:
    """The same within the limits, None when it is dropped.

    Raises:
      ValueError: it is longer and `overlong` is "error"; names the record's place.
    """
    try:
      return answers.fit(
        answered,
        max_prompt_length=self.max_prompt_length,
        max_response_length=self.max_response_length,
        overlong=self.overlong,
        bos_id=self.tokenizer.bos_id(),
        keys=self.keys,
      )
    except ValueError as error:
      raise ValueError(f"{self.where(index)}: {error}") from error

  def fault(self, rendered: Rendered, fitted: Answered, index: int) -> str | None:
    """Why a record teaches nothing: "empty", "equal" or None.

    Raises:
      ValueError: it teaches nothing and `unusable` is "error"; names its place.
    """
    found = what = None
    if rendered.empty:
      found, what = "empty", f'"{rendered.empty[0]}" is empty'
    elif self.kind == "pair" and answers.equal_responses(fitted):
      found = "equal"
      cut = not answers.equal_responses(rendered.answered)
      what = '"chosen" and "rejected" are equal' + (
        f" in their first {self.max_response_length} tokens" if cut else ""
      )
    if found and self.unusable == "error":
      key = self.key("unusable")
      remedy = f'correct the record, or set {key} to "drop"' if key else "correct it"
      raise ValueError(f"{self.where(index)}: {what}, which teaches nothing; {remedy}")
    return found

  def element(self, index: int) -> Row | None:
    """Record `index` as what `stack` takes, None when it is dropped.

    Raises:
      ValueError: see `render`, `fit` and `fault`.
    """
    rendered = self.render(index)
    fitted = self.fit(rendered.answered, index)
    if fitted is None or self.fault(rendered, fitted, index):
      return None
    return {"answered": fitted, **rendered.extra}

  def none_left(self) -> str:
    """What is said when every record is dropped."""
    long = f"longer than {self.key('max_prompt_length')} {self.max_prompt_length}"
    remedy = f"or set {self.key('overlong')} to 'truncate'"
    if not self.names:
      return f"all {len(self)} records are dropped: {long}; raise it, {remedy}"
    return (
      f"all {len(self)} records are dropped: {long} or "
      f"{self.key('max_response_length')} {self.max_response_length}, or unusable "
      f"(empty or equal responses); raise the lengths, {remedy}"
    )

  def stack(self, rows: Sequence[Row], first: int, count: int) -> dict[str, np.ndarray]:
    """Rows `first` to `first + count` as one batch; those not there become padding.

    Returns: int32 arrays `prompt_ids`, `prompt_mask` [B, P] and for every response
    NAME `NAME_ids`, `NAME_mask` [B, R]; `labels` bool [B], or `margins` float32 [B]
    where records have them; `weights` float32 [B], 0 in rows of padding.

    Raises:
      ValueError: some records have a margin and others none.
    """
    own = list(rows[first : first + count])
    missing = count - len(own)
    pad_id, nothing = self.tokenizer.pad_id() or 0, np.zeros(0, np.int32)
    prompts = [row["answered"].prompt for row in own] + [nothing] * missing
    out: dict[str, np.ndarray] = {}
    out["prompt_ids"], out["prompt_mask"] = answers.stack_prompts(
      prompts, self.max_prompt_length, pad_id
    )
    # Rows of padding have a token too: a model needs one to begin with.
    out["prompt_mask"][len(own) :, -1] = 1
    for at, name in enumerate(self.names):
      ids, masks = (
        [row["answered"][part][at] for row in own] + [nothing] * missing
        for part in (1, 2)
      )
      out[f"{name}_ids"], out[f"{name}_mask"] = answers.stack_responses(
        ids, masks, self.max_response_length, pad_id
      )
    out["weights"] = np.asarray([1.0] * len(own) + [0.0] * missing, np.float32)
    if self.kind == "labelled":
      out["labels"] = np.asarray([row["label"] for row in own] + [True] * missing)
    elif _all_have_margins(rows):
      margins = [row["margin"] for row in own] + [0.0] * missing
      out["margins"] = np.asarray(margins, np.float32)
    return out


def _all_have_margins(rows: Sequence[Row]) -> bool:
  """Whether there are margins; of the whole batch, so that all processes agree."""
  known = ["margin" in row for row in rows]
  if any(known) != all(known):
    raise ValueError(
      'some records of a batch have a "margin" and others none: give all of them one'
    )
  return all(known)
