"""Rendered records as rows of fixed lengths: cut, padded, stacked.

Two layouts. `OneRow`: prompt and completion behind each other, trained on their mask;
such rows may be packed (`tunix.data.packing`) and have, all int32 [max_length],

  input_tokens   token ids, the padding id behind them
  input_mask     1 on trained tokens
  positions      0, 1, 2, ... from the start of each segment
  segment_ids    1, 2, ... by example within the row; 0 is padding

`SideBySide`: prompts padded on the left and completions on the right, as rollouts are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tunix.data import chat, render
from tunix.data.chat import Example
from tunix.data.render import Rendered
from tunix.utils import checks

Overlong = Literal["error", "truncate", "drop"]
Row = dict[str, np.ndarray]

FIELDS = ("input_tokens", "input_mask", "positions", "segment_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRow:
  """Prompt and completion in one row.

  Attributes:
    max_length: tokens a row.
  """

  max_length: int

  def __post_init__(self):
    checks.fields(self, max_length=checks.Range(2))  # one to read, one to learn

  def words(self, names: Sequence[str]) -> str:
    """What is wrong with records that are dropped."""
    del names
    return f"longer than {self.max_length} tokens"

  def fit(
    self, rendered: Rendered, overlong: Overlong, bos_id: int | None
  ) -> Rendered | None:
    """See `fit_row`."""
    example = render.joined(rendered)
    fitted = fit_row(example, self.max_length, overlong, bos_id=bos_id)
    if fitted is None or fitted is example:
      return None if fitted is None else rendered
    return render.parted(fitted)

  def lengths(self, rendered: Rendered) -> dict[str, int]:
    """Tokens of what is limited."""
    return {"record": self.tokens(rendered)}

  def tokens(self, rendered: Rendered) -> int:
    """Those that reports count."""
    return len(rendered.prompt) + len(rendered.completions[0])

  def element(self, rendered: Rendered) -> Row:
    """What packing and padding start from."""
    example = render.joined(rendered)
    return {"input_tokens": example.tokens, "input_mask": example.mask}

  def stack(self, rows: Sequence[Row], *, first: int, count: int, pad_id: int) -> Row:
    """Rows `first` to `first + count`, padded or packed, as one batch.

    Rows that are not there (a last, smaller batch) become padding, so that every batch
    has the same shape.
    """
    ours = list(rows[first : first + count])
    ours += [empty_row(self.max_length, pad_id)] * (count - len(ours))
    return {name: np.stack([row[name] for row in ours]) for name in FIELDS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
  """Prompts on the left, each completion of a record in columns of its own.

  Attributes:
    max_prompt_length, max_completion_length: tokens.
  """

  max_prompt_length: int
  max_completion_length: int

  def __post_init__(self):
    checks.fields(
      self, max_prompt_length=checks.COUNT, max_completion_length=checks.COUNT
    )

  def words(self, names: Sequence[str]) -> str:
    """What is wrong with records that are dropped, whose completions have `names`."""
    prompts = f"longer than max_prompt_length {self.max_prompt_length}"
    if not names:
      return prompts
    return (
      f"{prompts} or max_completion_length {self.max_completion_length}, or unusable "
      "(empty or equal completions),"
    )

  def fit(
    self, rendered: Rendered, overlong: Overlong, bos_id: int | None
  ) -> Rendered | None:
    """See `fit_apart`."""
    limits = dataclasses.asdict(self)
    return fit_apart(rendered, **limits, overlong=overlong, bos_id=bos_id)

  def lengths(self, rendered: Rendered) -> dict[str, int]:
    """Tokens of what is limited."""
    out = {"prompt": len(rendered.prompt)}
    if rendered.completions:
      out["completion"] = max(map(len, rendered.completions))
    return out

  def tokens(self, rendered: Rendered) -> int:
    """Those that reports count."""
    return sum(map(len, rendered.completions))

  def element(self, rendered: Rendered) -> Rendered:
    """What `stack` takes."""
    return rendered

  def stack(
    self,
    rows: Sequence[Rendered],
    names: Sequence[str],
    *,
    first: int,
    count: int,
    pad_id: int,
  ) -> Row:
    """Records `first` to `first + count` as one batch; those not there become padding.

    Args:
      rows: of the whole batch.
      names: of the completions.
      first, count: which of them.
      pad_id: token id of padding.

    Returns: int32 arrays `prompt_ids`, `prompt_mask` [B, P] and for every completion
    NAME `NAME_ids`, `NAME_mask` [B, C]; `labels` bool [B], or `margins` float32 [B]
    where records have them; `weights` float32 [B], 0 in rows of padding.

    Raises:
      ValueError: some records have a margin and others none.
    """
    ours = list(rows[first : first + count])
    missing = count - len(ours)
    out = columns(ours, names, self, pad_id, missing)
    # Rows of padding have a token too: a model needs one to begin with.
    out["prompt_mask"][len(ours) :, -1] = 1
    out["weights"] = np.asarray([1.0] * len(ours) + [0.0] * missing, np.float32)
    if any("label" in row.extra for row in rows):
      out["labels"] = np.asarray(
        [row.extra["label"] for row in ours] + [True] * missing
      )
    elif _all_have_margins(rows):
      margins = [row.extra["margin"] for row in ours] + [0.0] * missing
      out["margins"] = np.asarray(margins, np.float32)
    return out


def columns(
  rows: Sequence[Rendered],
  names: Sequence[str],
  limits: SideBySide,
  pad_id: int,
  missing: int = 0,
) -> Row:
  """`prompt_ids`, `prompt_mask`, and two for every completion; `missing` rows of
  padding behind."""
  nothing = [np.zeros(0, np.int32)] * missing
  out: Row = {}
  prompts = [row.prompt for row in rows] + nothing
  out["prompt_ids"], out["prompt_mask"] = stack_prompts(
    prompts, limits.max_prompt_length, pad_id
  )
  for at, name in enumerate(names):
    ids = [row.completions[at] for row in rows] + nothing
    masks = [row.masks[at] for row in rows] + nothing
    out[f"{name}_ids"], out[f"{name}_mask"] = stack_completions(
      ids, masks, limits.max_completion_length, pad_id
    )
  return out


def check_buckets(lengths: Sequence[int], max_length: int) -> None:
  """Refuses lengths that are no buckets.

  Raises:
    ValueError: they do not ascend, or are not from 2 to `max_length`.
  """
  ascending = all(a < b for a, b in itertools.pairwise(lengths))
  if not ascending or not all(2 <= length <= max_length for length in lengths):
    raise ValueError(
      f"length_buckets {list(lengths)}: expected ascending lengths from 2 to "
      f"max_length {max_length}"
    )


def _all_have_margins(rows: Sequence[Rendered]) -> bool:
  """Whether there are margins; of the whole batch, so that all processes agree."""
  known = ["margin" in row.extra for row in rows]
  if any(known) != all(known):
    raise ValueError(
      'some records of a batch have a "margin" and others none: give all of them one'
    )
  return all(known)


def fit_row(
  example: Example, max_length: int, overlong: Overlong, *, bos_id: int | None = None
) -> Example | None:
  """The example in at most `max_length` tokens, or None when it is dropped.

  `truncate` cuts the end. Where the prompt alone fills the maximum, that would leave
  nothing to learn: then the prompt keeps its end (behind BOS, if it began with one)
  and the completion keeps up to half of the maximum. A cut one learns no end.

  Raises:
    ValueError: it is longer and the policy is "error".
  """
  if len(example) <= max_length:
    return example
  if overlong == "drop":
    return None
  if overlong == "error":
    raise ValueError(_too_long(example, max_length))
  if example.prompt_length < max_length:
    return _pick(example, np.arange(max_length))
  stop = min(len(example), example.prompt_length + max_length // 2)
  keep = np.arange(stop - max_length, stop)
  if bos_id is not None and example.tokens[0] == bos_id:
    keep[0] = 0
  return _pick(example, keep)


def fit_apart(
  rendered: Rendered,
  *,
  max_prompt_length: int | None,
  max_completion_length: int | None,
  overlong: Overlong = "truncate",
  bos_id: int | None = None,
) -> Rendered | None:
  """The same within the limits; None when it is dropped.

  `truncate` keeps the end of a prompt, behind its BOS if it began with one, and the
  beginning of a completion, which then learns no end.

  Args:
    rendered: tokens.
    max_prompt_length, max_completion_length: in tokens; None: no limit.
    overlong: what happens to what is longer.
    bos_id: of the tokenizer.

  Raises:
    ValueError: something is longer and the policy is "error".
  """
  limit = max_completion_length
  lengths = [("prompt", len(rendered.prompt), max_prompt_length)]
  lengths += [("completion", len(ids), limit) for ids in rendered.completions]
  over = [part for part in lengths if part[2] is not None and part[1] > part[2]]
  if not over:
    return rendered
  if overlong == "drop":
    return None
  if overlong == "error":
    what, length, limit = over[0]
    raise ValueError(
      f"the {what} has {length} tokens and max_{what}_length is {limit}: raise it, or "
      'set overlong to "truncate" or "drop"'
    )
  return rendered._replace(
    prompt=_end_of(rendered.prompt, max_prompt_length, bos_id),
    completions=tuple(ids[:limit] for ids in rendered.completions),
    masks=tuple(mask[:limit] for mask in rendered.masks),
  )


def _end_of(prompt: np.ndarray, limit: int | None, bos_id: int | None) -> np.ndarray:
  if limit is None or len(prompt) <= limit:
    return prompt
  kept = prompt[-limit:].copy()
  if bos_id is not None and limit > 1 and prompt[0] == bos_id:
    kept[0] = bos_id
  return kept


def _pick(example: Example, keep: np.ndarray) -> Example:
  return chat.make_example(example.tokens[keep].tolist(), example.mask[keep].tolist())


def _too_long(example: Example, max_length: int) -> str:
  remedy = 'raise max_length, or set overlong to "truncate" or "drop"'
  if example.prompt_length >= max_length:
    return (
      f"the prompt has {example.prompt_length} tokens and the maximum is {max_length}, "
      f"so no token of the completion is left to train; {remedy}"
    )
  return f"{len(example)} tokens, more than the maximum of {max_length}; {remedy}"


def pad_row(element: Row, *, max_length: int, pad_id: int) -> Row:
  """One example as a row of its own."""
  length = len(element["input_tokens"])
  row = empty_row(max_length, pad_id)
  row["input_tokens"][:length] = element["input_tokens"]
  row["input_mask"][:length] = element["input_mask"]
  row["positions"][:length] = np.arange(length)
  row["segment_ids"][:length] = 1
  return row


def empty_row(max_length: int, pad_id: int) -> Row:
  """A row of padding alone."""
  row = {name: np.zeros(max_length, np.int32) for name in FIELDS}
  row["input_tokens"][:] = pad_id
  return row


def stack_prompts(
  prompts: Sequence[np.ndarray], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Token ids and mask, int32 [B, length] each, padded on the left."""
  ids = np.full((len(prompts), length), pad_id, np.int32)
  mask = np.zeros((len(prompts), length), np.int32)
  for row, prompt in enumerate(prompts):
    ids[row, length - len(prompt) :] = prompt
    mask[row, length - len(prompt) :] = 1
  return ids, mask


def stack_completions(
  completions: Sequence[np.ndarray],
  masks: Sequence[np.ndarray],
  length: int,
  pad_id: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Token ids and mask, int32 [B, length] each, padded on the right."""
  ids = np.full((len(completions), length), pad_id, np.int32)
  mask = np.zeros((len(completions), length), np.int32)
  for row, (completion, scored) in enumerate(zip(completions, masks, strict=True)):
    ids[row, : len(completion)] = completion
    mask[row, : len(completion)] = scored
  return ids, mask
