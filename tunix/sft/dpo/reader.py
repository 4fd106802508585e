"""Batches as users have them, read into checked token rows with weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from tunix.data.answers import Answered, equal_responses, stack_prompts, stack_responses
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.sft.dpo.pairs import (
  PAIR,
  BadRow,
  KTOTrainingInput,
  Limits,
  Row,
  TrainingInput,
  is_messages,
  tokenise_row,
)
from tunix.sft.losses import batch_fields

BadRows = Literal["error", "skip"]

# Field -> the names it may have in a dict of text columns.
_PAIRS = {
  "prompts": ("prompts", "prompt"),
  "chosen": ("chosen_responses", "chosen"),
  "rejected": ("rejected_responses", "rejected"),
  "margins": ("margins", "margin"),
}
_SINGLE = {
  "prompts": ("prompts", "prompt"),
  "completion": ("completions", "completion"),
  "labels": ("labels", "label"),
}

_EMPTY = "the prompt or an answer is empty; drop the row"
_EQUAL = (
  "the chosen and the rejected answer are equal (or were cut to equal tokens by "
  "max_response_length); drop the pair"
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Reader:
  """Turns batches into token rows; counts what it had to leave out or cut.

  Attributes:
    tokenizer: None where batches are token ids already.
    limits: None likewise.
    bad_rows: "error" refuses an empty answer and a pair of equal ones; "skip" gives
      them no weight.
    counts: rows skipped, prompts and answers cut, so far.
  """

  tokenizer: TokenizerAdapter | None
  limits: Limits | None
  bad_rows: BadRows = "error"
  counts: dict[str, int] = dataclasses.field(default_factory=dict)

  def pairs(self, batch: Any) -> TrainingInput:
    """A batch of pairs: DataInput, TrainingInput, or a dict with the fields of one.

    Raises:
      ValueError: fields are missing, a row is bad, or text came without a tokenizer.
    """
    fields = batch_fields(batch)
    if "prompt_ids" not in fields:
      fields = self._tokenise(fields, _PAIRS, PAIR)
    margins = fields.pop("margins", None)
    rows = self._checked(fields, PAIR)
    if margins is not None:
      rows["margins"] = _numbers("margins", margins, len(rows["weights"]))
    return TrainingInput(**rows)

  def pair_or_pairs(self, record: Any) -> TrainingInput:
    """`pairs`, also of one pair: its arrays have no first axis, and it has no weight
    but its own.

    Raises:
      ValueError: see `pairs`.
    """
    fields = batch_fields(record)
    given = [fields[n] for n in (*_PAIRS["prompts"], *_PAIRS["chosen"]) if n in fields]
    first = given[0] if given else None
    if not (isinstance(first, str) or is_messages(first)):
      return self.pairs(fields)
    batch = self.pairs({name: [value] for name, value in fields.items()})
    one = jax.tree.map(lambda x: x[0], batch)
    return one if "weights" in fields else dataclasses.replace(one, weights=None)

  def single(self, batch: Any) -> KTOTrainingInput:
    """A batch of labelled answers: KTODataInput, KTOTrainingInput, or a dict.

    Raises:
      ValueError: see `pairs`.
    """
    fields = batch_fields(batch)
    if "prompt_ids" not in fields:
      fields = self._tokenise(fields, _SINGLE, ("completion",))
    if "labels" not in fields:
      raise ValueError('the batch has no "labels": True for each desirable answer')
    given = fields.pop("labels")
    rows = self._checked(fields, ("completion",))
    return KTOTrainingInput(**rows, labels=_labels(given, len(rows["weights"])))

  def _tokenise(
    self,
    fields: Mapping[str, Any],
    names: Mapping[str, tuple[str, ...]],
    answers: Sequence[str],
  ) -> dict[str, Any]:
    """Token columns of text columns; the weights come along."""
    found = {
      ours: next((name for name in theirs if name in fields), None)
      for ours, theirs in names.items()
    }
    columns = {ours: name and fields[name] for ours, name in found.items()}
    _check_columns(columns, names, answers, fields)
    if unread := sorted(fields.keys() - {*found.values(), "weights"}):
      raise ValueError(
        f"the batch has a column {unread[0]!r} that nothing reads (read are "
        f"{sorted(filter(None, found.values()))} and 'weights'): leave it out"
      )
    if self.tokenizer is None or self.limits is None:
      raise ValueError(
        "the batch holds text: pass tokenizer= to the trainer, and set "
        "max_prompt_length and max_response_length in its config"
      )
    prompts: Any = columns.pop("prompts")
    texts: list[Any] = [columns.pop(name) for name in answers]
    count = len(texts[0])
    weights = _numbers("weights", fields.get("weights", [1.0] * count), count)
    rows: list[Row] = []
    for i in range(count):
      prompt = None if prompts is None else prompts[i]
      row = self._row(prompt, [text[i] for text in texts], i, bool(weights[i]))
      weights[i] *= any(row.responses)  # none: refused
      rows.append(row)
    return {
      "weights": weights,
      **rows_to_arrays(rows, answers, self.limits),
      **{name: column for name, column in columns.items() if column is not None},
    }

  def _row(self, prompt: Any, answers: Sequence[Any], index: int, real: bool) -> Row:
    """A row of tokens; without any where it is refused, or padding."""
    assert self.tokenizer is not None and self.limits is not None
    where = f"row {index} of the batch"
    nothing = ([],) * len(answers)
    empty = Row([], nothing, nothing, (False, False))
    try:
      row = tokenise_row(prompt, answers, self.tokenizer, self.limits, where)
    except BadRow as error:
      if real:
        self._refuse(str(error))
      return empty
    for kind, cut in zip(("prompts", "answers"), row.cut):
      if cut:
        self._count(f"{kind} longer than their maximum were cut")
    return row

  def _refuse(self, message: str) -> None:
    if self.bad_rows == "error":
      # Who gives token ids may have another key for this, as the command has.
      text = self.tokenizer is not None
      raise BadRow(message + (', or set bad_rows="skip"' if text else ""))
    self._count("rows without weight (an empty answer, or two equal ones)", message)

  def _count(self, what: str, example: str = "") -> None:
    """Counts, and warns at the first, the tenth, the hundredth ..."""
    total = self.counts[what] = self.counts.get(what, 0) + 1
    if total == 10 ** (len(str(total)) - 1):
      _log.warning("%s so far: %d%s", what, total, f" ({example})" if example else "")

  def _checked(
    self, fields: Mapping[str, Any], answers: Sequence[str]
  ) -> dict[str, np.ndarray]:
    """Token columns with their weights; bad rows have none."""
    names = ["prompt", *answers]
    arrays = {f"{n}_{part}": None for n in names for part in ("ids", "mask")}
    known = {*arrays, "weights"}
    if missing := [name for name in arrays if name not in fields]:
      raise ValueError(
        f"the batch has no {missing[0]!r} (found {sorted(fields)}): token rows need "
        f"{sorted(arrays)}"
      )
    if unknown := sorted(fields.keys() - known):
      raise ValueError(f"the batch has a field {unknown[0]!r} that nothing reads")
    rows = {name: np.asarray(fields[name]) for name in arrays}
    _check_shapes(rows, answers)
    filled = np.stack([rows[f"{n}_mask"].astype(bool).any(axis=1) for n in names])
    weights = fields.get("weights")
    given = filled.any(axis=0) if weights is None else weights
    keep = _numbers("weights", given, filled.shape[1])
    real = keep != 0
    bad = real & ~filled.all(axis=0)
    same = real & ~bad & _equal_rows(rows, answers)
    for index in np.flatnonzero(bad | same):
      where = f"row {index} of the batch"
      self._refuse(f"{where}: {_EQUAL if same[index] else _EMPTY}")
      keep[index] = 0.0
    return {**rows, "weights": keep}


def token_columns(rows: Any) -> dict[str, Any]:
  """Ids and masks of a TrainingInput or KTOTrainingInput, by name."""
  fields = batch_fields(rows)
  return {name: x for name, x in fields.items() if name.endswith(("_ids", "_mask"))}


def rows_to_arrays(
  rows: Sequence[Row], answers: Sequence[str], limits: Limits
) -> dict[str, np.ndarray]:
  """Padded token columns: prompt_ids, prompt_mask, and two for each answer."""
  out: dict[str, np.ndarray] = {}
  prompts = [np.asarray(row.prompt, np.int32) for row in rows]
  out["prompt_ids"], out["prompt_mask"] = stack_prompts(prompts, limits.prompt, 0)
  for i, name in enumerate(answers):
    ids = [np.asarray(row.responses[i], np.int32) for row in rows]
    masks = [np.asarray(row.masks[i], np.int32) for row in rows]
    columns = stack_responses(ids, masks, limits.response, 0)
    out[f"{name}_ids"], out[f"{name}_mask"] = columns
  return out


def _check_columns(columns, names, answers, fields) -> None:
  for name in answers:
    if columns[name] is None:
      wanted = " or ".join(map(repr, names[name]))
      raise ValueError(
        f"the batch has no {wanted} (found {sorted(fields)}): give it text columns, or "
        "token ids as a TrainingInput holds them"
      )
    if isinstance(columns[name], str):
      raise ValueError(f"{name} is one text: a batch is a list of them")
  sizes = {name: len(column) for name, column in columns.items() if column is not None}
  if len(set(sizes.values())) > 1:
    raise ValueError(f"the columns of the batch differ in length: {sizes}")


def _check_shapes(rows: Mapping[str, np.ndarray], answers: Sequence[str]) -> None:
  for name in ("prompt", *answers):
    ids, mask = rows[f"{name}_ids"].shape, rows[f"{name}_mask"].shape
    count = rows["prompt_ids"].shape[0]
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
        "desirable answer), False or 0"
      )
  return column.astype(bool)


def _equal_rows(rows: Mapping[str, np.ndarray], answers: Sequence[str]) -> np.ndarray:
  """bool [B], whether both answers are the same."""
  prompts = rows["prompt_ids"]
  if len(answers) != 2:
    return np.zeros(len(prompts), bool)
  ids, masks = (zip(*(rows[f"{n}_{p}"] for n in answers)) for p in ("ids", "mask"))
  pairs = map(Answered, prompts, ids, masks)
  return np.asarray([equal_responses(pair) for pair in pairs], bool)
