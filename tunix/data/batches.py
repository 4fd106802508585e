"""Columns that users give a trainer, as text or tokens, to checked rows with weights.

`tunix.data.source` reads records of files before a run; this reads batches during one:
dicts of columns, all of one length, of pairs or of labelled completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.data import records, render, rows
from tunix.data.records import Text
from tunix.data.render import Rendered
from tunix.data.rows import SideBySide
from tunix.data.tally import Tally
from tunix.generate.tokenizer_adapter import TokenizerAdapter

BadRows = Literal["error", "skip"]
Rows = dict[str, np.ndarray]

# The completions of a pair, in the order that they have in a forward pass, and of a
# labelled row.
PAIR = ("chosen", "rejected")
SINGLE = ("completion",)

# Column -> the names it may have among columns of text.
_TEXTS = {
  PAIR: {
    "prompts": ("prompts", "prompt"),
    "chosen": ("chosen_responses", "chosen"),
    "rejected": ("rejected_responses", "rejected"),
    "margins": ("margins", "margin"),
  },
  SINGLE: {
    "prompts": ("prompts", "prompt"),
    "completion": ("completions", "completion"),
    "labels": ("labels", "label"),
  },
}

_EMPTY = "the prompt or a completion is empty; drop the row"
_EQUAL = (
  "the chosen and the rejected completion are equal (or were cut to equal tokens by "
  "their maximum length); drop the pair"
)


class BadRow(ValueError):
  """A row from which nothing can be learned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
  """How columns of text become rows.

  Attributes:
    tokenizer: None where columns are token ids already.
    limits: most tokens; rows are padded to them. None likewise.
    bad_rows: "error" refuses an empty completion and a pair of equal ones; "skip" gives
      them no weight.
    tally: counts rows skipped, prompts and completions cut.
  """

  tokenizer: TokenizerAdapter | None = None
  limits: SideBySide | None = None
  bad_rows: BadRows = "error"
  tally: Tally = dataclasses.field(default_factory=Tally)

  def refuse(self, message: str) -> None:
    """Raises BadRow, or counts where bad rows are skipped."""
    if self.bad_rows == "error":
      # Who gives token ids may have another key for this, as the command has.
      text = self.tokenizer is not None
      raise BadRow(message + (', or set bad_rows="skip"' if text else ""))
    what = "rows without weight (an empty completion, or two equal ones)"
    self.tally.add(what, message)


def read_pairs(columns: Mapping[str, Any], options: TextOptions) -> Rows:
  """Pairs as rows of tokens.

  Args:
    columns: `prompts`, `chosen_responses`, `rejected_responses` (or `prompt`, `chosen`,
      `rejected`) and maybe `margins`, of text; or ids and masks by `prompt_`,
      `chosen_`, `rejected_`; maybe `weights`.
    options: for text.

  Returns: ids and masks, int32 [B, P] of prompts and [B, C] of completions; `weights`
  float32 [B], 0 in padding; `margins` float32 [B] where there are some.

  Raises:
    BadRow: a row teaches nothing.
    ValueError: columns are missing or wrong, or text came without a tokenizer.
  """
  fields = _as_tokens(columns, PAIR, options)
  margins = fields.pop("margins", None)
  read = _checked(fields, PAIR, options)
  if margins is not None:
    read["margins"] = _numbers("margins", margins, len(read["weights"]))
  return read


def read_labelled(columns: Mapping[str, Any], options: TextOptions) -> Rows:
  """Labelled completions as rows of tokens, with `labels` bool [B].

  Args, Raises: see `read_pairs`; text in `prompts`, `completions` and `labels`.
  """
  fields = _as_tokens(columns, SINGLE, options)
  if "labels" not in fields:
    raise ValueError('the batch has no "labels": True for each desirable completion')
  labels = fields.pop("labels")
  read = _checked(fields, SINGLE, options)
  return {**read, "labels": _labels(labels, len(read["weights"]))}


def is_one_pair(columns: Mapping[str, Any]) -> bool:
  """Whether these are the fields of a pair rather than columns of a batch."""
  names = _TEXTS[PAIR]
  values = [columns[n] for n in (*names["prompts"], *names["chosen"]) if n in columns]
  if not values or isinstance(values[0], str):
    return bool(values)
  is_list = isinstance(values[0], list | tuple)
  return is_list and all(isinstance(turn, Mapping) for turn in values[0])


