"""Checks the columns that a user passes to a trainer, and tokenizes text columns.

`tunix.data.source` reads records of files before a run. This module reads batches
during a run: dicts of columns of one length, of pairs or of labeled completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.data import fields, records, render, rows
from tunix.data.batching.tally import Tally
from tunix.data.chat import Rendered
from tunix.data.records import LABELLED, PAIRS, Text
from tunix.data.rows import SideBySide
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import checks

BadRows = Literal["error", "skip"]
Rows = dict[str, np.ndarray]

# The completions of a pair, in their order in a forward pass, and of a labeled row.
PAIR = PAIRS.completions
SINGLE = LABELLED.completions

# Column -> accepted names of the text column, in order of preference.
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
  """A row that has no useful gradient: an empty completion, or two equal ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
  """Settings that turn columns of text into rows of tokens.

  Attributes:
    tokenizer: tokenizer with the chat template; None if columns are token ids.
    limits: lengths that rows are cut and padded to; None if columns are token ids.
    bad_rows: "error" refuses an empty completion and a pair of equal completions;
      "skip" gives them weight 0.
    tally: counter of skipped rows and of cut prompts and completions.
  """

  tokenizer: TokenizerAdapter | None = None
  limits: SideBySide | None = None
  bad_rows: BadRows = "error"
  tally: Tally = dataclasses.field(default_factory=Tally)

  def refuse(self, message: str) -> None:
    """Counts a bad row if bad rows are skipped.

    Raises:
      BadRow: bad rows are errors.
    """
    if self.bad_rows == "error":
      # The command line passes token ids and has another name for this option, so the
      # message names `bad_rows` only to users who pass text.
      has_text = self.tokenizer is not None
      raise BadRow(message + (', or set bad_rows="skip"' if has_text else ""))
    name = "rows without weight (an empty completion, or two equal ones)"
    self.tally.add(name, message)


def read_pairs(
  columns: Mapping[str, Any], options: TextOptions, *, may_share: bool = False
) -> Rows:
  """Returns pairs as rows of tokens.

  Args:
    columns: either text columns `prompts`, `chosen_responses`, `rejected_responses` (or
      `prompt`, `chosen`, `rejected`) and optionally `margins`; or token columns
      `NAME_ids` and `NAME_mask` for `prompt`, `chosen` and `rejected`, and optionally
      `images` of the prompts. Both may have `weights`.
    options: settings for text columns.
    may_share: accepts batches of `buckets.batch_pairs` too, and returns their columns.

  Returns:
    int32 ids and masks, [B, P] of prompts and [B, C] of completions; `weights` float32
    [B], 0 in padding; `margins` float32 [B] and `images` if given.

  Raises:
    BadRow: a row has no useful gradient.
    ValueError: columns are missing or wrong, or text has no tokenizer.
  """
  if may_share and "sequence" in columns:
    return _checked_shared(columns, options)
  tokens = _as_tokens(columns, PAIR, options)
  margins = tokens.pop("margins", None)
  read = _checked(tokens, PAIR, options)
  if margins is not None:
    read["margins"] = _numbers("margins", margins, len(read["weights"]))
  return read


def read_labelled(columns: Mapping[str, Any], options: TextOptions) -> Rows:
  """Returns labeled completions as rows of tokens, with `labels` bool [B].

  Args:
    columns: as for `read_pairs`, with text in `prompts`, `completions` and `labels`, or
      token columns for `prompt` and `completion`.
    options: settings for text columns.

  Raises:
    BadRow, ValueError: as for `read_pairs`.
  """
  tokens = _as_tokens(columns, SINGLE, options)
  if "labels" not in tokens:
    raise ValueError('the batch has no "labels": True for each desirable completion')
  labels = tokens.pop("labels")
  read = _checked(tokens, SINGLE, options)
  return {**read, "labels": _labels(labels, len(read["weights"]))}


