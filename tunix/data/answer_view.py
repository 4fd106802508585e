"""Batches of prompts with responses, shown as text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tunix.data import supervision
from tunix.data.answer_source import NAMES
from tunix.generate.tokenizer_adapter import TokenizerAdapter

_EXTRA = ("labels", "margins")


def describe_answers(
  batch: Mapping[str, np.ndarray],
  tokenizer: TokenizerAdapter,
  *,
  rows: int | None = None,
  colour: bool = False,
) -> str:
  """The prompts of a batch with their responses; scored tokens between « and ».

  Args:
    batch: as `AnswerSource.stack` makes it.
    tokenizer: decodes the tokens.
    rows: how many rows to show; None for all.
    colour: green for the scored tokens as well, for terminals.
  """
  names = [n for some in NAMES.values() for n in some if f"{n}_ids" in batch]
  real = np.flatnonzero(batch["weights"])
  lines = [f"{len(real)} of {len(batch['weights'])} rows"]
  for row in real[:rows]:
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] != 0]
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    lines.append(f"--- {row}: prompt, {len(prompt)} tokens\n{text}")
    for name in names:
      mask = batch[f"{name}_mask"][row] != 0
      ids = batch[f"{name}_ids"][row][: np.flatnonzero(mask)[-1] + 1]
      marks = supervision.marks_of(colour)
      shown = supervision.marked(ids, mask[: len(ids)], tokenizer, marks)
      lines.append(f"{name}, {int(mask.sum())} tokens: {shown}")
    lines += [f"{name[:-1]}: {batch[name][row]}" for name in _EXTRA if name in batch]
  return "\n".join(lines)
