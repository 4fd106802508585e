"""Finds the kind of a record from its keys alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from tunix.data import fields, forms
from tunix.data.records import LABELLED, PAIRS, PROMPTS, SFT, Kind
from tunix.generate.tokenizer import messages

# Keys of each kind's own forms. The first kind that matches is taken. PROMPTS comes
# last, because pairs also have a "prompt".
_OWN_KEYS: tuple[tuple[Kind, tuple[tuple[str, ...], ...]], ...] = (
  (PAIRS, (("chosen", "rejected"),)),
  (LABELLED, (("completion", "label"),)),
  (SFT, (("prompt", "response"), ("messages",), ("text",))),
  (PROMPTS, (("prompt",),)),
)


class Recognized(NamedTuple):
  """The kind of a record, and the keys that it was recognized by.

  Attributes:
    kind: kind of the record.
    keys: keys of the record that determined the kind.
    library: name of the library whose form the record has; None for our own form.
  """

  kind: Kind
  keys: tuple[str, ...]
  library: str | None


def recognize(record: Any, where: str) -> Recognized:
  """Returns the kind of a record.

  Args:
    record: one record of a file.
    where: place of the record, for the message.

  Raises:
    ValueError: the record is no object, or its keys match no kind; begins with `where`.
  """
  fields.check_mapping(record, where, _expected())
  record = messages.present(record)
  for kind, own_forms in _OWN_KEYS:
    form = forms.find(record, *kind.forms)
    needed = next((keys for keys in own_forms if set(keys) <= record.keys()), ())
    # An Alpaca instruction is only another way to give the prompt of a pair or of a
    # labeled completion, so it does not determine these kinds.
    if kind in (PAIRS, LABELLED) and form in (None, forms.ALPACA_PROMPT):
      columns = {*needed, *(form.needs if form and needed else ())}
    else:
      columns = form.needs if form else {*needed}
    if not columns:
      continue
    keys = tuple(key for key in record if key in columns)
    return Recognized(kind, keys, form.name if form else None)
  raise ValueError(f"{where}: found {fields.describe(record)}, {_expected()}")


def _expected() -> str:
  names = [" with ".join(keys) for _, own_forms in _OWN_KEYS for keys in own_forms]
  libraries = dict.fromkeys(f.name for kind, _ in _OWN_KEYS for f in kind.forms)
  return f"expected {', '.join(names)}, or the keys of {', '.join(libraries)}"
