"""Environment variables that change the behavior of tunix."""

from __future__ import annotations

import os
from collections.abc import Mapping


def pathways_available() -> bool:
  """Returns True if JAX uses devices through Pathways ('proxy' in JAX_PLATFORMS)."""
  return "proxy" in os.environ.get("JAX_PLATFORMS", "")


# Variables that configure W&B without requesting it. W&B sets the last one itself.
_WANDB_STYLE = {"WANDB_MODE", "WANDB_SILENT", "WANDB_QUIET", "WANDB_SERVICE"}


def wandb_requested() -> bool:
  """Returns True if the environment requests logging to Weights & Biases.

  Any WANDB_* variable counts (a key, a project, the mode "online" or "offline"), except
  variables that only silence it. WANDB_MODE=disabled and WANDB_DISABLED switch it off.
  """
  mode = os.environ.get("WANDB_MODE", "")
  disabled = os.environ.get("WANDB_DISABLED", "").lower() not in ("", "0", "false")
  if mode == "disabled" or disabled:
    return False
  names = {name for name in os.environ if name.startswith("WANDB_")}
  return bool(mode) or bool(names - _WANDB_STYLE - {"WANDB_DISABLED"})


def inherited(changes: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment for a child process: that of this one, with changes."""
  return {**os.environ, **changes}


def value(name: str) -> str | None:
  """Returns a variable of the environment; None if it is not set or empty."""
  return os.environ.get(name) or None
