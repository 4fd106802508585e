"""Asks a model for the held-out sums, and judges its answers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from tunix.examples.quickstart import task
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What a model said, greedily, to the question of a record."""

  record: task.Record
  text: str

  @property
  def right(self) -> bool:
    """Whether it is the sum, in brackets."""
    return task.is_right(self.record, self.text)


def ask(
  folder: pathlib.Path, records: Sequence[task.Record], answer_tokens: int
) -> list[Answer]:
  """Greedy answers of the model in a Hugging Face folder.

  Args:
    folder: model and tokenizer.
    records: what is asked.
    answer_tokens: longest answer.
  """
  sampler = Sampler(
    AutoModel.from_pretrained(folder), TokenizerAdapter.from_pretrained(folder)
  )
  texts = sampler([record["prompt"] for record in records], answer_tokens).text
  return [Answer(record=record, text=text) for record, text in zip(records, texts)]


def accuracy(answers: Sequence[Answer]) -> float:
  """The share that is right."""
  return sum(answer.right for answer in answers) / len(answers)


def write_answers(
  path: pathlib.Path, before: Sequence[Answer], after: Sequence[Answer]
) -> None:
  """One JSON object a question, with both answers."""
  task.write_jsonl(
    path,
    (
      {**b.record, "before": b.text, "after": a.text, "right": a.right}
      for b, a in zip(before, after)
    ),
  )
