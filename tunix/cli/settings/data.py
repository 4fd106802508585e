"""The section `data` of the jobs: which records, and how they become rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from tunix.data import mixture
from tunix.data.rows import OneRow, check_buckets
from tunix.generate import chat_template
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
  """Records, and how they are read.

  Attributes:
    train: JSON lines: {"prompt", "response"}, {"messages": [...]} or {"text"}. In RL
      {"prompt"} (text or messages) with further columns, which reward functions see.
      For dpo, orpo and reward {"prompt", "chosen", "rejected"} (or the last two as
      whole conversations), for kto {"prompt", "completion", "label"}. Records as
      Alpaca, ShareGPT, TRL and OpenAI have them are taken too. `dataset_name` is
      another name of this key. A list of several is one after the other in a pass, or
      mixed by data.weights. Also .json (an array), .csv, .parquet, a-*.array_record
      (JSON objects), gs://BUCKET/FILE, hf:ORG/NAME(split='train'),
      tfds:NAME(split='train'), or a function that returns records, pkg.mod:fn or
      file.py:fn(name='x').
    eval: the same for evaluation before, during and after training; null: none.
    weights: of the entries of data.train, in any unit: each is drawn from in this
      proportion. A pass then has as many records as all entries together, and goes
      through a small entry with a large weight more than once. []: every record once.
    columns: names of records -> the columns that hold them: {prompt: question,
      response: answer}.
    shuffle: a new order in every epoch; evaluation keeps the file's.
    num_epochs: passes over the data; null: as many as training.max_steps needs, one
      without it.
    overlong: what happens to records that are too long: they are an error, cut, or
      left out. RL has no truncate: half a prompt is another question.
    chat: whether plain prompts are user turns of the chat template; null: when there is
      one.
    template_args: further names for the chat template, of records that bring none of
      their own.
  """

  train: tuple[str, ...] | str | None = None
  eval: tuple[str, ...] | str | None = None
  weights: tuple[float, ...] = ()
  columns: dict[str, str] = dataclasses.field(default_factory=dict)
  shuffle: bool = True
  num_epochs: int | None = None
  overlong: Literal["error", "truncate", "drop"] = "error"
  chat: bool | None = None
  template_args: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    checks.fields(self, num_epochs=checks.COUNT)
    chat_template.check_variables(self.template_args, "data.template_args")
    if self.weights:
      train = self.train if isinstance(self.train, tuple) else (self.train,)
      mixture.check_weights(self.weights, len(train))

  def sources(self) -> Iterator[tuple[str, tuple[str, ...] | str, tuple[float, ...]]]:
    """("train" or "eval", what is named, weights) for what is set.

    Raises:
      ValueError: nothing is named to train on.
    """
    if self.train is None:
      raise ValueError("data.train is not set: give a file of JSON lines")
    yield "train", self.train, self.weights
    if self.eval is not None:
      yield "eval", self.eval, ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings(DataSettings):
  """Records that are tokenised while the run goes on.

  Attributes:
    scan_limit: records to tokenise and check before training; null: all of them.
    num_threads: threads that tokenise ahead; 0: none. Batches do not depend on it.
  """

  scan_limit: int | None = None
  num_threads: int = 1

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, scan_limit=checks.COUNT, num_threads=checks.NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSettings(StreamSettings):
  """Records that become rows of one length.

  Attributes:
    max_length: tokens of a row.
    packing: several examples in a row, each seeing itself alone.
    length_buckets: lengths below data.max_length, ascending. A row is as long as the
      shortest of them that holds its record, a batch has rows of one length, and one
      program is compiled for each. [256, 512] pads less than [], where every row has
      data.max_length; packing pads least.
  """

  max_length: int = 1024
  packing: bool = False
  length_buckets: tuple[int, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    OneRow(max_length=self.max_length)  # which refuses what is no row
    check_buckets(self.length_buckets, self.max_length)
    if self.length_buckets and self.packing:
      raise ValueError(
        f"length_buckets {list(self.length_buckets)} and data.packing are set, which "
        "fills rows already: leave one of them out"
      )
