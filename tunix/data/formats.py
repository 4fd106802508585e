"""Records of fine-tuning data, and JSON lines on disk as a sequence of them.

A record is a dict of one of three kinds; further keys are allowed and ignored:

  {"prompt": "text" or [messages], "response": "text"}
  {"messages": [{"role": ..., "content": ...}, ...]}
  {"text": "..."}

A message may carry `"weight": 0` or `"train": false`: the turn is shown to the model
but not learned. A record may carry "tools", JSON schemas for the chat template.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Kind = Literal["prompt", "messages", "text"]

_EXPECTED = (
  'expected {"prompt": ..., "response": ...}, {"messages": [...]} or {"text": ...}'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """What the records of a file look like.

  Attributes:
    expected: in words, for error messages.
    check: (record, its place) -> its kind; raises ValueError for a record that is
      wrong.
  """

  expected: str
  check: Callable[[Any, str], str]


class JsonlRecords(Sequence[dict[str, Any]]):
  """The records of a JSON-lines file, read when they are asked for.

  Memory holds 16 bytes a record (where its line begins, and its number), never the
  file. Blank lines are skipped. Safe to read from many threads, and to pickle.
  """

  def __init__(self, path: str | os.PathLike[str], form: Form | None = None):
    """Indexes the file in one pass.

    Args:
      path: of the file.
      form: what its records look like; None: those of fine-tuning.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file has no record.
    """
    self.form = form or FINE_TUNING
    self.path = pathlib.Path(path).expanduser()
    if not self.path.is_file():
      what = "a folder" if self.path.is_dir() else "no such file"
      raise FileNotFoundError(
        f"data file {str(self.path)!r}: {what}; give a file of JSON lines"
      )
    self._offsets, self._lines, self.fingerprint = _index(self.path)
    if not len(self):
      raise ValueError(
        f"{self.path} is empty; {self.form.expected}, one JSON object a line"
      )

  def __len__(self) -> int:
    return len(self._lines)

  def where(self, index: int) -> str:
    """The place of a record, as `file:line` with lines counted from 1."""
    return f"{self.path}:{self._lines[index]}"

  def __getitem__(self, index: Any) -> Any:
    """Record `index`, parsed and checked.

    Raises:
      ValueError: the line is no valid record; the message names file and line.
    """
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    index = range(len(self))[index]
    # Opening anew costs microseconds and needs no lock between threads.
    with self.path.open("rb") as file:
      file.seek(int(self._offsets[index]))
      line = file.readline()
    return parse_line(line, self.where(index), self.form)

  def validate(self) -> dict[str, int]:
    """Checks the structure of every record, without tokenising.

    Returns:
      How many records there are of each kind.

    Raises:
      ValueError: for the first record that is wrong.
    """
    return dict(collections.Counter(kind for _, kind in self._checked()))

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """All records, in one pass over the file."""
    return (record for record, _ in self._checked())

  def _checked(self) -> Iterator[tuple[dict[str, Any], str]]:
    """Every record with its kind."""
    with self.path.open("rb") as file:
      for index, line in enumerate(line for line in file if line.strip()):
        where = self.where(index)
        record = _parsed(line, where, self.form)
        yield record, self.form.check(record, where)


def _index(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, str]:
  offsets, lines, digest, position = [], [], hashlib.sha256(), 0
  with path.open("rb") as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        offsets.append(position)
        lines.append(number)
      position += len(line)
      digest.update(line)
  return np.asarray(offsets, np.int64), np.asarray(lines, np.int64), digest.hexdigest()


def place(records: Sequence[Mapping[str, Any]], index: int) -> str:
  """Where a record comes from, for error messages."""
  where = getattr(records, "where", None)
  return where(index) if where is not None else f"record {index}"


def parse_line(line: bytes, where: str, form: Form | None = None) -> dict[str, Any]:
  """One line as a checked record.

  Raises:
    ValueError: invalid JSON, or not a record of a known kind.
  """
  form = form or FINE_TUNING
  record = _parsed(line, where, form)
  form.check(record, where)
  return record


def _parsed(line: bytes, where: str, form: Form) -> Any:
  try:
    return json.loads(line)
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{where}: invalid JSON ({error}); {form.expected}, one object a line"
    ) from error
  except RecursionError as error:
    raise ValueError(
      f"{where}: the JSON is nested too deeply; {form.expected}, one object a line"
    ) from error


def record_kind(record: Any, where: str) -> Kind:
  """Which kind of record this is, after checking its fields.

  Raises:
    ValueError: a needed field is missing or of the wrong type.
  """
  check_mapping(record, where, _EXPECTED)
  kinds: list[Kind] = [k for k in ("prompt", "messages", "text") if k in record]
  if len(kinds) != 1:
    raise ValueError(f"{where}: found {fields_of(record)}, {_EXPECTED}")
  _CHECKS[kinds[0]](record, where)
  return kinds[0]


def fields_of(record: Mapping[str, Any]) -> str:
  """The names of a record's fields, for messages."""
  return "fields " + ", ".join(map(repr, record)) if record else "no fields"


