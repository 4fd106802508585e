"""A teacher's most likely words of every token, on disk: written once, read often.

A row is found by its content (every field that the teacher is called with), whatever
batch it comes in (`tunix.data.store`): a fill that was killed goes on where it was, and
several runs may fill one folder. The processes of one run ask together, each with its
rows of a batch, and the first writes what one process would.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.data.store import RowStore, row_key
from tunix.distillation import outputs
from tunix.distillation.outputs import Inputs
from tunix.models import calling
from tunix.ops.distill import TopK
from tunix.sft import inference, stamp
from tunix.sft.losses import batch_fields
from tunix.utils import checks, coordination, mesh as mesh_lib
from tunix.utils.io import write_json

_FORMAT = 2
_PARTS = ("ids", "logps")


class TeacherCache:
  """The top-k log-probabilities of a teacher, in a folder.

  Given to a trainer in the teacher's place; without `teacher` in memory it only reads.

  Args:
    folder: where the files are, or will be.
    teacher: fills the cache; must be the model that began it.
    top_k: words kept a token; None: as the folder says.
    temperature: of the log-probabilities; None: as the folder says, or 1.
    data_sharding_axis: axes of the teacher's mesh that split a batch.

  Raises:
    ValueError: the folder holds another teacher's words, or other ones than asked for,
      or nothing and there is no teacher or top_k.
  """

  def __init__(
    self,
    folder: str | pathlib.Path,
    teacher: nnx.Module | None = None,
    *,
    top_k: int | None = None,
    temperature: float | None = None,
    data_sharding_axis: tuple[str, ...] = ("fsdp",),
  ):
    self._folder = pathlib.Path(folder)
    self._teacher = teacher
    self._axes = data_sharding_axis
    about = self._folder / "teacher.json"
    if about.exists():
      self._about = json.loads(about.read_text())
      self._check_about(top_k, temperature)
    else:
      self._about = self._described(top_k, temperature)
      if jax.process_index() == 0:
        write_json(about, self._about)
    self._rows = RowStore(self._folder)

  @property
  def top_k(self) -> int:
    """Words kept a token."""
    return self._about["top_k"]

  @property
  def temperature(self) -> float:
    """Of the log-probabilities."""
    return self._about["temperature"]

  @property
  def vocab_size(self) -> int | None:
    """Words of the teacher, if it says so."""
    return self._about["vocab_size"]

  def __len__(self) -> int:
    """Rows there are."""
    return len(self._rows)

  def check(self, top_k: int, temperature: float) -> None:
    """Refuses to serve what it does not hold.

    Raises:
      ValueError: another number of words (0: any), or another temperature.
    """
    wanted = top_k or self.top_k, temperature
    if wanted != (self.top_k, self.temperature):
      raise ValueError(
        f"the strategy wants the top {wanted[0]} words at temperature {wanted[1]}, the "
        f"cache {self._folder} holds {self.top_k} at {self.temperature}: set the "
        "strategy so, or fill a cache in another folder"
      )

  def fill(self, batches: Iterable[Any]) -> int:
    """Asks the teacher for the rows of these batches that are not there yet.

    Args:
      batches: what will be trained on, or its inputs as dicts.

    Returns: how many rows it asked for.

    Raises:
      ValueError: there is no teacher.
    """
    before = len(self)
    for batch in batches:
      self.look_up(batch_fields(batch))
    return len(self) - before

  def look_up(self, inputs: Inputs) -> TopK:
    """The words of every row, as numpy arrays.

    Args:
      inputs: fields of a batch on the host, with input_tokens [B, T].

    Raises:
      ValueError: a row is missing and there is no teacher to ask.
    """
    keys = row_keys(inputs, self._about["fields"])
    missing = any(key not in self._rows for key in keys)
    if self._teacher is not None:  # one that misses a row needs all to ask with it
      missing = any(coordination.gather("rows without a teacher's words", missing))
    if missing:
      self._ask(inputs, keys)
    return TopK(*(self._rows.take(keys, part) for part in _PARTS))

  def _ask(self, inputs: Inputs, keys: list[str]) -> None:
    """All rows of the batch, so that one program does; keeps the new ones."""
    if self._teacher is None:
      missing = sum(key not in self._rows for key in keys)
      raise ValueError(
        f"{missing} of {len(keys)} rows are not in the cache {self._folder} of "
        f"{len(self)} rows: fill it with the batches as they are trained on (the same "
        "tokens, padded alike), or give it the teacher"
      )
    rows = {k: x for k, x in inputs.items() if hasattr(x, "shape")}
    score = _score(self.top_k, self.temperature)
    # The keys take the way of the rows, which puts the processes' parts in order.
    digests = np.asarray([np.frombuffer(bytes.fromhex(key), np.int32) for key in keys])
    asked = {"inputs": rows, "digests": digests}
    answer = inference.apply(self._teacher, score, asked, self._axes)
    (ids, logps), digests = mesh_lib.to_host(answer)
    every = [digest.tobytes().hex() for digest in np.asarray(digests, np.int32)]
    new = {key: row for row, key in enumerate(every) if key not in self._rows}
    chosen = np.asarray(list(new.values()))
    self._rows.add({"ids": ids[chosen], "logps": logps[chosen]}, list(new))

  def _described(self, top_k: int | None, temperature: float | None) -> dict[str, Any]:
    if self._teacher is None or top_k is None:
      raise ValueError(
        f"there is no teacher cache in {self._folder}: give the teacher and top_k to "
        "begin one"
      )
    checks.number("top_k", top_k, checks.COUNT, whole=True)
    size = calling.vocab_size(self._teacher)
    if size is not None and top_k > size:  # before a folder of no use is begun
      raise ValueError(
        f"top_k is {top_k} and the teacher has {size} words: it must be at most that"
      )
    return {
      "format": _FORMAT,
      "teacher": _stamp(self._teacher),
      "top_k": top_k,
      "temperature": 1.0 if temperature is None else float(temperature),
      "vocab_size": size,
      "fields": list(outputs.fields_of(self._teacher)),  # of readers without it too
    }

  def _check_about(self, top_k: int | None, temperature: float | None) -> None:
    if (form := self._about["format"]) != _FORMAT:
      raise ValueError(
        f"the teacher cache {self._folder} has format {form}, this version reads "
        f"{_FORMAT}: fill another folder"
      )
    self.check(top_k or 0, self.temperature if temperature is None else temperature)
    if self._teacher is not None and _stamp(self._teacher) != self._about["teacher"]:
      raise ValueError(
        f"the teacher cache {self._folder} was filled by a model with other weights "
        f"(content stamp {self._about['teacher']}): give that model, or another folder"
      )


@functools.cache
def _score(top_k: int, temperature: float) -> Any:
  """One object a setting, so that it compiles once."""
  return lambda model, inputs, digests: (
    outputs.top_words(model, inputs, top_k, temperature),
    digests,
  )


def row_keys(inputs: Inputs, fields: Collection[str]) -> list[str]:
  """A name for each row by what a model sees of it.

  Args:
    inputs: fields of a batch on the host.
    fields: those that the model is called with, see `outputs.fields_of`.

  Raises:
    ValueError: there are no input_tokens.
  """
  if "input_tokens" not in inputs:
    raise ValueError(
      f"the inputs are {sorted(inputs)}, without input_tokens: a teacher cache finds "
      "rows by their tokens"
    )
  tokens = np.asarray(inputs["input_tokens"])
  arrays = {n: x for n, x in inputs.items() if n in fields and hasattr(x, "shape")}
  seen = [(n, _plain(x)) for n, x in sorted({**arrays, "input_tokens": tokens}.items())]
  rows = len(tokens)
  keys = []
  for row in range(rows):
    parts = []
    for name, array in seen:
      seen_by_row = array[row] if array.shape[:1] == (rows,) else array
      about = f"{name}{seen_by_row.shape}{seen_by_row.dtype}"
      parts += [about.encode(), seen_by_row.tobytes()]
    keys.append(row_key(parts))
  return keys


def _plain(array: Any) -> np.ndarray:
  """The same bytes for the same numbers, whatever their width."""
  array = np.asarray(array)
  return array.astype(np.int32 if array.dtype.kind in "biu" else np.float32)


def _stamp(model: nnx.Module) -> str:
  return stamp.content_stamp(nnx.state(model, nnx.Param))
