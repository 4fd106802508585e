"""Joins the processes of a run, and checks that all of them run the same.

A run in several processes is started with the same command in each of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax

import tunix
from tunix.cli.settings import keys
from tunix.cli.settings.run import DistributedSettings, RunSettings
from tunix.sft import launch
from tunix.utils import coordination

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
PREFIX = "distributed."  # of the keys that differ between processes


def start(config: RunSettings) -> None:
  """Joins the other processes if the settings name a coordinator.

  Call it before JAX is used.

  Raises:
    ValueError: settings that contradict each other, or no mesh over the processes.
    coordination.AbsentError: the coordinator does not answer.
  """
  settings = config.distributed
  if _must_join(settings) and not config.mesh:
    raise ValueError(
      f"distributed.coordinator is {settings.coordinator!r} and mesh is empty, so that "
      "every process would train alone. Spread the run with mesh, as in "
      "--mesh='{fsdp: -1}'"
    )
  join(settings)


def join(settings: DistributedSettings) -> None:
  """Calls `jax.distributed.initialize` if the settings name a coordinator.

  Does nothing if the process has joined already.

  Raises:
    ValueError: settings that contradict each other.
    coordination.AbsentError: the coordinator does not answer.
  """
  if _must_join(settings):
    launch.initialize(
      None if settings.coordinator == "auto" else settings.coordinator,
      settings.num_processes,
      settings.process_id,
      timeout_s=settings.timeout_s,
      heartbeat_s=settings.heartbeat_s,
      stall_s=settings.stall_s,
    )


def _must_join(settings: DistributedSettings) -> bool:
  is_address = settings.coordinator not in (None, "auto")
  numbers = (settings.num_processes, settings.process_id)
  if any((number is not None) != is_address for number in numbers):
    raise ValueError(
      f"distributed.coordinator is {settings.coordinator!r}, num_processes "
      f"{settings.num_processes} and process_id {settings.process_id}; expected all "
      "three, or coordinator=auto alone"
    )
  return settings.coordinator is not None and not jax.distributed.is_initialized()


def compare(config: RunSettings, fingerprints: Mapping[str, str]) -> None:
  """Refuses processes whose settings or files differ.

  Args:
    config: settled settings of this process.
    fingerprints: SHA-256 of what the run reads, by name.

  Raises:
    ValueError: names what differs, and on which process.
    coordination.AbsentError: a process did not reach this point in time.
  """
  values = {
    key: str(value)
    for key, value in keys.flatten(config).items()
    if not key.startswith(PREFIX)
  }
  agree(config.distributed, values, fingerprints)
  coordination.forget_failure()  # of an earlier run; the others have read it


def agree(
  settings: DistributedSettings, values: Mapping[str, str], files: Mapping[str, Any]
) -> None:
  """Refuses processes with different versions, settings or contents of files.

  Args:
    settings: section `distributed`, for the time-out.
    values: settings by key.
    files: digests of files by name.

  Raises:
    ValueError: names what differs, and on which process.
    coordination.AbsentError: a process did not reach this point in time.
  """
  if jax.process_count() == 1:
    return
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  versions |= {"python": platform.python_version(), "the code of tunix": _code()}
  for what, entries, remedy in (
    ("versions", versions, "install the same on every machine"),
    ("configuration", dict(values), "give every process the same configuration"),
    ("files", dict(files), "give every process the same files"),
  ):
    coordination.agree(what, entries, remedy, settings.timeout_s)


def _code() -> str:
  """Returns a digest of this package's source."""
  folder = pathlib.Path(tunix.__file__).parent
  digest = hashlib.sha256()
  for file in sorted(folder.rglob("*.py")):
    digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
  return digest.hexdigest()[:16]
