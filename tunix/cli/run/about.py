"""Describes a run for its page: model, data, devices, versions."""

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
  """Returns the description as JSON types.

  Args:
    model: text about parameters and precision.
    reports: reports of the scan of "train" and "eval".
    batch: text about the batch of a step.
    mesh: mesh of the run; None: one device.
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