def check_mapping(record: Any, where: str, expected: str) -> None:
  """Refuses what is no object, and "tools" that are no schemas.

  Raises:
    ValueError: begins with `where`.
  """
  if not isinstance(record, Mapping):
    raise ValueError(f"{where}: found a {_name(record)}, {expected}")
  if not isinstance(record.get("tools", []), list | None):
    raise ValueError(
      f'{where}: "tools" is a {_name(record["tools"])}, expected a list of JSON schemas'
    )
  for tool in record.get("tools") or []:
    if not isinstance(tool, Mapping):
      raise ValueError(
        f'{where}: "tools" holds a {_name(tool)}, expected a list of JSON schemas'
      )


def _check_prompt(record: Mapping[str, Any], where: str) -> None:
  if "response" not in record:
    raise ValueError(f'{where}: "prompt" without "response"; {_EXPECTED}')
  check_string(record, "response", where)
  if isinstance(record["prompt"], list):
    check_messages(record["prompt"], f'{where}: "prompt"')
  else:
    check_string(record, "prompt", where, also=" or a list of messages")


def _check_conversation(record: Mapping[str, Any], where: str) -> None:
  check_messages(record["messages"], f'{where}: "messages"')


def _check_text(record: Mapping[str, Any], where: str) -> None:
  check_string(record, "text", where)
  if not record["text"].strip():
    raise ValueError(f'{where}: "text" is blank, expected something to learn')


def check_string(
  record: Mapping[str, Any], field: str, where: str, also: str = ""
) -> None:
  """Refuses a field that is no string.

  Raises:
    ValueError: begins with `where`.
  """
  if not isinstance(record[field], str):
    raise ValueError(
      f'{where}: "{field}" is a {_name(record[field])}, expected a string{also}'
    )


def check_messages(messages: Any, where: str) -> None:
  """Refuses what is no list of messages.

  Raises:
    ValueError: begins with `where`.
  """
  if not isinstance(messages, list) or not messages:
    found = "an empty list" if messages == [] else f"a {_name(messages)}"
    raise ValueError(f"{where} is {found}, expected a list of messages")
  for number, message in enumerate(messages):
    _check_message(message, f"{where}[{number}]")


def _check_message(message: Any, where: str) -> None:
  if not isinstance(message, Mapping):
    raise ValueError(
      f'{where} is a {_name(message)}, expected {{"role": ..., "content": ...}}'
    )
  role, content = message.get("role"), message.get("content")
  if not isinstance(role, str):
    raise ValueError(
      f'{where}: "role" is {_name(role)}, expected a string such as "user"'
    )
  silent = content is None and message.get("tool_calls")
  if not isinstance(content, str) and not silent:
    raise ValueError(
      f'{where}: "content" is {_name(content)}, expected a string (text alone is read)'
    )
  if message.get("weight", 1) not in (0, 1):
    raise ValueError(
      f'{where}: "weight" is {message["weight"]!r}, expected 0 (do not train) or 1'
    )
  if not isinstance(message.get("train", True), bool):
    raise ValueError(
      f'{where}: "train" is {message["train"]!r}, expected true or false'
    )


def _name(value: Any) -> str:
  return "missing" if value is None else f"{type(value).__name__}"


_CHECKS = {
  "prompt": _check_prompt,
  "messages": _check_conversation,
  "text": _check_text,
}

FINE_TUNING = Form(expected=_EXPECTED, check=record_kind)
