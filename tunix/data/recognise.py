"""Which kind of record a record is, known by its keys alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from tunix.data import forms, records
from tunix.data.records import LABELLED, PAIRS, PROMPTS, SFT, Kind

# Keys by which records in our own form are known. The order counts: a pair has a prompt
# too, and is no mere prompt.
_OURS: tuple[tuple[Kind, tuple[tuple[str, ...], ...]], ...] = (
  (PAIRS, (("chosen", "rejected"),)),
  (LABELLED, (("completion", "label"),)),
  (SFT, (("prompt", "response"), ("messages",), ("text",))),
  (PROMPTS, (("prompt",),)),
)


class Recognised(NamedTuple):
  """What a record was taken for.

  Attributes:
    kind: how it is read.
    keys: by which it was known.
    library: whose form it has; None: ours.
  """

  kind: Kind
  keys: tuple[str, ...]
  library: str | None


def recognise(record: Any, where: str) -> Recognised:
  """The kind of a record.

  Args:
    record: one record of a file.
    where: its place, for the message.

  Raises:
    ValueError: it is no object, or its keys are those of no kind; begins with `where`.
  """
  records.check_mapping(record, where, _expected())
  for kind, ours in _OURS:
    form = forms.find(record, *kind.forms)
    needed = next((keys for keys in ours if set(keys) <= record.keys()), ())
    # Beside pairs and labelled completions Alpaca's instruction is another prompt.
    if kind in (PAIRS, LABELLED) and form in (None, forms.ALPACA_PROMPT):
      known = {*needed, *(form.needs if form and needed else ())}
    else:
      known = form.needs if form else {*needed}
    if not known:
      continue
    keys = tuple(key for key in record if key in known)
    return Recognised(kind, keys, form.name if form else None)
  raise ValueError(f"{where}: found {records.describe_fields(record)}, {_expected()}")


def _expected() -> str:
  names = [" with ".join(keys) for _, ours in _OURS for keys in ours]
  foreign = dict.fromkeys(f.name for kind, _ in _OURS for f in kind.forms)
  return f"expected {', '.join(names)}, or the keys of {', '.join(foreign)}"
