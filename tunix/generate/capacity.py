"""What memory holds, by arithmetic: sizes that cannot fit are refused before anything
is allocated, with the largest that can."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import jax

from tunix.perf import programs

# Limits of a container (cgroup v2 and v1), where there are any.
_CONTAINER = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def memory_bytes() -> int:
  """Of all devices of the run together; of the hosts where devices do not say."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if limit := stats.get("bytes_limit"):
    return limit * jax.device_count()
  known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for file in map(pathlib.Path, _CONTAINER):
    if file.is_file() and (text := file.read_text().strip()).isdigit():
      known.append(int(text))
  return min(known) * jax.process_count()


def require(
  name: str, value: int, bytes_of: Callable[[int], int], what: str, least: int = 1
) -> None:
  """Refuses a size whose arrays cannot fit into memory, however it is laid out.

  Args:
    name: of the size, for the message.
    value: the size.
    bytes_of: size -> bytes that it takes at least; grows with it.
    what: takes them, for the message.
    least: the smallest size that makes sense.

  Raises:
    ValueError: it does not fit; says the largest that does.
  """
  if programs.is_recording():  # nothing is allocated, and least of all here
    return
  memory, needed = memory_bytes(), bytes_of(value)
  if needed <= memory:
    return
  fits, low, high = 0, least, value - 1
  while low <= high:
    middle = (low + high) // 2
    if bytes_of(middle) <= memory:
      fits, low = middle, middle + 1
    else:
      high = middle - 1
  remedy = f"at most {fits} fits" if fits else "not even the smallest fits"
  raise ValueError(
    f"{name} is {value}: {what} would take {needed / 2**30:,.1f} GiB and there are "
    f"{memory / 2**30:,.1f} GiB of memory; {remedy}"
  )