def tokenise_row(
  prompt: Text | None,
  completions: Sequence[Any],
  tokenizer: TokenizerAdapter,
  where: str,
) -> Rendered:
  """One prompt and its completions, in full.

  Args:
    prompt: a text or a list of messages. Completions may be whole conversations, which
      begin with it again; None or []: it is what they have in common at the beginning.
    completions: a text each; beside messages also a message or a list of them.
    tokenizer: for tokens, BOS, EOS and the chat template.
    where: the row's place, for messages.

  Raises:
    BadRow: a completion is empty.
    ValueError: the columns have the wrong form.
  """
  prompt, texts = _split(prompt, completions, where)
  if any(records.is_empty(text) for text in texts):
    raise BadRow(f"{where}: a completion is empty; drop the pair")
  return render.tokenise(
    prompt, texts, tokenizer, where=where, chat=not isinstance(prompt, str)
  )


def _as_tokens(
  fields: Mapping[str, Any], names: tuple[str, ...], options: TextOptions
) -> dict[str, Any]:
  """The columns, those of text as ids and masks; weights come along."""
  if "prompt_ids" in fields:
    return dict(fields)
  theirs = {
    ours: next((name for name in known if name in fields), None)
    for ours, known in _TEXTS[names].items()
  }
  columns = {ours: name and fields[name] for ours, name in theirs.items()}
  _check_columns(columns, names, fields)
  if unread := sorted(fields.keys() - {*theirs.values(), "weights"}):
    raise ValueError(
      f"the batch has a column {unread[0]!r} that nothing reads (read are "
      f"{sorted(filter(None, theirs.values()))} and 'weights'): leave it out"
    )
  if options.tokenizer is None or options.limits is None:
    raise ValueError(
      "the batch holds text: pass tokenizer= to the trainer, and set "
      "max_prompt_length and max_response_length in its config"
    )
  prompts: Any = columns.pop("prompts")
  texts: list[Any] = [columns.pop(name) for name in names]
  count = len(texts[0])
  weights = _numbers("weights", fields.get("weights", [1.0] * count), count)
  read: list[Rendered] = []
  for i in range(count):
    prompt = None if prompts is None else prompts[i]
    row = _row(prompt, [text[i] for text in texts], i, bool(weights[i]), options)
    weights[i] *= any(map(len, row.completions))  # none: refused
    read.append(row)
  return {
    "weights": weights,
    **rows.columns(read, names, options.limits, pad_id=0),
    **{name: column for name, column in columns.items() if column is not None},
  }


def _row(
  prompt: Any, texts: Sequence[Any], index: int, real: bool, options: TextOptions
) -> Rendered:
  """A row within the limits; without any token where it is refused, or padding."""
  assert options.tokenizer is not None and options.limits is not None
  try:
    where = f"row {index} of the batch"
    full = tokenise_row(prompt, texts, options.tokenizer, where)
  except BadRow as error:
    if real:
      options.refuse(str(error))
    nothing = (np.zeros(0, np.int32),) * len(texts)
    return Rendered(nothing[0], nothing, nothing)
  row = options.limits.fit(full, "truncate", options.tokenizer.bos_id())
  assert row is not None  # nothing is dropped
  lengths = [[len(ids) for ids in some.completions] for some in (full, row)]
  cut = {
    "prompts": len(row.prompt) < len(full.prompt),
    "completions": lengths[0] != lengths[1],
  }
  for what in (what for what, is_cut in cut.items() if is_cut):
    options.tally.add(f"{what} longer than their maximum were cut")
  return row


def _split(
  prompt: Text | None, completions: Sequence[Any], where: str
) -> tuple[Text, list[Text]]:
  """The prompt, and what is behind it in each completion; checked."""
  names = PAIR if len(completions) == len(PAIR) else SINGLE
  texts = {
    name: _text(completion, f'{where}: "{name}"')
    for name, completion in zip(names, completions, strict=True)
  }
  asked = None
  if prompt or isinstance(prompt, str):
    asked = _text(prompt, f'{where}: "prompt"')
  asked, rest = records.split(asked, texts, where)
  if isinstance(asked, str) and (
    other := [text for text in rest.values() if not isinstance(text, str)]
  ):
    raise ValueError(
      f"{where}: the prompt is a text and a completion a {type(other[0]).__name__}: "
      "make both texts, or the prompt a list of messages"
    )
  return asked, list(rest.values())


