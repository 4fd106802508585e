"""What a run is on, for its page: model, data, devices, versions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

import tunix

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe(
  model: str, reports: Mapping[str, Any], batch: str, mesh: Mesh | None
) -> dict[str, Any]:
  """As JSON.

  Args:
    model: its parameters and precision, in words.
    reports: what the scan found of "train" and "eval"; their texts are kept.
    batch: what a step computes, in words.
    mesh: of the run; None: one device.
  """
  kinds = sorted({device.device_kind for device in jax.devices()})
  used = 1 if mesh is None else mesh.size
  versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
  return {
    "data": {name: str(report) for name, report in reports.items()},
    "model": model,
    "step": batch,
    "devices": f"{used} of {jax.device_count()}, {', '.join(kinds)}",
    "mesh": {} if mesh is None else {str(k): v for k, v in mesh.shape.items()},
    "processes": jax.process_count(),
    "tunix": tunix.__version__,
    "python": platform.python_version(),
    "packages": ", ".join(versions),
    "machine": platform.platform(),
  }
