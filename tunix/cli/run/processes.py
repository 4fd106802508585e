"""One run in several processes: they find each other, and are the same."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax

import tunix
from tunix.cli.build.data import RunData
from tunix.cli.settings import keys
from tunix.cli.settings.run import DistributedSettings, RunSettings
from tunix.sft import launch
from tunix.utils import coordination

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
PREFIX = "distributed."  # of the keys that differ between processes


def start(config: RunSettings) -> None:
  """Joins the other processes, if the run has any; before JAX is used.

  Raises:
    ValueError: settings that do not fit together, or no mesh to share.
    coordination.AbsentError: the coordinator does not answer.
  """
  told = config.distributed
  if told.coordinator is not None and not config.mesh and not _joined(told):
    raise ValueError(
      f"distributed.coordinator is {told.coordinator!r} and mesh is empty: every "
      "process would train alone; spread the run with mesh, as in --mesh='{fsdp: -1}'"
    )
  join(told)


def join(told: DistributedSettings) -> None:
  """Joins the other processes that `told` speaks of, if it speaks of any.

  Raises:
    ValueError: settings that do not fit together.
    coordination.AbsentError: the coordinator does not answer.
  """
  if _joined(told):
    return
  detected = told.coordinator == "auto"
  launch.initialize(
    None if detected else told.coordinator,
    told.num_processes,
    told.process_id,
    timeout_s=told.timeout_s,
    heartbeat_s=told.heartbeat_s,
    stall_s=told.stall_s,
  )


def _joined(told: DistributedSettings) -> bool:
  """Whether there is nothing (more) to join."""
  by_hand = told.coordinator not in (None, "auto")
  if any((x is not None) != by_hand for x in (told.num_processes, told.process_id)):
    raise ValueError(
      f"distributed.coordinator is {told.coordinator!r}, num_processes "
      f"{told.num_processes} and process_id {told.process_id}: give all three, or "
      "coordinator=auto alone"
    )
  return told.coordinator is None or jax.distributed.is_initialized()


def compare(config: RunSettings, data: RunData) -> None:
  """Refuses processes that would not compute the same.

  Raises:
    ValueError: names what differs, and on which process.
    coordination.AbsentError: one of them did not come this far.
  """
  values = {
    key: str(value)
    for key, value in keys.flatten(config).items()
    if not key.startswith(PREFIX)
  }
  agree(config.distributed, values, data.fingerprints)


def agree(
  told: DistributedSettings, values: Mapping[str, str], files: Mapping[str, Any]
) -> None:
  """Refuses processes with other versions, settings or content of files.

  Raises:
    ValueError: names what differs, and on which process.
    coordination.AbsentError: one of them did not come this far.
  """
  if jax.process_count() == 1:
    return
  wait = told.timeout_s
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  versions |= {"python": platform.python_version(), "the code of tunix": _code()}
  coordination.agree("versions", versions, "install the same on every machine", wait)
  remedy = "give every process the same configuration"
  coordination.agree("configuration", dict(values), remedy, wait)
  remedy = "give every process the same files"
  coordination.agree("files", dict(files), remedy, wait)


def _code() -> str:
  """A digest of this package's source."""
  folder = pathlib.Path(tunix.__file__).parent
  digest = hashlib.sha256()
  for file in sorted(folder.rglob("*.py")):
    digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
  return digest.hexdigest()[:16]
