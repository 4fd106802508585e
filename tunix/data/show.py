"""Shows and checks which tokens of a batch or a record are trained."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data import chat, image_parts
from tunix.data.batching.prompts import PROMPTS
from tunix.data.chat import Rendered
from tunix.data.records import Record, Text
from tunix.data.turns.payloads import THOUGHT_KEYS
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import terminal

# Names of completions in a batch, in the order of display.
COMPLETIONS = ("chosen", "rejected", "completion")
_EXTRA = ("labels", "margins")
# Keys of a message that templates print, in the order of display.
_PARTS = (*THOUGHT_KEYS, "content", "tool_calls")

# Equal tokens in a row that are shown once.
_LONG_RUN = 16
_MARKS = ("«", "»")


def trained_targets(batch: object) -> np.ndarray:
  """Returns True for tokens that are predicted and trained, bool [B, T].

  A token is a target if its mask is 1 and the previous token belongs to the same
  segment. The first token of a segment has no context that predicts it.

  Args:
    batch: as for `check_supervision`.
  """
  mask, segments = _field(batch, "input_mask"), _segments(batch)
  targets = np.zeros(mask.shape, bool)
  same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
  targets[:, 1:] = (mask[:, 1:] != 0) & same
  return targets


def check_supervision(batch: object) -> int:
  """Returns the number of trained tokens of a batch.

  Args:
    batch: a dict, or an object with attributes. It has `input_tokens` and `input_mask`
      [B, T] and, if rows are packed or padded, `segment_ids` [B, T].

  Raises:
    ValueError: no token is trained; the message gives the reason.
  """
  trained = int(trained_targets(batch).sum())
  if trained:
    return trained
  mask, segments = _field(batch, "input_mask"), _segments(batch)
  rows, tokens = mask.shape
  size = (
    f"a batch of {terminal.counted(rows, 'row')} x {terminal.counted(tokens, 'token')} "
    "trains nothing: "
  )
  if not segments.any():
    raise ValueError(size + "every row is padding; the data ended before this batch")
  if not mask.any():
    raise ValueError(
      size + "input_mask is 0 everywhere; the records have no assistant turn or "
      "completion, all of them are marked as not trained, or the prompts fill the "
      "maximum length (look at a batch with describe_batch)"
    )
  if not (mask * (segments != 0)).any():
    raise ValueError(
      size + "input_mask is 1 on padding alone (segment_ids 0); build both together"
    )
  raise ValueError(
    size + "input_mask is 1 only on the first token of a segment, which has no context "
    "that predicts it; mask later tokens too"
  )


def describe_batch(
  batch: object,
  tokenizer: TokenizerAdapter,
  *,
  rows: int | None = None,
  colour: bool = False,
) -> str:
  """Returns the text of a batch with the trained tokens between « and ».

  Args:
    batch: as for `check_supervision`. Sequences of pairs are shown with their pairs.
    tokenizer: tokenizer that decodes the tokens.
    rows: number of rows to show; None for all.
    colour: print trained tokens in green as well, for terminals.
  """
  tokens, segments = _field(batch, "input_tokens"), _segments(batch)
  targets, owners = trained_targets(batch), _field(batch, "sequence", required=False)
  count, length = tokens.shape
  trained, padding = int(targets.sum()), int((segments == 0).sum())
  lines = [
    f"{terminal.counted(count, 'row')} x {terminal.counted(length, 'token')}: "
    f"{trained} trained, "
    f"{tokens.size - trained - padding} context, {padding} padding"
  ]
  marks = _marks(colour)
  shown = count if rows is None else min(rows, count)
  for row in range(shown):
    lines.append(_summary(row, segments[row], targets[row]))
    for segment in np.unique(segments[row][segments[row] != 0]):
      of_segment = segments[row] == segment
      label = f"[{segment}] "
      if owners is not None:
        pair, side = divmod(int(owners[row][of_segment][0]), 2)
        label += f"pair {pair}, {COMPLETIONS[side]}: "
      text = _marked(
        tokens[row][of_segment], targets[row][of_segment], tokenizer, marks
      )
      lines.append(f"  {label}" + text.replace("\n", "\n      "))
  if shown < count:
    lines.append(f"... {count - shown} more rows")
  return "\n".join(lines)


def describe_completions(
  batch: Mapping[str, np.ndarray],
  tokenizer: TokenizerAdapter,
  *,
  rows: int | None = None,
  colour: bool = False,
) -> str:
  """Returns prompts and completions of a batch; scored tokens between « and ».

  Args:
    batch: a batch that `rows.SideBySide` stacked.
    tokenizer, rows, colour: as for `describe_batch`.
  """
  names = [name for name in COMPLETIONS if f"{name}_ids" in batch]
  real = np.flatnonzero(batch["weights"])
  lines = [f"{len(real)} of {len(batch['weights'])} rows"]
  for row in real[:rows]:
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] != 0]
    masks = [batch[f"{name}_mask"][row] for name in names]
    ends = [np.flatnonzero(mask)[-1] + 1 for mask in masks]
    record = Rendered(
      prompt,
      tuple(batch[f"{name}_ids"][row][:end] for name, end in zip(names, ends)),
      tuple(mask[:end] for mask, end in zip(masks, ends)),
      {name[:-1]: batch[name][row] for name in _EXTRA if name in batch},
    )
    lines += [f"--- {row}", describe_rendered(record, names, tokenizer, colour=colour)]
  return "\n".join(lines)


def describe_prompts(batch: Mapping[str, Sequence[Any]], *, rows: int | None) -> str:
  """Returns the prompts of a batch of text with their columns.

  Args:
    batch: a batch of `tunix.data.batching.prompts.PromptBatches`.
    rows: number of prompts to show; None for all.
  """
  lines = []
  for number, prompt in enumerate(batch[PROMPTS][:rows]):
    lines.append(f"--- {number}\n{prompt}")
    lines += [f"{name}: {batch[name][number]}" for name in batch if name != PROMPTS]
  return "\n".join(lines)


def describe_record(read: Record, *, colour: bool = False) -> str:
  """Returns the text of a record before tokenization; trained text between « and ».

  Args:
    read: parts of the record.
    colour: as for `describe_batch`.
  """
  marks = _marks(colour)
  lines = [f"prompt:\n{_text(read.prompt, ('', ''))}"] if read.prompt else []
  for name, text in read.completions.items():
    lines.append(f"{name}:\n{_text(text, marks)}")
  lines += [f"{name}: {value}" for name, value in read.extra.items()]
  return "\n".join([*lines, "tools: yes"] if read.tools else lines)


def describe_rendered(
  rendered: Rendered,
  names: Sequence[str],
  tokenizer: TokenizerAdapter,
  *,
  colour: bool = False,
) -> str:
  """Returns the decoded tokens of a record; trained or scored ones between « and ».

  Args:
    rendered: tokens of the record.
    names: names of its completions.
    tokenizer: tokenizer that decodes the tokens.
    colour: as for `describe_batch`.
  """
  prompt, marks = rendered.prompt, _marks(colour)
  text = _decoded(prompt, tokenizer)
  count = terminal.counted(len(prompt), "token")
  lines = [f"prompt, {count}:\n{text}"] if len(prompt) else []
  lines[:0] = [f"image {i}: {x}" for i, x in enumerate(rendered.pictures, start=1)]
  for name, ids, mask in zip(names, rendered.completions, rendered.masks):
    text = _marked(ids, mask != 0, tokenizer, marks)
    count = terminal.counted(len(ids), "token")
    lines.append(f"{name}, {count}, {int(mask.sum())} trained:\n{text}")
  lines += [f"{name}: {value}" for name, value in rendered.extra.items()]
  return "\n".join(lines)


def _text(text: Text, marks: tuple[str, str]) -> str:
  """Returns text, or one line for each turn; trained parts between the marks."""
  if isinstance(text, str):
    return f"{marks[0]}{text}{marks[1]}"
  lines = []
  for turn in text:
    parts = [turn[key] for key in _PARTS if turn.get(key)]
    opening, closing = marks if chat.is_trained(turn) else ("", "")
    content = "\n".join(map(_part, parts))
    lines.append(f"[{turn['role']}] {opening}{content}{closing}")
  return "\n".join(lines)


def _part(part: Any) -> str:
  """Returns the text of a content, or of tool calls; images by name."""
  if isinstance(part, str):
    return part
  if any(some.get("type") == "image" for some in part):
    return "".join(
      f"[image {image_parts.name(some['image'])}]"
      if some["type"] == "image"
      else some["text"]
      for some in part
    )
  return json.dumps(part, ensure_ascii=False)


def _marks(colour: bool) -> tuple[str, str]:
  """Returns the marks before and after trained text."""
  return terminal.COLOUR if colour else _MARKS


def _summary(row: int, segments: np.ndarray, targets: np.ndarray) -> str:
  used = int((segments != 0).sum())
  if not used:
    return f"row {row}: padding"
  pieces = terminal.counted(len(np.unique(segments[segments != 0])), "segment")
  return (
    f"row {row}: {pieces}, {terminal.counted(used, 'token')}, {int(targets.sum())} "
    f"trained, {len(segments) - used} padding"
  )


def _marked(
  tokens: np.ndarray,
  targets: np.ndarray,
  tokenizer: TokenizerAdapter,
  marks: tuple[str, str],
) -> str:
  """Returns the text of tokens [T]; trained ones (bool [T]) between the marks."""
  borders = np.flatnonzero(np.diff(targets.astype(np.int8))) + 1
  pieces = []
  for part, trained in zip(np.split(tokens, borders), np.split(targets, borders)):
    text = _decoded(part, tokenizer)
    pieces.append(f"{marks[0]}{text}{marks[1]}" if trained[0] else text)
  return "".join(pieces)


def _decoded(tokens: np.ndarray, tokenizer: TokenizerAdapter) -> str:
  """Returns the text of tokens; a long run of one token, as of an image, once."""
  borders = np.flatnonzero(np.diff(tokens)) + 1
  pieces, rest = [], 0
  for start, stop in itertools.pairwise([0, *borders, len(tokens)]):
    if stop - start >= _LONG_RUN:
      pieces += [_text_of(tokens[rest:start], tokenizer)]
      one = tokenizer.decode(tokens[start : start + 1], skip_special_tokens=False)
      pieces += [f"{one} [{stop - start} times]"]
      rest = stop
  return "".join([*pieces, _text_of(tokens[rest:], tokenizer)])


def _text_of(tokens: np.ndarray, tokenizer: TokenizerAdapter) -> str:
  return tokenizer.decode(tokens, skip_special_tokens=False) if len(tokens) else ""


def _segments(batch: object) -> np.ndarray:
  """Returns the segment ids; a batch without them has one segment per row."""
  segments = _field(batch, "segment_ids", required=False)
  return np.ones_like(_field(batch, "input_tokens")) if segments is None else segments


def _field(batch: object, name: str, required: bool = True) -> Any:
  is_mapping = isinstance(batch, Mapping)
  value = batch.get(name) if is_mapping else getattr(batch, name, None)
  if value is None and required:
    fields = f"keys {', '.join(batch)}" if is_mapping else type(batch).__name__
    raise ValueError(f"the batch has no {name} (found {fields}); give it one, [B, T]")
  return None if value is None else np.asarray(value)
