"""A cache on disk of the teacher's most likely tokens at each position.

The key of a row is a hash of all its fields that the teacher receives (see
`tunix.data.reading.store`). The key does not depend on the batch of the row, so an
interrupted fill can continue, and several runs can fill one folder. The processes of
one run compute missing rows together, each with its part of the batch, and process 0
writes the results.
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

from tunix.data.reading.store import RowStore, row_key, without_blanks
from tunix.distillation import outputs
from tunix.distillation.outputs import Inputs
from tunix.models import calling
from tunix.ops.distill import TopK
from tunix.sft import inference
from tunix.sft.checkpoints import stamp
from tunix.sft.losses import batch_fields
from tunix.utils import checks, coordination, mesh as mesh_lib, tree
from tunix.utils.io import write_json

_FORMAT = 2  # version of the files; a folder of another version is refused
_PARTS = ("ids", "logps")  # columns of the row store, in the order of TopK


class TeacherCache:
  """The top-k log-probabilities of a teacher, in a folder.

  A trainer accepts a cache in place of the teacher. A cache without `teacher` only
  reads.

  Args:
    folder: folder of the files.
    teacher: the model that computes missing rows. Its weights must be those of the
      model that created the folder.
    top_k: number of tokens that are kept for each position; None reads it from the
      folder.
    temperature: temperature of the log-probabilities; None reads it from the folder, or
      is 1 for a new folder.
    data_sharding_axis: axes of the teacher's mesh that split a batch.

  Raises:
    ValueError: the folder has another teacher, `top_k` or temperature; or the folder is
      new, and `teacher` or `top_k` is missing.
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
    header = self._folder / "teacher.json"
    if header.exists():
      self._header = json.loads(header.read_text())
      self._check_header(top_k, temperature)
    else:
      self._header = self._new_header(top_k, temperature)
      if jax.process_index() == 0:
        write_json(header, self._header)
    self._rows = RowStore(self._folder)

  @property
  def top_k(self) -> int:
    """The number of tokens that are kept for each position."""
    return self._header["top_k"]

  @property
  def temperature(self) -> float:
    """The temperature of the log-probabilities."""
    return self._header["temperature"]

  @property
  def vocab_size(self) -> int | None:
    """The vocabulary size of the teacher; None if it is unknown."""
    return self._header["vocab_size"]

  def __len__(self) -> int:
    """Returns the number of cached rows."""
    return len(self._rows)

  def check(self, top_k: int, temperature: float) -> None:
    """Checks that the cache has the values that a strategy needs.

    Args:
      top_k: number of tokens; 0 accepts any number.
      temperature: temperature of the log-probabilities.

    Raises:
      ValueError: the cache has another number of tokens or another temperature.
    """
    needed = top_k or self.top_k, temperature
    if needed != (self.top_k, self.temperature):
      raise ValueError(
        f"the strategy needs the top {needed[0]} tokens at temperature {needed[1]}, "
        f"and the cache {self._folder} has {self.top_k} at {self.temperature}: change "
        "the strategy, or fill a cache in another folder"
      )

  def fill(self, batches: Iterable[Any]) -> int:
    """Computes the rows of batches that are not cached yet.

    Args:
      batches: batches of the training, or dicts of its inputs.

    Returns:
      The number of new rows.

    Raises:
      ValueError: a row is missing and there is no teacher.
    """
    before = len(self)
    for batch in batches:
      self.look_up(batch_fields(batch))
    return len(self) - before

  def look_up(self, inputs: Inputs) -> TopK:
    """Returns the tokens of all rows as NumPy arrays; computes missing rows.

    Args:
      inputs: fields of a batch on the host, with input_tokens [B, T].

    Raises:
      ValueError: a row is missing and there is no teacher.
    """
    keys = row_keys(inputs, self._header["fields"])
    missing = any(key not in self._rows for key in keys)
    if self._teacher is not None:
      # The teacher runs on all processes together: if one process misses a row, all of
      # them must run it. The text names this exchange in errors.
      missing = any(coordination.gather("rows missing in the teacher cache", missing))
    if missing:
      self._compute(inputs, keys)
    return TopK(*(self._rows.take(keys, part) for part in _PARTS))

  def _compute(self, inputs: Inputs, keys: list[str]) -> None:
    """Computes all rows of the batch in one program, and adds the new ones."""
    if self._teacher is None:
      missing = sum(key not in self._rows for key in keys)
      raise ValueError(
        f"{missing} of {len(keys)} rows are not in the cache {self._folder} of "
        f"{len(self)} rows: fill it with the batches of the training (the same tokens "
        "and the same padding), or give it the teacher"
      )
    rows = {k: x for k, x in inputs.items() if _are_arrays(x)}
    score = _score(self.top_k, self.temperature)
    # The keys pass through the same program as the rows, so that keys and rows of all
    # processes come back in the same order.
    # JAX arrays cannot hold strings, so each key becomes a row of int32 numbers.
    digests = np.asarray([np.frombuffer(bytes.fromhex(key), np.int32) for key in keys])
    arrays = {"inputs": rows, "digests": digests}
    out = inference.apply(self._teacher, score, arrays, self._axes)
    (ids, logps), digests = mesh_lib.to_host(out)
    all_keys = [digest.tobytes().hex() for digest in np.asarray(digests, np.int32)]
    # A dict, because equal rows of a batch have one key and are stored once.
    new = {key: row for row, key in enumerate(all_keys) if key not in self._rows}
    index = np.asarray(list(new.values()))
    self._rows.add({"ids": ids[index], "logps": logps[index]}, list(new))

  def _new_header(self, top_k: int | None, temperature: float | None) -> dict[str, Any]:
    if self._teacher is None or top_k is None:
      raise ValueError(
        f"there is no teacher cache in {self._folder}: give the teacher and top_k to "
        "create one"
      )
    checks.number("top_k", top_k, checks.COUNT, whole=True)
    size = calling.vocab_size(self._teacher)
    if size is not None and top_k > size:  # checked before the folder is created
      raise ValueError(f"top_k is {top_k}: expected at most the vocabulary size {size}")
    return {
      "format": _FORMAT,
      "teacher": _stamp(self._teacher),
      "top_k": top_k,
      "temperature": 1.0 if temperature is None else float(temperature),
      "vocab_size": size,
      # A cache without the teacher needs these names to compute the keys of rows.
      "fields": list(outputs.fields_of(self._teacher)),
    }

  def _check_header(self, top_k: int | None, temperature: float | None) -> None:
    if (form := self._header["format"]) != _FORMAT:
      raise ValueError(
        f"the teacher cache {self._folder} has format {form} and this version reads "
        f"{_FORMAT}: fill a cache in another folder"
      )
    self.check(top_k or 0, self.temperature if temperature is None else temperature)
    if self._teacher is not None and _stamp(self._teacher) != self._header["teacher"]:
      raise ValueError(
        f"the teacher cache {self._folder} was filled by a model with other weights "
        f"(content stamp {self._header['teacher']}): give that model, or another folder"
      )


