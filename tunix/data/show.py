"""What a batch trains, shown as text and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data import chat
from tunix.data.records import Record, Text
from tunix.data.render import Rendered
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Columns that batches of prompts may have behind them, in the order of showing.
COMPLETIONS = ("chosen", "rejected", "completion")
_EXTRA = ("labels", "margins")

_MARKS = ("«", "»")
_COLOUR = ("\033[32m«", "»\033[0m")


def trained_targets(batch: Any) -> np.ndarray:
  """Which tokens are predicted and learned, bool [B, T].

  A token is, when its mask is 1 and the token before it is of the same segment: the
  first of a segment has nothing to be predicted from.
  """
  mask, segments = _field(batch, "input_mask"), _segments(batch)
  targets = np.zeros(mask.shape, bool)
  same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
  targets[:, 1:] = (mask[:, 1:] != 0) & same
  return targets


def check_supervision(batch: Any) -> int:
  """The number of trained tokens of a batch.

  Args:
    batch: a dict or an object with input_tokens, input_mask and, where rows are
      packed or padded, segment_ids; arrays [B, T].

  Raises:
    ValueError: there is none; the message says why.
  """
  trained = int(trained_targets(batch).sum())
  if trained:
    return trained
  mask, segments = _field(batch, "input_mask"), _segments(batch)
  size = f"a batch of {mask.shape[0]} rows x {mask.shape[1]} tokens trains nothing: "
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
    size + "input_mask is 1 only where a segment begins, and nothing stands before "
    "those tokens to predict them from; mask later tokens too"
  )


def describe_batch(
  batch: Any,
  tokenizer: TokenizerAdapter,
  *,
  rows: int | None = None,
  colour: bool = False,
) -> str:
  """The text of a batch, with the trained tokens between « and ».

  Args:
    batch: as for `check_supervision`.
    tokenizer: decodes the tokens.
    rows: how many rows to show; None for all.
    colour: green for the trained tokens as well, for terminals.
  """
  tokens, segments = _field(batch, "input_tokens"), _segments(batch)
  targets = trained_targets(batch)
  count, length = tokens.shape
  trained, padding = int(targets.sum()), int((segments == 0).sum())
  lines = [
    f"{count} rows x {length} tokens: {trained} trained, "
    f"{tokens.size - trained - padding} context, {padding} padding"
  ]
  marks = _marks_of(colour)
  shown = count if rows is None else min(rows, count)
  for row in range(shown):
    lines.append(_summary(row, segments[row], targets[row]))
    for segment in np.unique(segments[row][segments[row] != 0]):
      of_segment = segments[row] == segment
      text = _marked(
        tokens[row][of_segment], targets[row][of_segment], tokenizer, marks
      )
      lines.append(f"  [{segment}] " + text.replace("\n", "\n      "))
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
  """The prompts of a batch with their completions; scored tokens between « and ».

  Args:
    batch: as `rows.SideBySide` stacks it.
    tokenizer: decodes the tokens.
    rows: how many rows to show; None for all.
    colour: green for the scored tokens as well, for terminals.
  """
  names = [name for name in COMPLETIONS if f"{name}_ids" in batch]
  real = np.flatnonzero(batch["weights"])
  lines = [f"{len(real)} of {len(batch['weights'])} rows"]
  for row in real[:rows]:
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] != 0]
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    lines.append(f"--- {row}: prompt, {len(prompt)} tokens\n{text}")
    for name in names:
      mask = batch[f"{name}_mask"][row] != 0
      ids = batch[f"{name}_ids"][row][: np.flatnonzero(mask)[-1] + 1]
      marks = _marks_of(colour)
      shown = _marked(ids, mask[: len(ids)], tokenizer, marks)
      lines.append(f"{name}, {int(mask.sum())} tokens: {shown}")
    lines += [f"{name[:-1]}: {batch[name][row]}" for name in _EXTRA if name in batch]
  return "\n".join(lines)


def describe_record(read: Record, *, colour: bool = False) -> str:
  """A record as it is read, before any tokenizer; what is learned between « and ».

  Args:
    read: the record taken apart.
    colour: green for what is learned as well, for terminals.
  """
  marks = _marks_of(colour)
  lines = [f"prompt:\n{_text_of(read.prompt, ('', ''))}"] if read.prompt else []
  for name, text in read.completions.items():
    lines.append(f"{name}:\n{_text_of(text, marks)}")
  lines += [f"{name}: {value}" for name, value in read.extra.items()]
  return "\n".join([*lines, "tools: yes"] if read.tools else lines)


def describe_rendered(
  rendered: Rendered,
  names: Sequence[str],
  tokenizer: TokenizerAdapter,
  *,
  colour: bool = False,
) -> str:
  """A record as tokens, decoded; trained or scored ones between « and ».

  Args:
    rendered: the record's tokens, of any length.
    names: of its completions.
    tokenizer: decodes the tokens.
    colour: as for `describe_batch`.
  """
  prompt, marks = rendered.prompt, _marks_of(colour)
  text = tokenizer.decode(prompt, skip_special_tokens=False)
  lines = [f"prompt, {len(prompt)} tokens:\n{text}"] if len(prompt) else []
  for name, ids, mask in zip(names, rendered.completions, rendered.masks):
    text = _marked(ids, mask != 0, tokenizer, marks)
    lines.append(f"{name}, {len(ids)} tokens, {int(mask.sum())} trained:\n{text}")
  lines += [f"{name}: {value}" for name, value in rendered.extra.items()]
  return "\n".join(lines)


def _text_of(text: Text, marks: tuple[str, str]) -> str:
  """Text, or the turns of messages, those that are learned between the marks."""
  if isinstance(text, str):
    return f"{marks[0]}{text}{marks[1]}"
  lines = []
  for turn in text:
    said = turn.get("content") or turn.get("tool_calls")
    before, behind = marks if chat.is_trained(turn) else ("", "")
    lines.append(f"[{turn['role']}] {before}{said}{behind}")
  return "\n".join(lines)


def _marks_of(colour: bool) -> tuple[str, str]:
  """What stands before and behind trained text."""
  return _COLOUR if colour else _MARKS


def _summary(row: int, segments: np.ndarray, targets: np.ndarray) -> str:
  used = int((segments != 0).sum())
  if not used:
    return f"row {row}: padding"
  pieces = len(np.unique(segments[segments != 0]))
  plural = "" if pieces == 1 else "s"
  return (
    f"row {row}: {pieces} segment{plural}, {used} tokens, {int(targets.sum())} "
    f"trained, {len(segments) - used} padding"
  )


def _marked(
  tokens: np.ndarray,
  targets: np.ndarray,
  tokenizer: TokenizerAdapter,
  marks: tuple[str, str],
) -> str:
  """Text of tokens [T], that of the trained ones (bool [T]) between the marks."""
  borders = np.flatnonzero(np.diff(targets.astype(np.int8))) + 1
  pieces = []
  for part, trained in zip(np.split(tokens, borders), np.split(targets, borders)):
    text = tokenizer.decode(part, skip_special_tokens=False)
    pieces.append(f"{marks[0]}{text}{marks[1]}" if trained[0] else text)
  return "".join(pieces)


def _segments(batch: Any) -> np.ndarray:
  """Segment ids; without any, every row is one segment."""
  segments = _field(batch, "segment_ids", required=False)
  return np.ones_like(_field(batch, "input_tokens")) if segments is None else segments


def _field(batch: Any, name: str, required: bool = True) -> Any:
  is_mapping = isinstance(batch, Mapping)
  value = batch.get(name) if is_mapping else getattr(batch, name, None)
  if value is None and required:
    what = f"keys {', '.join(batch)}" if is_mapping else type(batch).__name__
    raise ValueError(f"the batch has no {name} (found {what}); give it one, [B, T]")
  return None if value is None else np.asarray(value)
