"""The only reader of os.environ."""

from __future__ import annotations

import os
from collections.abc import Mapping


def pathways_available() -> bool:
  """Whether JAX talks to devices through Pathways ('proxy' in JAX_PLATFORMS)."""
  return "proxy" in os.environ.get("JAX_PLATFORMS", "")


# Variables that say how W&B behaves, not that it is wanted; it sets the last itself.
_WANDB_MANNERS = {"WANDB_MODE", "WANDB_SILENT", "WANDB_QUIET", "WANDB_SERVICE"}


def wandb_requested() -> bool:
  """Whether the user set Weights & Biases up.

  Any WANDB_* variable counts (a key, a project, the mode "online" or "offline"), but
  those that only quieten it; WANDB_MODE=disabled and WANDB_DISABLED switch it off.
  """
  mode = os.environ.get("WANDB_MODE", "")
  disabled = os.environ.get("WANDB_DISABLED", "").lower() not in ("", "0", "false")
  if mode == "disabled" or disabled:
    return False
  asked = {name for name in os.environ if name.startswith("WANDB_")}
  return bool(mode) or bool(asked - _WANDB_MANNERS - {"WANDB_DISABLED"})


def inherited(changes: Mapping[str, str]) -> dict[str, str]:
  """The environment of a process that we start: ours, with changes."""
  return {**os.environ, **changes}
