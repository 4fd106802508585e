"""Keys as files of earlier versions spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunix.cli.convert import Argument

# Two names of one key, both as good; `dataset_name` is another.
ALIASES = {"checkpoint.every_n_steps": "checkpoint.save_every_n_steps"}

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
    ValueError: both are set; begins with the old key.
  """
  for old, new in (ALIASES | RENAMED).items():
    section, _, name = old.partition(".")
    owner = values.get(section)
    if not isinstance(owner, dict) or name not in owner:
      continue
    value, target = owner.pop(name), new.partition(".")[2]
    if _is_null(value):
      continue
    if not _is_null(owner.get(target)):
      raise ValueError(f"{old} is another name of {new}, which is set too: give one")
    owner[target] = value
    origins[new] = origins[old]
    if old in RENAMED:
      note(f"{origins[old]}: {old} is called {new} now")


def _is_null(value: Any) -> bool:
  return (value.value if isinstance(value, Argument) else value) is None
