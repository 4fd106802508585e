"""Refuses sizes that cannot fit into memory, before anything is allocated."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import jax

from tunix.perf import programs

# Files with the memory limit of a container (cgroup v2 and v1).
_CONTAINER = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def memory_bytes() -> int:
  """Returns the bytes of memory of all devices together.

  If the devices report no memory, it is the memory of the hosts.
  """
  stats = jax.local_devices()[0].memory_stats() or {}
  if limit := stats.get("bytes_limit"):
    return limit * jax.device_count()
  limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for file in map(pathlib.Path, _CONTAINER):
    if file.is_file() and (text := file.read_text().strip()).isdigit():
      limits.append(int(text))
  return min(limits) * jax.process_count()


def require(
  name: str, value: int, bytes_of: Callable[[int], int], subject: str
) -> None:
  """Refuses a size whose arrays cannot fit into memory with any layout.

  Args:
    name: name of the size, first word of the message.
    value: the size, at least 1.
    bytes_of: lower bound of the bytes that a size takes; grows with the size.
    subject: the arrays that take them, for the message.

  Raises:
    ValueError: the size does not fit; the message names the largest that does.
  """
  # A plan allocates nothing, and may be for devices that this machine does not have.
  if programs.is_recording():
    return
  memory, needed = memory_bytes(), bytes_of(value)
  if needed <= memory:
    return
  # Bisection for the largest size that fits; 0 if none does.
  fits, low, high = 0, 1, value - 1
  while low <= high:
    middle = (low + high) // 2
    if bytes_of(middle) <= memory:
      fits, low = middle, middle + 1
    else:
      high = middle - 1
  remedy = f"at most {fits} fits" if fits else "not even the smallest fits"
  raise ValueError(
    f"{name} is {value}: {subject} would take {needed / 2**30:,.1f} GiB and there are "
    f"{memory / 2**30:,.1f} GiB of memory; {remedy}"
  )
