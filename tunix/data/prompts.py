"""Prompts with columns, for reinforcement learning: a file, a report, batches.

A record is one JSON object a line: "prompt" (or "prompts"), a text or a list of
messages, and further columns, the same in every record, which reward functions see.
A prompt stays text here: the sampler's side tokenises it, beside what it generates.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.data import chat as chats, forms, records as record_kinds
from tunix.data.jsonl import JsonlRecords
from tunix.data.mixture import Mixture, describe
from tunix.data.records import Kind, Record
from tunix.data.stored import Records
from tunix.generate.tokenizer_adapter import TokenizerAdapter

Row = dict[str, Any]

# The name that a column of prompts has in rows and batches.
PROMPTS = "prompts"
_NAMES = ("prompt", PROMPTS)
# Reward functions get the completions by these names.
_TAKEN = ("completion", "completions")
_EXPECTED = 'expected {"prompt": text or [messages], further columns}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptReport:
  """What was found in a file of prompts.

  Attributes:
    records: lines with a record.
    kept: those that are not too long.
    longest_prompt: its tokens.
    columns: names besides the prompt.
    sizes: prompts kept of each part of a mixture, of the whole where it is none.
    mixed: shares of the parts of a mixture, in words.
  """

  records: int
  kept: int
  longest_prompt: int
  columns: tuple[str, ...]
  sizes: tuple[int, ...] = ()
  mixed: Sequence[str] = ()

  def __str__(self) -> str:
    dropped = self.records - self.kept
    parts = [f"{self.records} prompts of at most {self.longest_prompt} tokens"]
    if dropped:
      parts.append(f"{dropped} dropped, too long")
    if self.columns:
      parts.append(f"columns {', '.join(self.columns)}")
    return "; ".join([", ".join(parts), *self.mixed])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRecords:
  """The checked prompts of a file.

  Attributes:
    rows: {"prompts": text or messages, column: value}, the same columns in each.
    places: of the rows, as `file:line`.
    fingerprint: SHA-256 of the file.
    sizes: rows of each part of a mixture; of the whole where it is none.
    mixed: shares of the parts of a mixture, in words.
  """

  rows: Sequence[Row]
  places: Sequence[str]
  fingerprint: str
  sizes: Sequence[int]
  mixed: Sequence[str] = ()

  @property
  def columns(self) -> tuple[str, ...]:
    """Names besides the prompt."""
    return tuple(name for name in self.rows[0] if name != PROMPTS)

  def texts(
    self,
    tokenizer: TokenizerAdapter,
    *,
    chat: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
  ) -> list[str]:
    """The prompts as a model is asked, see `tunix.data.chat.prompt_text`."""
    return [
      chats.prompt_text(
        row[PROMPTS], tokenizer, where=at, chat=chat, template_kwargs=template_kwargs
      )
      for row, at in zip(self.rows, self.places)
    ]

  def within(
    self,
    max_prompt_length: int,
    tokenizer: TokenizerAdapter,
    *,
    overlong: Literal["error", "drop"] = "error",
    chat: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
  ) -> tuple[list[Row], PromptReport]:
    """The rows with their prompts rendered, but those too long, and a report.

    Args:
      max_prompt_length: tokens, BOS among them.
      tokenizer: renders and encodes.
      overlong: what happens to a longer prompt.
      chat: whether plain prompts are user turns; None: when there is a chat template.
      template_kwargs: further names for the chat template.

    Raises:
      ValueError: a prompt cannot be rendered or is too long, or none is left.
    """
    texts = self.texts(tokenizer, chat=chat, template_kwargs=template_kwargs)
    lengths = [len(tokenizer.tokenize(text, add_eos=False)) for text in texts]
    short = [length <= max_prompt_length for length in lengths]
    if overlong == "error" and not all(short):
      at = short.index(False)
      raise ValueError(
        f"{self.places[at]}: the prompt has {lengths[at]} tokens and max_prompt_length "
        f'is {max_prompt_length}: raise it, or set overlong to "drop"'
      )
    if not any(short):
      raise ValueError(
        f"{self.places[0]}: this and every other prompt is longer than "
        f"max_prompt_length {max_prompt_length}: raise it"
      )
    report = PromptReport(
      records=len(self.rows),
      kept=sum(short),
      longest_prompt=max(lengths),
      columns=self.columns,
      sizes=tuple(sum(part) for part in _parts(short, self.sizes)),
      mixed=self.mixed,
    )
    rows = zip(self.rows, texts, short)
    return [row | {PROMPTS: text} for row, text, fits in rows if fits], report


def read_prompts(source: str | os.PathLike[str] | Records) -> PromptRecords:
  """The prompts of a file of JSON lines, or of other records of the kind WITH_COLUMNS.

  Raises:
    FileNotFoundError: no such file.
    ValueError: no records, or one that is wrong; its line is named.
  """
  records = (
    source if isinstance(source, Records) else JsonlRecords(source, WITH_COLUMNS)
  )
  places = [records.where(index) for index in range(len(records))]
  rows = [{PROMPTS: read.prompt, **read.extra} for read in records.read()]
  for row, at in zip(rows, places):
    if row.keys() != rows[0].keys():
      raise ValueError(
        f"{at}: the columns are {sorted(row)}, those of the first record "
        f"{sorted(rows[0])}: reward functions need the same in every record"
      )
  sizes = records.sizes if isinstance(records, Mixture) else (len(rows),)
  return PromptRecords(
    rows=rows,
    places=places,
    fingerprint=records.fingerprint,
    sizes=sizes,
    mixed=describe(records),
  )


def _parts(values: Sequence[Any], sizes: Sequence[int]) -> Iterator[Sequence[Any]]:
  """Values one after the other, cut into parts of these sizes."""
  start = 0
  for size in sizes:
    yield values[start : start + size]
    start += size


def _read(record: Any, where: str) -> Record:
  record = forms.of(record, where)
  names = [name for name in _NAMES if isinstance(record, dict) and name in record]
  if len(names) != 1:
    what = (
      record_kinds.describe_fields(record)
      if isinstance(record, dict)
      else repr(record)[:60]
    )
    raise ValueError(f"{where}: {_EXPECTED}, found {what}")
  if taken := sorted(record.keys() & set(_TAKEN)):
    raise ValueError(
      f"{where}: the column {taken[-1]!r} has a name that completions are passed by: "
      "give it another one"
    )
  prompt = record[names[0]]
  messages = isinstance(prompt, list) and all(
    isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
  )
  if not prompt or not (isinstance(prompt, str) or messages):
    raise ValueError(f"{where}: the prompt is neither text nor messages; {_EXPECTED}")
  columns = {name: x for name, x in record.items() if name != names[0]}
  return Record("prompt", prompt, {}, columns, None)


WITH_COLUMNS = Kind(
  name="prompt with columns",
  expected=_EXPECTED,
  read=_read,
  completions=(),
  noun="prompts",
)


class PromptBatches:
  """Batches {"prompts": [...], column: [...]}, in an order that follows from the seed.

  Its iterators can be saved and put back. The last batch of an epoch may be smaller.

  Args:
    rows: prompts with their columns.
    size: prompts of a batch.
    seed: of a new order every epoch; None: as they stand.
    epochs: passes; None: without end.
    sizes, weights: rows of each part and how it is drawn from, see
      `tunix.data.mixture.Mixture`; None: every row once a pass.

  Raises:
    ValueError: a part with a weight has no row.
  """

  def __init__(
    self,
    rows: Sequence[Row],
    size: int,
    *,
    seed: int | None,
    epochs: int | None,
    sizes: Sequence[int] = (),
    weights: Sequence[float] | None = None,
  ):
    self.rows, self.size, self.seed, self.epochs = rows, size, seed, epochs
    self._order = None
    if weights is not None:
      if 0 in sizes:
        raise ValueError(
          f"part {list(sizes).index(0)} of the mixture has no prompt that is short "
          "enough: leave it out, or allow longer prompts"
        )
      # Grain takes a second to import: only who mixes pays for it.
      from tunix.data import draws

      shuffle = {"shuffle": seed is not None, "seed": seed or 0}
      self._order = draws.weighted_draws(sizes, weights, **shuffle, num_epochs=None)

  def order(self, epoch: int) -> Any:
    """Indices of the rows of a pass; from seed and epoch alone, so that a count is the
    whole state of an iterator."""
    count = len(self.rows)
    if self._order is not None:
      return self._order[epoch * count : (epoch + 1) * count]
    if self.seed is None:
      return range(count)
    return np.random.default_rng((self.seed, epoch)).permutation(count)

  def __iter__(self) -> _Batches:
    return _Batches(self)


class _Batches(Iterator[dict[str, list[Any]]]):
  def __init__(self, source: PromptBatches):
    self._source, self._drawn = source, 0
    self._epoch: int = -1
    self._order: Any = ()

  def __next__(self) -> dict[str, list[Any]]:
    source = self._source
    per_epoch = -(-len(source.rows) // source.size)
    epoch, at = divmod(self._drawn, per_epoch)
    if source.epochs is not None and epoch >= source.epochs:
      raise StopIteration
    if epoch != self._epoch:
      self._epoch, self._order = epoch, source.order(epoch)
    places = range(at * source.size, min((at + 1) * source.size, len(source.rows)))
    chosen = [source.rows[self._order[place]] for place in places]
    self._drawn += 1
    return {name: [row[name] for row in chosen] for name in chosen[0]}

  def get_state(self) -> dict[str, int]:
    return {"drawn": self._drawn}

  def set_state(self, state: dict[str, int]) -> None:
    self._drawn = state["drawn"]
