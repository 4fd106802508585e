"""The section `data` of the jobs: the records, and how they become rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from tunix.data.reading import files, mixture
from tunix.data.rows import OneRow, check_lengths
from tunix.data.turns.reasoning import Reasoning
from tunix.generate.tokenizer import chat_template
from tunix.utils import checks
from tunix.utils.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
  """The records, and how they are read.

  Attributes:
    train: records to train on: a file of JSON lines, .json (an array), .csv, .parquet
      or a-*.array_record (JSON objects), gs://BUCKET/FILE, hf:ORG/NAME(split='train'),
      tfds:NAME(split='train'), reasoning_gym:NAME(size=100), or a function that
      returns records, pkg.mod:fn or file.py:fn(name='x'). A list of several is read one
      after the other, or mixed by data.weights. Records of Alpaca, ShareGPT, TRL and
      OpenAI are read as well.
      `dataset_name` is another name of this key.
    eval: records for the evaluations before, during and after the training, named as in
      data.train; null: no evaluation.
    weights: weight of each entry of data.train, in any unit; records are drawn from the
      entries in these proportions. A pass then has as many records as all entries
      together and repeats a small entry with a large weight. An entry with the weight 0
      is left out. []: every record once.
    weights_at: weights of data.train that hold from a step on: {500: [1, 1], 1000: [0,
      1]}. Each entry goes on where it was. A step counts training.global_batch_size
      records, those that are left out included.
    columns: names of records with the columns that hold them: {prompt: question,
      response: answer}.
    shuffle: a new order in every epoch. Evaluation keeps the order of the file.
    num_epochs: passes over the data; null: as many as training.max_steps needs, or one
      if training.max_steps is null.
    overlong: what happens to records that are too long: error ends the command,
      truncate cuts them, drop leaves them out. RL has no truncate, because half a
      prompt is another question.
    chat: true makes plain prompts user turns of the chat template, false leaves them as
      they are; null: true if the tokenizer has a chat template.
    template_args: further variables of the chat template, for records that bring none.
    pad_to: longest pads the rows of a step to the longest of them, rounded up to one of
      at most four lengths. These are chosen from the lengths that the scan saw; if it
      did not see all records, there is one, data.max_length. Prompts with completions
      have one length each; prompts of rollouts have the length of the longest one.
      shared is longest, and short records of a batch share rows if that saves a third
      of the tokens; each attends only to itself. In dpo and orpo these are prompts with
      one completion, except with preference.shared_prompt or
      preference.reference_logps; in kto and reward none share rows. max_length pads
      every row to the limits. It changes memory, speed and last bits, not results.
      null: shared. Rows of data.packing and data.length_buckets, prompts of
      environments and rows for distill.cache have lengths of their own.
  """

  train: tuple[str, ...] | str | None = setting(
    None, path="data", may_change=True, fingerprint="train", takes_object=True
  )
  eval: tuple[str, ...] | str | None = setting(
    None, path="data", may_change=True, fingerprint="eval", takes_object=True
  )
  weights: tuple[float, ...] = ()
  weights_at: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  columns: dict[str, str] = dataclasses.field(default_factory=dict)
  shuffle: bool = True
  num_epochs: int | None = None
  overlong: Literal["error", "truncate", "drop"] = "error"
  chat: bool | None = None
  template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  pad_to: Literal["shared", "longest", "max_length"] | None = None

  def __post_init__(self):
    checks.fields(self, num_epochs=checks.COUNT)
    chat_template.check_variables(self.template_args, "data.template_args")
    for key, names in (("train", self.train), ("eval", self.eval)):
      for name in (names,) if isinstance(names, str) else names or ():
        files.check_address(f"data.{key}", name)
    if self.weights:
      count = len(self.train) if isinstance(self.train, tuple) else 1
      mixture.check_weights(self.weights, count)
      for step, weights in self.weights_at.items():
        checks.number("a step of weights_at", step, checks.COUNT, whole=True)
        mixture.check_weights(weights, count)
    elif self.weights_at:
      raise ValueError(
        f"weights_at has the steps {sorted(self.weights_at)} and data.weights is not "
        "set. Set data.weights to the weights of the first step"
      )

  def sources(
    self, train: tuple[str, ...] | str | None = None
  ) -> Iterator[tuple[str, tuple[str, ...] | str, tuple[float, ...]]]:
    """Yields ("train" or "eval", sources, weights) for the keys that are set.

    Args:
      train: source of another key, for a run without data.train.

    Raises:
      ValueError: data.train is not set.
    """
    train = train if self.train is None else self.train
    if train is None:
      raise ValueError("data.train is not set. Give a file of JSON lines")
    yield "train", train, self.weights
    if self.eval is not None:
      yield "eval", self.eval, ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings(DataSettings):
  """Records that are tokenized during the training.

  Attributes:
    stream: true reads data.train in order and never as a whole, so its size does not
      matter: JSON lines, .parquet, hf:ORG/NAME, or a function that returns an iterable.
      A stream has no length, so training.max_steps must be set. Entries of a list are
      read one after the other.
    shuffle_buffer: records of a stream whose order is drawn together, if data.shuffle
      is true. They are in memory at the same time. null: 1024.
    scan_limit: records that are tokenized and checked before the training; null: all of
      them, and the first 1024 of a stream. The lengths of rows follow from these.
    num_threads: threads that tokenize ahead; 0: none. Batches do not depend on it.
    reasoning: what happens to trained turns that reason under a chat template that
      turns reasoning off, such as {enable_thinking: false} in data.template_args. error
      ends the command, strip trains the answers without their reasoning, keep trains
      the reasoning, which no rollout begins with. null: error.
  """

  stream: bool = False
  shuffle_buffer: int | None = None
  scan_limit: int | None = setting(None, may_change=True)
  num_threads: int = setting(1, may_change=True)
  reasoning: Reasoning | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      shuffle_buffer=checks.COUNT,
      scan_limit=checks.COUNT,
      num_threads=checks.NOT_NEGATIVE,
    )
    if self.shuffle_buffer is not None and not (self.stream and self.shuffle):
      raise ValueError(
        f"shuffle_buffer is {self.shuffle_buffer}; expected data.stream and "
        "data.shuffle to be true. Leave it out"
      )
    if self.stream and self.weights:
      raise ValueError(
        f"weights is {list(self.weights)} and data.stream is true; a stream reads its "
        "entries one after the other. Leave one of them out"
      )

  @property
  def is_padded(self) -> bool:
    """True if a row is one record with padding, to the width that data.pad_to sets."""
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionSettings(StreamSettings):
  """Prompts with completions, which are padded apart.

  Attributes:
    max_length: maximum number of tokens of a row, which is a prompt with one response.
      Half of the row is for the prompt; preference.max_prompt_length or
      preference.max_response_length divides it otherwise. null: the sum of these two
      keys, each of which is 512 unless it is set.
  """

  max_length: int | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, max_length=checks.Range(2))  # a prompt and a completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSettings(StreamSettings):
  """The records, and how they become rows.

  Attributes:
    max_length: maximum number of tokens of a record, a prompt with its answer; with
      data.packing of a row of several records. In preference jobs half of it is for the
      prompt, unless preference.max_prompt_length is set.
    packing: puts several examples into a row; each attends only to itself.
    length_buckets: row lengths below data.max_length, ascending. A row has the shortest
      of these lengths that holds its record, all rows of a batch have one length, and
      one program is compiled per length. Batches hold records of similar lengths, so
      [256, 512] pads less than []; packing pads least.
  """

  max_length: int = 1024
  packing: bool = False
  length_buckets: tuple[int, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    OneRow(max_length=self.max_length)  # its constructor checks the range
    check_lengths("length_buckets", self.length_buckets, self.max_length)
    if self.weights_at and not self.is_padded:
      other = "packing" if self.packing else "length_buckets"
      raise ValueError(
        f"weights_at is set and data.{other} too, whose steps have no fixed number of "
        "records. Leave one of them out"
      )
    if self.length_buckets and self.packing:
      raise ValueError(
        f"length_buckets is {list(self.length_buckets)} and data.packing is true, "
        "which fills rows already. Leave one of them out"
      )
    if self.pad_to in ("shared", "longest") and not self.is_padded:
      other = "packing" if self.packing else "length_buckets"
      raise ValueError(
        f"pad_to is {self.pad_to!r} and data.{other} is set, which has row lengths of "
        "its own. Leave one of them out"
      )

  @property
  def is_padded(self) -> bool:
    """False if rows are full, or have the lengths of data.length_buckets."""
    return not self.packing and not self.length_buckets
