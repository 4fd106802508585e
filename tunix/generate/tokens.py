"""Tokens of a completion with everything that is known of each, in columns.

    Delta -> Completion -> the turns and rows of an episode -> padded arrays

A fact of a token is a field of `Tokens`. The metadata of the field says how the fact is
joined, cut, padded and saved, so a new one needs no code between the place that makes
it and the place that reads it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from tunix.generate.sizes import batching
from tunix.utils import attributes


class Column(NamedTuple):
  """The form of a fact. It is 0 on padding, and on tokens that do not have it.

  Attributes:
    dtype: type of the numbers; None: that of the values.
    saved: its name in JSON; None: it is not saved.
    covers_prompt: True if the tokens of the prompt have it too, before the others.
    optional: True if JSON leaves it out where it is not known.
  """

  dtype: Any
  saved: str | None = None
  covers_prompt: bool = False
  optional: bool = False


def column(dtype: object, saved: str | None = None, **form: Any) -> Any:
  """Returns a field of `Tokens` with its `Column`."""
  made = Column(dtype, saved, **form)
  return dataclasses.field(default=None, metadata={"column": made})


class TopLogprobs(NamedTuple):
  """The most likely tokens at n positions.

  Attributes:
    ids: int32 [n, k], most likely first.
    logprobs: float32 [n, k], in nats, under the model's own distribution.
  """

  ids: np.ndarray
  logprobs: np.ndarray


def _none() -> np.ndarray:
  return np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """n tokens that follow a prompt of T tokens; a column is None if it is not known.

  Attributes:
    prompt: int32 [T], ids of the prompt.
    ids: int32 [n], the end-of-sequence token included.
    is_drawn: bool [n], False for tokens that the model read, such as those of an
      observation; None: all were drawn.
    logps: float32 [n], in nats, under the model's own distribution.
    sampling_logps: float32 [n], in nats, under the distribution that the token was
      drawn from; 0 where nothing was drawn.
    versions: int32 [n], number of the weights that drew each token.
    top_ids, top_logps: int32 and float32 [n, k], the most likely tokens at each
      position, most likely first, and their `logps`.
    head_ids, head_probs: int32 and float32 [n, k], the most likely tokens of the
      distribution that each token was drawn from, and their probabilities. An entry of
      probability 0 is none.
    logits: float32 [n, V], the model's own.
    rewards: float32 [n], the reward of an action at its last token, else 0.
    routes: [T + n, M, k], the experts of the tokens of the prompt and of the others,
      see experts/route_records.py. The last token has none, as it was never run.
  """

  prompt: np.ndarray = dataclasses.field(default_factory=_none)
  ids: np.ndarray = dataclasses.field(
    default_factory=_none, metadata={"column": Column(np.int32, "ids")}
  )
  is_drawn: np.ndarray | None = column(bool)
  logps: np.ndarray | None = column(np.float32)
  sampling_logps: np.ndarray | None = column(np.float32, "logps")
  versions: np.ndarray | None = column(np.int32, "versions")
  top_ids: np.ndarray | None = column(np.int32)
  top_logps: np.ndarray | None = column(np.float32)
  head_ids: np.ndarray | None = column(np.int32, "head_ids", optional=True)
  head_probs: np.ndarray | None = column(np.float32, "head_probs", optional=True)
  logits: np.ndarray | None = column(np.float32)
  rewards: np.ndarray | None = column(np.float32)
  routes: np.ndarray | None = column(None, "routes", covers_prompt=True)

  # The names in the engine's and the samplers' results.

  @property
  def tokens(self) -> np.ndarray:
    """`ids`."""
    return self.ids

  @property
  def logprobs(self) -> np.ndarray | None:
    """`logps`."""
    return self.logps

  @property
  def sampling_logprobs(self) -> np.ndarray | None:
    """`sampling_logps`."""
    return self.sampling_logps

  @property
  def top(self) -> TopLogprobs | None:
    """The most likely tokens at each position, or None."""
    if self.top_ids is None or self.top_logps is None:
      return None
    return TopLogprobs(self.top_ids, self.top_logps)

  def columns(self) -> dict[str, np.ndarray]:
    """Returns the columns that are known, by name."""
    return attributes.known(self, COLUMNS)

  def cut(self, count: int) -> Self:
    """Returns the first `count` tokens."""
    over = max(0, len(self.ids) - count)
    columns = {name: x[: len(x) - over] for name, x in self.columns().items()}
    return dataclasses.replace(self, **columns)

  def with_mask(self) -> Self:
    """Returns the tokens with `is_drawn`."""
    if self.is_drawn is not None:
      return self
    return dataclasses.replace(self, is_drawn=np.ones(len(self.ids), bool))

  def with_prompt_of(self, width: int) -> Self:
    """Moves the ids of the prompt from number `width` on before the tokens."""
    over = self.prompt[width:]
    if not len(over):
      return self
    moved = {
      name: np.concatenate([_read(name, over, x), x])
      for name, x in self.with_mask().columns().items()
      if not COLUMNS[name].covers_prompt
    }
    return dataclasses.replace(self, prompt=self.prompt[:width], **moved)

  def saved(self) -> dict[str, np.ndarray | None]:
    """Returns the columns that are saved, by their names in JSON."""
    return {_SAVED[name]: x for name, x in attributes.known(self, _SAVED).items()}

  @classmethod
  def of_saved(cls, saved: Mapping[str, Any], **fields: Any) -> Self:
    """Returns the tokens of `saved`; `fields` are the others."""
    read = {n: saved[name] for n, name in _SAVED.items() if name in saved}
    return cls(**read | fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta(Tokens):
  """The new part of one completion since its last delta.

  `routes` are in the last delta of a completion that has tokens, and are those of its
  prompt and all of its tokens. They are None without `EngineConfig.record_routes`.

  Attributes:
    sample: number of the completion in its request.
    text: new text. The texts of a completion, joined, are its text; text that may begin
      a stop string, or ends inside a character, waits for the next delta.
    finish_reason: "eos", "stop" (a stop string), "length", "cancelled" or "error" in
      the last delta of a completion; None before.
  """

  sample: int
  text: str = ""
  finish_reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion(Tokens):
  """One completion as a whole.

  Attributes:
    number: number of the completion in its request, or of its episode in the batch.
    text: its text; "" if only its tokens are known.
    finish_reason: see `Delta`.
  """

  number: int = 0
  text: str = ""
  finish_reason: str


COLUMNS: dict[str, Column] = {
  field.name: field.metadata["column"]
  for field in dataclasses.fields(Tokens)
  if "column" in field.metadata
}
_SAVED = {name: form.saved for name, form in COLUMNS.items() if form.saved}


def without_unknown(columns: Mapping[str, Any]) -> dict[str, Any]:
  """Leaves out the optional columns that are None, as older versions lack them."""
  optional = {name for name, form in COLUMNS.items() if form.optional}
  return {k: x for k, x in columns.items() if x is not None or k not in optional}


def joined(deltas: Sequence[Delta]) -> Completion:
  """Returns a completion from its deltas."""
  last = deltas[-1]
  assert last.finish_reason is not None
  parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
  for delta in deltas:
    for name, x in delta.columns().items():
      parts[name].append(x)
  columns = {
    name: own[-1] if COLUMNS[name].covers_prompt else np.concatenate(own)
    for name, own in parts.items()
  }
  return Completion(
    number=last.sample,
    text="".join(delta.text for delta in deltas),
    finish_reason=last.finish_reason,
    prompt=last.prompt,
    **columns,
  )


def chained(turns: Sequence[Tokens]) -> Tokens:
  """Returns the tokens of several turns after the prompt of the first one.

  Args:
    turns: tokens of each turn. Each prompt begins with the prompt and the tokens of the
      turn before it; what follows in it was read.
  """
  turns = [turn.with_mask() for turn in turns]
  starts = [len(turns[0].prompt), *(len(t.prompt) + len(t.ids) for t in turns)]
  read = [turn.prompt[start:] for turn, start in zip(turns, starts)]
  every, columns = [turn.columns() for turn in turns], dict[str, np.ndarray]()
  for name in set(every[0]).intersection(*every):
    own, form = [values[name] for values in every], COLUMNS[name]
    if form.covers_prompt:
      # A token keeps the values of its first run. The last one of a turn is run in the
      # next turn.
      ends = [0, *(len(x) - 1 for x in own)]
      parts = [x[start:-1] for start, x in zip(ends, own)] + [own[-1][-1:]]
    else:
      parts = [y for ids, x in zip(read, own) for y in (_read(name, ids, x), x)]
    columns[name] = np.concatenate(parts).astype(form.dtype or own[0].dtype)
  return Tokens(prompt=turns[0].prompt, **columns)


def padded(
  rows: Sequence[Tokens], name: str, width: int, space: int
) -> tuple[np.ndarray | None, np.ndarray] | None:
  """Returns a column of the rows as arrays: of the prompts, and of the tokens.

  Args:
    rows: the rows. One that does not know the column gets zeros.
    name: name of the column.
    width, space: width of the arrays of prompts, padded on the left, and of tokens,
      padded on the right.

  Returns: None if no row knows the column. The first array is None if the column does
  not belong to prompts.
  """
  own = [getattr(row, name) for row in rows]
  like = next((x for x in own if x is not None), None)
  if like is None:
    return None
  form, shape = COLUMNS[name], like.shape[1:]
  dtype = form.dtype or like.dtype
  own = [np.zeros((0, *shape), dtype) if x is None else x for x in own]
  if not form.covers_prompt:
    return None, batching.right_padded(own, space, dtype)
  before = np.zeros((len(rows), width, *shape), dtype)
  for place, (row, x) in enumerate(zip(rows, own)):
    prompt = x[: len(row.prompt)]
    before[place, width - len(prompt) :] = prompt
  after = [x[len(row.prompt) :] for row, x in zip(rows, own)]
  return before, batching.right_padded(after, space, dtype)


def _read(name: str, ids: np.ndarray, like: np.ndarray) -> np.ndarray:
  """Returns the values of tokens that were read, not drawn."""
  return ids if name == "ids" else np.zeros((len(ids), *like.shape[1:]), like.dtype)
