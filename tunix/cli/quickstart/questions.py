"""Asks a model about held-out signatures, and judges its answers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from tunix.cli.quickstart import task
from tunix.cli.quickstart.stdlib import Function
from tunix.cli.quickstart.task import Check
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.utils import io


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """One answer.

  Attributes:
    signature: the question.
    text: what the model said.
    check: what is right about it.
  """

  signature: str
  text: str
  check: Check


def ask(
  folder: pathlib.Path, functions: Sequence[Function], answer_tokens: int
) -> list[Answer]:
  """Greedy answers of the model in a Hugging Face folder.

  Args:
    folder: model and tokenizer.
    functions: what is asked about.
    answer_tokens: longest answer.
  """
  tokenizer = TokenizerAdapter.from_pretrained(folder)
  sampler = Sampler(AutoModel.from_pretrained(folder), tokenizer)
  prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": f.signature}])
    for f in functions
  ]
  output = sampler(prompts, answer_tokens)
  return [
    Answer(signature=f.signature, text=text, check=task.check(f.signature, text))
    for f, text in zip(functions, output.text)
  ]


def write_answers(
  path: pathlib.Path, before: Sequence[Answer], after: Sequence[Answer]
) -> None:
  """One JSON object per question, with both answers."""
  lines = [
    json.dumps(
      {
        "signature": b.signature,
        "before": b.text,
        "after": a.text,
        "check": dataclasses.asdict(a.check),
      }
    )
    for b, a in zip(before, after)
  ]
  io.write_atomic(path, ("\n".join(lines) + "\n").encode())
