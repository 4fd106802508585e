"""The Tinker training API: many LoRA adapters trained over one frozen base model.

`tunix.tinker.ServiceClient` and the other names of `client` are loaded when they are
first used, so that importing a part of the package loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

_CLIENT = ("AdamParams", "Datum", "SamplingParams", "ServiceClient")


def __getattr__(name: str) -> Any:
  if name not in _CLIENT:
    raise AttributeError(f"module 'tunix.tinker' has no attribute {name!r}")
  return getattr(importlib.import_module("tunix.tinker.client"), name)
