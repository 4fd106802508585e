"""Layouts: rendered records as rows of fixed lengths, cut, padded and stacked.

A layout is a value with the lengths of its rows. All layouts have the same methods:
`fit` cuts or drops a record, `element` gives the unit that batches are made of, `stack`
makes a batch of elements, and `lengths` and `tokens` count for reports.

`OneRow` puts the completion after the prompt in one row. Rows may be packed
(`tunix.data.batching.packing`) and have four int32 arrays [max_length]:

  input_tokens   token ids, then the padding id
  input_mask     1 on trained tokens
  positions      0, 1, 2, ... from the start of each segment
  segment_ids    1, 2, ... by example within the row; 0 is padding

`SideBySide` pads prompts on the left and completions on the right, as rollouts are
padded. `tunix.data.batching.prompts.PromptText` keeps prompts as text.

Rows of records with images have a further field `images`, the argument of the model's
call: float32 arrays of pixels, or a pair of such an array and of grids. All completions
of a prompt share its images.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tunix.data import chat
from tunix.data.chat import Rendered
from tunix.data.turns.teacher_prompts import TEACHER, TEACHER_PROMPT
from tunix.utils import checks

Overlong = Literal["error", "truncate", "drop"]
# Arrays by field; `images` may be a pair.
Row = dict[str, Any]

# Part of a record's lengths: tokens of its images.
IMAGE_TOKENS = "image tokens"
FIELDS = ("input_tokens", "input_mask", "positions", "segment_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRow:
  """Prompt and completion in one row.

  Attributes:
    max_length: tokens of a row, at least 2.
  """

  max_length: int

  def __post_init__(self):
    checks.fields(self, max_length=checks.Range(2))  # one token predicts the other

  def why_dropped(self, names: Sequence[str]) -> str:
    """Returns why all records were dropped, and the remedy."""
    del names
    return (
      f"longer than {self.max_length} tokens, so none is left; raise max_length, or "
      "set overlong to 'truncate'"
    )

  def fit(
    self, rendered: Rendered, overlong: Overlong, bos_id: int | None
  ) -> Rendered | None:
    """Cuts or drops a record that is too long, see `fit_row`."""
    return fit_row(rendered, self.max_length, overlong, bos_id=bos_id)

  def lengths(self, rendered: Rendered) -> dict[str, int]:
    """Returns the number of tokens of each part that has a limit."""
    return {"record": self.tokens(rendered)} | _image_tokens(rendered)

  def tokens(self, rendered: Rendered) -> int:
    """Returns the number of tokens that reports count."""
    return len(rendered.prompt) + len(rendered.completions[0])

  def element(self, rendered: Rendered, images: Any = None) -> Row:
    """Returns the tokens and the mask [T], which are packed or padded later.

    Args:
      rendered: a record.
      images: its images for the model, or None.
    """
    row = {"input_tokens": rendered.tokens, "input_mask": rendered.mask}
    return row if images is None else row | {"images": images}

  def stack(
    self,
    elements: Sequence[Row],
    names: Sequence[str] = (),
    *,
    first: int,
    count: int,
    pad_id: int,
  ) -> Row:
    """Stacks rows `first` to `first + count` of a batch.

    If the last batch has fewer rows, padding takes their place, so that all batches
    have one shape.

    Args:
      elements: padded or packed rows of the whole batch.
      names: ignored.
      first, count: the range of rows.
      pad_id: token id of padding.
    """
    del names
    part = list(elements[first : first + count])
    batch = stack_images([row.get("images") for row in (elements[0], *part)], count)
    part += [empty_row(self.max_length, pad_id)] * (count - len(part))
    return {name: np.stack([row[name] for row in part]) for name in FIELDS} | batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
  """Prompts padded on the left, completions padded on the right, in separate arrays.

  Attributes:
    max_prompt_length: tokens of a prompt.
    max_completion_length: tokens of a completion.
    max_teacher_prompt_length: tokens of a prompt that only a teacher reads; None if
      records have none.
  """

  max_prompt_length: int
  max_completion_length: int
  max_teacher_prompt_length: int | None = None

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    checks.fields(self, **dict.fromkeys(names, checks.COUNT))

  def why_dropped(self, names: Sequence[str]) -> str:
    """Returns why all records were dropped, and the remedy."""
    reason = f"longer than max_prompt_length {self.max_prompt_length}"
    if names:
      reason += (
        f" or max_completion_length {self.max_completion_length}, or unusable (empty "
        "or equal completions)"
      )
    return f"{reason}, so none is left; raise the length, or set overlong to 'truncate'"

  def fit(
    self, rendered: Rendered, overlong: Overlong, bos_id: int | None
  ) -> Rendered | None:
    """Cuts or drops a record that is too long, see `fit_apart`.

    A teacher's prompt is never cut: a part of it is another hint. "truncate" drops it.
    """
    limits = dataclasses.asdict(self)
    limit = limits.pop("max_teacher_prompt_length")
    length = len(rendered.extra.get(TEACHER_PROMPT, ()))
    if limit is None or length <= limit:
      return fit_apart(rendered, **limits, overlong=overlong, bos_id=bos_id)
    if overlong != "error":
      return None
    raise ValueError(
      f"the prompt of the teacher has {length} tokens and max_teacher_prompt_length is "
      f'{limit}; raise it, or set overlong to "drop"'
    )

  def lengths(self, rendered: Rendered) -> dict[str, int]:
    """Returns the number of tokens of each part that has a limit."""
    lengths = {"prompt": len(rendered.prompt)}
    if rendered.completions:
      lengths["completion"] = max(map(len, rendered.completions))
    if TEACHER_PROMPT in rendered.extra:
      lengths["teacher prompt"] = len(rendered.extra[TEACHER_PROMPT])
    return lengths | _image_tokens(rendered)

  def tokens(self, rendered: Rendered) -> int:
    """Returns the number of tokens that reports count: those of the completions."""
    return sum(map(len, rendered.completions))

  def element(self, rendered: Rendered, images: Any = None) -> Rendered:
    """Returns the record, which `stack` pads, with its images for the model in `extra`.

    The files' own pixels are left out, because they would take memory until then.
    """
    if images is None:
      return rendered
    return rendered._replace(pictures=(), extra={**rendered.extra, "images": images})

  def sequences(self, rendered: Rendered) -> list[Row]:
    """Returns the tokens and the mask [T] of the prompt with each completion."""
    prompt = rendered.prompt
    return [
      {
        "input_tokens": np.concatenate([prompt, ids]),
        "input_mask": np.concatenate([np.zeros_like(prompt), mask]),
      }
      for ids, mask in zip(rendered.completions, rendered.masks, strict=True)
    ]

  def stack(
    self,
    elements: Sequence[Rendered],
    names: Sequence[str],
    *,
    first: int,
    count: int,
    pad_id: int,
  ) -> Row:
    """Stacks records `first` to `first + count` of a batch; missing ones are padding.

    Args:
      elements: records of the whole batch.
      names: names of their completions.
      first, count: the range of records.
      pad_id: token id of padding.

    Returns:
      int32 arrays `prompt_ids`, `prompt_mask` [B, P], and `NAME_ids`, `NAME_mask` [B,
      C] for every completion NAME. `labels` bool [B], or `margins` float32 [B], if the
      records have them; also `teacher_prompt_ids`, `teacher_prompt_mask` [B, Q] and
      `teacher` int32 [B], and `images`. `weights` float32 [B], 0 in rows of padding.

    Raises:
      ValueError: some records have a margin and others none.
    """
    part = list(elements[first : first + count])
    missing = count - len(part)
    batch = columns(part, names, self, pad_id, missing)
    images = [row.extra.get("images") for row in (elements[0], *part)]
    batch |= stack_images(images, count)
    # Rows of padding get one prompt token, because a row without a token would have no
    # key to attend to, and its softmax would be NaN.
    batch["prompt_mask"][len(part) :, -1] = 1
    if self.max_teacher_prompt_length is not None:
      own = [row.extra[TEACHER_PROMPT] for row in part]
      own += [np.zeros(0, np.int32)] * missing
      names = ("teacher_prompt_ids", "teacher_prompt_mask")
      padded = stack_prompts(own, self.max_teacher_prompt_length, pad_id)
      batch |= dict(zip(names, padded))
    if any(TEACHER in row.extra for row in elements):
      numbers = [row.extra[TEACHER] for row in part] + [0] * missing
      batch[TEACHER] = np.asarray(numbers, np.int32)
    batch["weights"] = np.asarray([1.0] * len(part) + [0.0] * missing, np.float32)
    if any("label" in row.extra for row in elements):
      batch["labels"] = np.asarray(
        [row.extra["label"] for row in part] + [True] * missing
      )
    elif _have_margins(elements):
      margins = [row.extra["margin"] for row in part] + [0.0] * missing
      batch["margins"] = np.asarray(margins, np.float32)
    return batch


def columns(
  rows: Sequence[Rendered],
  names: Sequence[str],
  limits: SideBySide,
  pad_id: int,
  missing: int = 0,
) -> Row:
  """Returns padded ids and masks of the prompts and of every completion.

  Args:
    rows: records within the limits.
    names: names of their completions.
    limits: lengths of the arrays.
    pad_id: token id of padding.
    missing: number of rows of padding to append.
  """
  nothing = [np.zeros(0, np.int32)] * missing
  batch: Row = {}
  prompts = [row.prompt for row in rows] + nothing
  batch["prompt_ids"], batch["prompt_mask"] = stack_prompts(
    prompts, limits.max_prompt_length, pad_id
  )
  for number, name in enumerate(names):
    ids = [row.completions[number] for row in rows] + nothing
    masks = [row.masks[number] for row in rows] + nothing
    batch[f"{name}_ids"], batch[f"{name}_mask"] = stack_completions(
      ids, masks, limits.max_completion_length, pad_id
    )
  return batch


def check_lengths(name: str, lengths: Sequence[int], max_length: int) -> None:
  """Refuses invalid lengths of rows.

  Args:
    name: name of the lengths, for the message.
    lengths: the lengths.
    max_length: largest length.

  Raises:
    ValueError: the lengths do not ascend, or are not from 2 to `max_length`.
  """
  ascending = all(a < b for a, b in itertools.pairwise(lengths))
  if not ascending or not all(2 <= length <= max_length for length in lengths):
    raise ValueError(
      f"{name} {list(lengths)}: expected ascending lengths from 2 to "
      f"max_length {max_length}"
    )


def _have_margins(rows: Sequence[Rendered]) -> bool:
  """Returns True if the records have margins.

  `rows` must be the whole batch, so that all processes get the same result.
  """
  with_margin = ["margin" in row.extra for row in rows]
  if any(with_margin) != all(with_margin):
    raise ValueError(
      'some records of a batch have a "margin" and others none; give all of them one'
    )
  return all(with_margin)


def fit_row(
  row: Rendered, max_length: int, overlong: Overlong, *, bos_id: int | None = None
) -> Rendered | None:
  """Returns the row in at most `max_length` tokens, or None if it is dropped.

  "truncate" cuts the end of the completion. If the prompt fills the whole row, this
  would leave no token to train. In that case the prompt keeps its last tokens (after
  BOS, if it began with BOS), and the completion keeps up to half of the row. A cut
  completion has no end token, so the model does not learn to stop there.

  Args:
    row: prompt and completion; a row that fits is returned as the same object.
    max_length: tokens of the row.
    overlong: "error", "truncate" or "drop".
    bos_id: token id of BOS.

  Raises:
    ValueError: the row is longer and `overlong` is "error".
  """
  length, start = len(row.prompt) + len(row.completions[0]), row.prompt_length
  if length <= max_length:
    return row
  if overlong == "drop":
    return None
  if overlong == "error":
    raise ValueError(_too_long(length, start, max_length))
  if start < max_length:
    keep = np.arange(max_length)
  else:
    stop = min(length, start + max_length // 2)
    keep = np.arange(stop - max_length, stop)
    if bos_id is not None and row.prompt[0] == bos_id:
      keep[0] = 0
  return chat.rendered_row(row.tokens[keep], row.mask[keep])


def fit_apart(
  rendered: Rendered,
  *,
  max_prompt_length: int | None,
  max_completion_length: int | None,
  overlong: Overlong = "truncate",
  bos_id: int | None = None,
) -> Rendered | None:
  """Returns prompt and completions within their limits, or None if they are dropped.

  "truncate" keeps the end of a prompt (after BOS, if it began with BOS) and the
  beginning of a completion, whose end is then not trained.

  Args:
    rendered: tokens; a record that fits is returned as the same object.
    max_prompt_length, max_completion_length: limits in tokens; None for no limit.
    overlong: "error", "truncate" or "drop".
    bos_id: token id of BOS.

  Raises:
    ValueError: a part is longer than its limit and `overlong` is "error".
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
    name, length, limit = over[0]
    raise ValueError(
      f"the {name} has {length} tokens and max_{name}_length is {limit}; raise it, or "
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
  end = prompt[-limit:].copy()
  if bos_id is not None and limit > 1 and prompt[0] == bos_id:
    end[0] = bos_id
  return end


def _too_long(length: int, prompt_length: int, max_length: int) -> str:
  remedy = 'raise max_length, or set overlong to "truncate" or "drop"'
  if prompt_length >= max_length:
    return (
      f"the prompt has {prompt_length} tokens and the maximum is {max_length}, "
      f"so that no token of the completion is left to train; {remedy}"
    )
  return f"{length} tokens, more than the maximum of {max_length}; {remedy}"


def pad_row(element: Row, *, max_length: int, pad_id: int) -> Row:
  """Returns one example, padded to a row."""
  return join_row([element], max_length=max_length, pad_id=pad_id)


def join_row(elements: Sequence[Row], *, max_length: int, pad_id: int) -> Row:
  """Returns examples one after the other, padded to a row."""
  row, start = empty_row(max_length, pad_id), 0
  if "images" in elements[0]:
    [only] = elements  # rows with images are not shared
    row["images"] = only["images"]
  for number, element in enumerate(elements, 1):
    stop = start + len(element["input_tokens"])
    row["input_tokens"][start:stop] = element["input_tokens"]
    row["input_mask"][start:stop] = element["input_mask"]
    row["positions"][start:stop] = np.arange(stop - start)
    row["segment_ids"][start:stop] = number
    start = stop
  return row


def _image_tokens(rendered: Rendered) -> dict[str, int]:
  """Returns the number of image tokens as a part of a record's lengths."""
  if not rendered.pictures:
    return {}
  return {IMAGE_TOKENS: sum(image.num_tokens for image in rendered.pictures)}


def stack_images(images: Sequence[Any], count: int) -> dict[str, Any]:
  """Returns the images of a part of a batch as a field, or no field.

  Args:
    images: those of the first row of the whole batch, which gives the shape, then those
      of the part's rows. None in rows without the field.
    count: number of rows of the field; further rows have no images.
  """
  if images[0] is None:
    return {}

  def stack(*arrays: np.ndarray) -> np.ndarray:
    blank = [np.zeros_like(arrays[0])] * (count + 1 - len(arrays))
    return np.stack([*arrays[1:], *blank])

  if isinstance(images[0], tuple):
    return {"images": tuple(map(stack, *images))}
  return {"images": stack(*images)}


def empty_row(max_length: int, pad_id: int) -> Row:
  """Returns a row of padding."""
  row = {name: np.zeros(max_length, np.int32) for name in FIELDS}
  row["input_tokens"][:] = pad_id
  return row


def stack_prompts(
  prompts: Sequence[np.ndarray], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns token ids and mask, int32 [B, length] each, padded on the left."""
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
  """Returns token ids and mask, int32 [B, length] each, padded on the right."""
  ids = np.full((len(completions), length), pad_id, np.int32)
  mask = np.zeros((len(completions), length), np.int32)
  for row, (completion, scored) in enumerate(zip(completions, masks, strict=True)):
    ids[row, : len(completion)] = completion
    mask[row, : len(completion)] = scored
  return ids, mask
