"""The state of a data iterator, as JSON of bounded size.

Grain's loaders put the `repr` of the data into their state, to notice other data when
they are restored. Where that prints the data themselves (a plain dataclass does), it is
as large as they are: such texts are kept as a digest, and put back at restoring.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_LONGEST = 4096  # characters of a text that is kept as it is
_DIGEST = "sha256:"


def read(iterator: Any, *, warn: bool = False) -> dict[str, Any]:
  """`{"iterator": state}` or `{"iterator_bytes": text}`; {} where it has no state.

  Args:
    iterator: has `get_state`, or not.
    warn: about texts that are too long to be kept.

  Raises:
    ValueError: the state is bytes that are no UTF-8 text.
  """
  if not hasattr(iterator, "get_state"):
    return {}
  state = iterator.get_state()
  if not isinstance(state, bytes):
    return {"iterator": _short(state, warn)}
  try:
    text = state.decode()
  except UnicodeDecodeError as e:
    raise ValueError(
      f"get_state of the data iterator ({type(iterator).__name__}) gave bytes that are "
      "no UTF-8 text, and checkpoints keep it as JSON: give a dict, or encode them "
      "(base64, hex)"
    ) from e
  try:
    value = json.loads(text)
  except ValueError:
    return {"iterator_bytes": text}
  short = _short(value, warn)
  if short == value:
    return {"iterator_bytes": text}
  return {"iterator_bytes": json.dumps(short)}


def restore(iterator: Any, saved: dict[str, Any]) -> bool:
  """Sets the state that `read` gave, among other keys; returns whether there was one.

  Raises:
    ValueError: the iterator is over other data.
  """
  state = saved.get("iterator", saved.get("iterator_bytes"))
  if state is None or not hasattr(iterator, "set_state"):
    return False
  if _DIGEST in json.dumps(state):
    state = _completed(state, iterator, "iterator_bytes" in saved)
  iterator.set_state(state.encode() if "iterator_bytes" in saved else state)
  return True


def _completed(state: Any, iterator: Any, is_bytes: bool) -> Any:
  """The saved state with the texts of this iterator in place of their digests."""
  here: dict[str, str] = {}

  def note(text: str) -> str:
    here[_shortened(text)] = text
    return text

  def whole(text: str) -> str:
    if not text.startswith(_DIGEST):
      return text
    if text not in here:
      raise ValueError(
        "the training data is not what the run was started with: a description of it "
        "in the iterator's state has changed; resume with the same data, or use "
        "another folder"
      )
    return here[text]

  now = iterator.get_state()
  _map_texts(note, json.loads(now) if is_bytes else now)
  value = _map_texts(whole, json.loads(state) if is_bytes else state)
  return json.dumps(value) if is_bytes else value


def _short(state: Any, warn: bool) -> Any:
  def one(text: str) -> str:
    if warn and len(text) > _LONGEST:
      _log.warning(
        "the state of the training data's iterator holds a text of %d characters "
        "(%s...): the repr of a class prints its data, at a cost in every checkpoint; "
        "give the class a __repr__ that names it only",
        len(text),
        text[:40],
      )
    return _shortened(text)

  return _map_texts(one, state)


def _shortened(text: str) -> str:
  if len(text) <= _LONGEST:
    return text
  return _DIGEST + hashlib.sha256(text.encode()).hexdigest()


def _map_texts(function: Callable[[str], str], value: Any) -> Any:
  if isinstance(value, str):
    return function(value)
  if isinstance(value, dict):
    return {key: _map_texts(function, item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_map_texts(function, item) for item in value)
  return value
