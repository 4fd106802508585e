"""The quickstart's data and tokenizer.

  sft.jsonl, sft_eval.jsonl           {"prompt", "response"}: sums with their answers
  prompts.jsonl, prompts_eval.jsonl   {"prompt", "answer"}: the answer is for the reward

The files named eval hold the sums that nothing is trained on.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from tunix.cli.quickstart import task
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import io

_SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
_FIELDS = {"sft": ("prompt", "response"), "prompts": ("prompt", "answer")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartData:
  """What was written.

  Attributes:
    folder: where the files lie.
    train, held_out: the records of both parts, with all fields.
  """

  folder: pathlib.Path
  train: list[task.Record]
  held_out: list[task.Record]

  def path(self, name: str) -> pathlib.Path:
    """The file of that name."""
    return self.folder / f"{name}.jsonl"


def build_data(folder: pathlib.Path, *, seed: int, held_out: int) -> QuickstartData:
  """Writes the four files.

  Args:
    folder: where to; made if it is not there.
    seed: another seed holds other sums out.
    held_out: how many.

  Raises:
    OSError: the folder cannot be written.
  """
  train, rest = task.problems(seed, held_out)
  data = QuickstartData(folder=folder, train=train, held_out=rest)
  for name, fields in _FIELDS.items():
    for suffix, records in (("", train), ("_eval", rest)):
      chosen = ({field: record[field] for field in fields} for record in records)
      write_jsonl(data.path(name + suffix), chosen)
  return data


def write_jsonl(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """One JSON object a line."""
  io.write_atomic(path, "".join(json.dumps(r) + "\n" for r in records).encode())


def make_tokenizer() -> TokenizerAdapter:
  """Every character of the task is a token."""
  import tokenizers
  from tokenizers import decoders, models

  words = [*_SPECIAL, *task.ALPHABET]
  pad, begin, end, unknown = _SPECIAL
  rust = tokenizers.Tokenizer(
    models.BPE({word: i for i, word in enumerate(words)}, [], unk_token=unknown)
  )
  rust.add_special_tokens(list(_SPECIAL))
  rust.decoder = decoders.Fuse()
  return TokenizerAdapter(rust, bos_token=begin, eos_token=end, pad_token=pad)
