"""Keys as files of earlier versions spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunix.cli.convert import Argument

# Two names of one key, both as good.
ALIASES = {
  "checkpoint.every_n_steps": "checkpoint.save_every_n_steps",
  "dataset_name": "data.train",
}

# Old spelling -> new spelling.
RENAMED = {
  "lora.rslora": "lora.use_rslora",
  "lora.dora": "lora.use_dora",
}


def settle(
  values: dict[str, Any], origins: dict[str, str], note: Callable[[str], None]
) -> None:
  """Moves values from old keys to new ones, in place.

  Args:
    values: nested, merged from all layers.
    origins: where each dotted key was set.
    note: is told of every old key that is set.

  Raises:
    ValueError: both are set, to different values; begins with the old key.
  """
  for old, new in (ALIASES | RENAMED).items():
    value = _take(values, old)
    if _plain(value) is None:
      continue
    section, _, name = new.partition(".")
    owner = values.setdefault(section, {})
    if not isinstance(owner, dict):  # which is refused where sections are read
      continue
    already = _plain(owner.get(name))
    if already not in (None, _plain(value)):
      raise ValueError(
        f"{old} is {_plain(value)!r} and {new} {already!r}, two names of one setting: "
        "give one of them"
      )
    owner[name] = value
    origins[new] = origins[old]
    if old in RENAMED:
      note(f"{origins[old]}: {old} is called {new} now")


def _take(values: dict[str, Any], key: str) -> Any:
  section, _, name = key.rpartition(".")
  owner = values.get(section) if section else values
  return owner.pop(name, None) if isinstance(owner, dict) else None


def _plain(value: Any) -> Any:
  return value.value if isinstance(value, Argument) else value