def is_one_pair(columns: Mapping[str, Any]) -> bool:
  """Returns True if a mapping has the fields of one pair, not columns of a batch."""
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
  """Returns all tokens of one prompt and its completions.

  Args:
    prompt: a text or a list of messages. None or [] takes the common beginning of the
      completions, which are then whole conversations.
    completions: texts. After a prompt of messages, a completion may also be a message
      or a list of messages, which may repeat the prompt.
    tokenizer: tokenizer with BOS, EOS and the chat template.
    where: place of the row, for messages.

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
  batch: Mapping[str, Any], names: tuple[str, ...], options: TextOptions
) -> dict[str, Any]:
  """Returns the columns with text as ids and masks; `weights` are kept."""
  if "prompt_ids" in batch:
    return dict(batch)
  keys = {
    column: next((name for name in choices if name in batch), None)
    for column, choices in _TEXTS[names].items()
  }
  columns = {column: key and batch[key] for column, key in keys.items()}
  _check_columns(columns, names, batch)
  if unread := sorted(batch.keys() - {*keys.values(), "weights"}):
    raise ValueError(
      f"the batch has a column {unread[0]!r} that nothing reads (read are "
      f"{sorted(filter(None, keys.values()))} and 'weights'); leave it out"
    )
  if options.tokenizer is None or options.limits is None:
    raise ValueError(
      "the batch holds text; pass tokenizer= to the trainer, and set "
      "max_prompt_length and max_response_length in its config"
    )
  prompts: Any = columns.pop("prompts")
  texts: list[Any] = [columns.pop(name) for name in names]
  count = len(texts[0])
  weights = _numbers("weights", batch.get("weights", [1.0] * count), count)
  read: list[Rendered] = []
  for i in range(count):
    prompt = None if prompts is None else prompts[i]
    row = _row(prompt, [text[i] for text in texts], i, bool(weights[i]), options)
    weights[i] *= any(map(len, row.completions))  # a skipped row has no token
    read.append(row)
  return {
    "weights": weights,
    **rows.columns(read, names, options.limits, pad_id=0),
    **{name: column for name, column in columns.items() if column is not None},
  }


def _row(
  prompt: Any, texts: Sequence[Any], index: int, has_weight: bool, options: TextOptions
) -> Rendered:
  """Returns a row within the limits; a bad row without weight has no tokens."""
  assert options.tokenizer is not None and options.limits is not None
  try:
    where = f"row {index} of the batch"
    full = tokenise_row(prompt, texts, options.tokenizer, where)
  except BadRow as error:
    if has_weight:
      options.refuse(str(error))
    nothing = (np.zeros(0, np.int32),) * len(texts)
    return Rendered(nothing[0], nothing, nothing)
  row = options.limits.fit(full, "truncate", options.tokenizer.bos_id())
  assert row is not None  # "truncate" drops nothing
  lengths = [[len(ids) for ids in some.completions] for some in (full, row)]
  cut = {
    "prompts": len(row.prompt) < len(full.prompt),
    "completions": lengths[0] != lengths[1],
  }
  for name in (name for name, is_cut in cut.items() if is_cut):
    options.tally.add(f"{name} longer than their maximum were cut")
  return row


def _split(
  prompt: Text | None, completions: Sequence[Any], where: str
) -> tuple[Text, list[Text]]:
  """Returns the checked prompt, and the completions without it."""
  names = PAIR if len(completions) == len(PAIR) else SINGLE
  texts = {
    name: _text(completion, f'{where}: "{name}"')
    for name, completion in zip(names, completions, strict=True)
  }
  start = None
  if prompt or isinstance(prompt, str):
    start = _text(prompt, f'{where}: "prompt"')
  start, rest = records.split(start, texts, where)
  if isinstance(start, str) and (
    other := [text for text in rest.values() if not isinstance(text, str)]
  ):
    raise ValueError(
      f"{where}: the prompt is a text and a completion {checks.type_of(other[0])}; "
      "make both texts, or the prompt a list of messages"
    )
  return start, list(rest.values())


def _text(text: object, where: str) -> Text:
  """Returns a checked text or list of messages; [] is an empty completion."""
  turns = [text] if isinstance(text, Mapping) else text
  if isinstance(turns, str):
    return turns
  if not isinstance(turns, list | tuple):
    raise ValueError(
      f"{where} is {checks.type_of(text)}, expected a text, a message or a list of "
      "messages"
    )
  turns = list(turns)
  if turns:
    fields.check_messages(turns, where, images=False)
  return turns


def _checked(
  batch: Mapping[str, Any], completions: Sequence[str], options: TextOptions
) -> Rows:
  """Returns checked token columns with `weights`, which are 0 for bad rows."""
  names = ["prompt", *completions]
  needed = [f"{n}_{part}" for n in names for part in ("ids", "mask")]
  if missing := [name for name in needed if name not in batch]:
    raise ValueError(
      f"the batch has no {missing[0]!r} (found {sorted(batch)}); token rows need "
      f"{sorted(needed)}"
    )
  if unknown := sorted(batch.keys() - {*needed, "weights", "images"}):
    raise ValueError(f"the batch has a field {unknown[0]!r} that nothing reads")
  read = {name: np.asarray(batch[name]) for name in needed}
  _check_shapes(read, completions)
  images = _images(batch.get("images"), len(read["prompt_ids"]))
  filled = np.stack([read[f"{n}_mask"].astype(bool).any(axis=1) for n in names])
  weights = batch.get("weights")
  weights = filled.any(axis=0) if weights is None else weights
  keep = _numbers("weights", weights, filled.shape[1])
  real = keep != 0
  bad = real & ~filled.all(axis=0)
  same = real & ~bad & _equal_rows(read, completions)
  for index in np.flatnonzero(bad | same):
    options.refuse(f"row {index} of the batch: {_EQUAL if same[index] else _EMPTY}")
    keep[index] = 0.0
  return {**read, **images, "weights": keep}


def _images(images: Any, count: int) -> dict[str, Any]:
  """Returns checked images as a field, {} without images."""
  if images is None:
    return {}
  parts = images if isinstance(images, tuple) else (images,)
  sizes = {len(array) for array in parts}
  if sizes != {count}:
    raise ValueError(
      f"images have {sorted(sizes)} rows; expected {count}, those of the prompts. Give "
      "every prompt a row of images, blank ones where it has none"
    )
  return {"images": images}


def _checked_shared(columns: Mapping[str, Any], options: TextOptions) -> Rows:
  """Returns the checked columns of pairs that share rows; bad pairs get weight 0."""
  expected = {*rows.FIELDS, "sequence", "tokens", "weights"}
  if columns.keys() != expected:
    raise ValueError(
      f"the batch has the fields {sorted(columns)}; expected {sorted(expected)} of "
      "pairs that share rows. Pass batches as tunix.data.pipeline makes them"
    )
  read = {name: np.asarray(column) for name, column in columns.items()}
  keep = _numbers("weights", read["weights"], len(read["tokens"]))
  for index in np.flatnonzero((keep != 0) & (read["tokens"] == 0).any(axis=1)):
    options.refuse(f"row {index} of the batch: {_EMPTY}")
    keep[index] = 0.0
  return {**read, "weights": keep}


def _check_columns(
  columns: Mapping[str, Any], names: tuple[str, ...], batch: Mapping[str, Any]
) -> None:
  for name in names:
    if columns[name] is None:
      choices = " or ".join(map(repr, _TEXTS[names][name]))
      raise ValueError(
        f"the batch has no {choices} (found {sorted(batch)}); give it text columns, or "
        "token ids as a TrainingInput holds them"
      )
    if isinstance(columns[name], str):
      raise ValueError(f"{name} is one text; a batch is a list of them")
  sizes = {name: len(column) for name, column in columns.items() if column is not None}
  if len(set(sizes.values())) > 1:
    raise ValueError(f"the columns of the batch differ in length: {sizes}")


def _check_shapes(read: Rows, completions: Sequence[str]) -> None:
  for name in ("prompt", *completions):
    ids, mask = read[f"{name}_ids"].shape, read[f"{name}_mask"].shape
    count = read["prompt_ids"].shape[0]
    if ids != mask or len(ids) != 2 or ids[0] != count:
      raise ValueError(
        f"{name}_ids has shape {ids} and {name}_mask {mask}; expected [B, tokens] "
        f"twice with B = {count}"
      )


def _numbers(name: str, values: object, count: int) -> np.ndarray:
  """Returns a float32 copy of a column with one number per row."""
  column = np.array(values, np.float32)
  if column.shape != (count,):
    raise ValueError(
      f"{name} have shape {column.shape}; expected ({count},), a number for each row"
    )
  if not np.isfinite(column).all():
    row = int(np.flatnonzero(~np.isfinite(column))[0])
    raise ValueError(
      f"row {row} of the batch: {name} hold {column[row]}; expected a finite number"
    )
  return column


def _labels(values: object, count: int) -> np.ndarray:
  """Returns checked labels, bool [B]."""
  column = np.asarray(values, object)
  if column.shape != (count,):
    raise ValueError(
      f"labels have shape {column.shape}; expected ({count},), one for each row"
    )
  for row, label in enumerate(column):
    if not isinstance(label, bool | int | np.bool_ | np.integer) or label not in (0, 1):
      raise ValueError(
        f"row {row} of the batch: the label is {label!r}; expected True or 1 (a "
        "desirable completion), False or 0"
      )
  return column.astype(bool)


def _equal_rows(read: Rows, completions: Sequence[str]) -> np.ndarray:
  """Returns True for rows whose two completions are equal, bool [B]."""
  prompts = read["prompt_ids"]
  if len(completions) != 2:
    return np.zeros(len(prompts), bool)
  ids, masks = (
    zip(*(read[f"{n}_{part}"] for n in completions)) for part in ("ids", "mask")
  )
  pairs = map(Rendered, prompts, ids, masks)
  return np.asarray([render.are_equal(pair) for pair in pairs], bool)
