"""The state of a data iterator as JSON of bounded size.

Grain's loaders put the `repr` of their data into the state, to detect other data when
the state is restored. The `repr` of a plain dataclass prints all of its data, and is as
large as the data. A text of more than 4096 characters is therefore saved as its digest.
Restoring replaces the digest by the text with this digest in the iterator's state.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_LONGEST = 4096  # characters of a text that is saved unchanged
_DIGEST = "sha256:"


def read(iterator: Any, *, warn: bool = False) -> dict[str, Any]:
  """Returns the state of an iterator, for JSON.

  Args:
    iterator: any iterator, with or without `get_state`.
    warn: log a warning for each text that is saved as a digest.

  Returns: {"iterator": state}, {"iterator_bytes": text} if the state is bytes, or {} if
    the iterator has no state.

  Raises:
    ValueError: The state is bytes that are no UTF-8 text.
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
      "no UTF-8 text; expected values that JSON can hold. Return a dict, or encode the "
      "bytes (base64, hex)."
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
  """Restores the state of an iterator.

  Args:
    iterator: any iterator, with or without `set_state`.
    saved: a dict with the keys of `read`; other keys are ignored.

  Returns: True if a state was restored.

  Raises:
    ValueError: The iterator reads other data.
  """
  state = saved.get("iterator", saved.get("iterator_bytes"))
  if state is None or not hasattr(iterator, "set_state"):
    return False
  if _DIGEST in json.dumps(state):
    state = _completed(state, iterator, "iterator_bytes" in saved)
  iterator.set_state(state.encode() if "iterator_bytes" in saved else state)
  return True


def _completed(state: Any, iterator: Any, is_bytes: bool) -> Any:
  """Returns the saved state with texts of this iterator in place of their digests."""
  texts: dict[str, str] = {}  # the texts of this iterator by digest

  def note(text: str) -> str:
    texts[_shortened(text)] = text
    return text

  def whole(text: str) -> str:
    if not text.startswith(_DIGEST):
      return text
    if text not in texts:
      raise ValueError(
        "the training data is not what the run was started with: a description of it "
        "in the iterator's state has changed; resume with the same data, or use "
        "another folder"
      )
    return texts[text]

  now = iterator.get_state()
  _map_texts(note, json.loads(now) if is_bytes else now)
  value = _map_texts(whole, json.loads(state) if is_bytes else state)
  return json.dumps(value) if is_bytes else value


def _short(state: object, warn: bool) -> Any:
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


def _map_texts(function: Callable[[str], str], value: object) -> Any:
  if isinstance(value, str):
    return function(value)
  if isinstance(value, dict):
    return {key: _map_texts(function, item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_map_texts(function, item) for item in value)
  return value