@functools.cache
def _score(top_k: int, temperature: float) -> Any:
  """Returns the scoring function for these settings.

  It returns the same object for equal settings, so that JAX compiles it once.
  """
  return lambda model, inputs, digests: (
    outputs.top_tokens(model, inputs, top_k, temperature),
    digests,
  )


def row_keys(inputs: Inputs, fields: Collection[str]) -> list[str]:
  """Returns a key for each row, computed from all fields that the model receives.

  Args:
    inputs: fields of a batch on the host.
    fields: names of the fields that the model receives, see `outputs.fields_of`.

  Raises:
    ValueError: input_tokens is missing.
  """
  if "input_tokens" not in inputs:
    raise ValueError(
      f"the inputs are {sorted(inputs)}; expected input_tokens, which a teacher cache "
      "needs to find rows. Add input_tokens"
    )
  tokens = np.asarray(inputs["input_tokens"])
  arrays = {n: x for n, x in inputs.items() if n in fields and _are_arrays(x)}
  arrays = {**arrays, "input_tokens": tokens}
  plain = [
    (name, _plain(x))
    for name, some in sorted(arrays.items())
    for x in jax.tree.leaves(some)
  ]
  rows = len(tokens)
  keys = []
  for row in range(rows):
    parts = []
    for name, array in plain:
      # An array without a row axis, such as a table of positions, is part of each key.
      value = array[row] if array.shape[:1] == (rows,) else array
      value = without_blanks(value) if name == "images" else value
      parts += [f"{name}{value.shape}{value.dtype}".encode(), value.tobytes()]
    keys.append(row_key(parts))
  return keys


def _are_arrays(field: object) -> bool:
  """Returns True for an array, or several of them as of images."""
  leaves = jax.tree.leaves(field)
  return bool(leaves) and all(map(tree.is_array, leaves))


def _plain(array: object) -> np.ndarray:
  """Converts to int32 or float32, so that equal numbers have equal bytes."""
  array = np.asarray(array)
  return array.astype(np.int32 if array.dtype.kind in "biu" else np.float32)


def _stamp(model: nnx.Module) -> str:
  return stamp.content_stamp(nnx.state(model, nnx.Param))