def _text(text: Any, where: str) -> Text:
  """A text, or a list of messages, of which none is an empty completion."""
  turns = [text] if isinstance(text, Mapping) else text
  if isinstance(turns, str):
    return turns
  if not isinstance(turns, list | tuple):
    raise ValueError(
      f"{where} is a {type(text).__name__}, expected a text, a message or a list of "
      "messages"
    )
  turns = list(turns)
  if turns:
    records.check_messages(turns, where)
  return turns


def _checked(
  fields: Mapping[str, Any], completions: Sequence[str], options: TextOptions
) -> Rows:
  """Columns of tokens with their weights; bad rows have none."""
  names = ["prompt", *completions]
  wanted = [f"{n}_{part}" for n in names for part in ("ids", "mask")]
  if missing := [name for name in wanted if name not in fields]:
    raise ValueError(
      f"the batch has no {missing[0]!r} (found {sorted(fields)}): token rows need "
      f"{sorted(wanted)}"
    )
  if unknown := sorted(fields.keys() - {*wanted, "weights"}):
    raise ValueError(f"the batch has a field {unknown[0]!r} that nothing reads")
  read = {name: np.asarray(fields[name]) for name in wanted}
  _check_shapes(read, completions)
  filled = np.stack([read[f"{n}_mask"].astype(bool).any(axis=1) for n in names])
  weights = fields.get("weights")
  weights = filled.any(axis=0) if weights is None else weights
  keep = _numbers("weights", weights, filled.shape[1])
  real = keep != 0
  bad = real & ~filled.all(axis=0)
  same = real & ~bad & _equal_rows(read, completions)
  for index in np.flatnonzero(bad | same):
    options.refuse(f"row {index} of the batch: {_EQUAL if same[index] else _EMPTY}")
    keep[index] = 0.0
  return {**read, "weights": keep}


def _check_columns(
  columns: Mapping[str, Any], names: tuple[str, ...], fields: Mapping[str, Any]
) -> None:
  for name in names:
    if columns[name] is None:
      wanted = " or ".join(map(repr, _TEXTS[names][name]))
      raise ValueError(
        f"the batch has no {wanted} (found {sorted(fields)}): give it text columns, or "
        "token ids as a TrainingInput holds them"
      )
    if isinstance(columns[name], str):
      raise ValueError(f"{name} is one text: a batch is a list of them")
  sizes = {name: len(column) for name, column in columns.items() if column is not None}
  if len(set(sizes.values())) > 1:
    raise ValueError(f"the columns of the batch differ in length: {sizes}")


def _check_shapes(read: Rows, completions: Sequence[str]) -> None:
  for name in ("prompt", *completions):
    ids, mask = read[f"{name}_ids"].shape, read[f"{name}_mask"].shape
    count = read["prompt_ids"].shape[0]
    if ids != mask or len(ids) != 2 or ids[0] != count:
      raise ValueError(
        f"{name}_ids has shape {ids} and {name}_mask {mask}: expected [B, tokens] "
        f"twice with B = {count}"
      )


def _numbers(name: str, values: Any, count: int) -> np.ndarray:
  """A float32 copy of a column of numbers, one a row."""
  column = np.array(values, np.float32)
  if column.shape != (count,):
    raise ValueError(
      f"{name} have shape {column.shape}: expected ({count},), a number for each row"
    )
  if not np.isfinite(column).all():
    row = int(np.flatnonzero(~np.isfinite(column))[0])
    raise ValueError(f"row {row} of the batch: {name} hold {column[row]}, no number")
  return column


def _labels(values: Any, count: int) -> np.ndarray:
  """bool [B]."""
  column = np.asarray(values, object)
  if column.shape != (count,):
    raise ValueError(
      f"labels have shape {column.shape}: expected ({count},), one for each row"
    )
  for row, label in enumerate(column):
    if not isinstance(label, bool | int | np.bool_ | np.integer) or label not in (0, 1):
      raise ValueError(
        f"row {row} of the batch: the label is {label!r}, expected True or 1 (a "
        "desirable completion), False or 0"
      )
  return column.astype(bool)


def _equal_rows(read: Rows, completions: Sequence[str]) -> np.ndarray:
  """bool [B], whether both completions are the same."""
  prompts = read["prompt_ids"]
  if len(completions) != 2:
    return np.zeros(len(prompts), bool)
  ids, masks = (
    zip(*(read[f"{n}_{part}"] for n in completions)) for part in ("ids", "mask")
  )
  pairs = map(Rendered, prompts, ids, masks)
  return np.asarray([render.are_equal(pair) for pair in pairs], bool)
