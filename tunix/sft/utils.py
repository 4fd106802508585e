"""Small helpers around training: masks, memory, time."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.ops import masks
from tunix.sft.module_state import is_lora

_log = logging.getLogger(__name__)


def make_causal_attn_mask(input_mask: jax.Array) -> jax.Array:
  """Who attends to whom: causal, and no padding as a key.

  Args:
    input_mask: (B, T), true on tokens, false on padding.

  Returns:
    (B, T, T) bool, [b, query, key].

  Raises:
    ValueError: the mask is not two-dimensional.
  """
  if input_mask.ndim != 2:
    raise ValueError(
      f"input_mask has shape {input_mask.shape}, it must be (batch, tokens)"
    )
  index = jnp.arange(input_mask.shape[1])
  return masks.causal_mask(index, index) & input_mask.astype(bool)[:, None, :]


def build_positions_from_mask(input_mask: jax.Array) -> jax.Array:
  """Positions that count tokens only: 0 at the first one, wherever it stands.

  Args:
    input_mask: (B, T), true on tokens, false on padding.

  Returns:
    (B, T) int32; padding has the position of the last token before it, or 0.
  """
  return masks.positions_from_mask(input_mask)


def is_lora_enabled(model: nnx.Module) -> bool:
  """Whether the model has LoRA parameters (`nnx.LoRAParam`)."""
  return is_lora(model)


@contextlib.contextmanager
def time_measure(
  context: str = "", suppress_logging: bool = False
) -> Iterator[Callable[[], float]]:
  """Measures the wall-clock time of a block.

  Args:
    context: what is measured, for the log.
    suppress_logging: True keeps it out of the log.

  Yields:
    A function that returns the seconds so far, and after the block those of the block.
  """
  start = time.perf_counter()
  end: float | None = None
  try:
    yield lambda: (time.perf_counter() if end is None else end) - start
  finally:
    end = time.perf_counter()
    if not suppress_logging:
      _log.info("%s took %.3f s", context or "the block", end - start)


def device_memory() -> dict[Any, tuple[int, int | None]]:
  """Bytes in use and the limit of each local device.

  From the device's own counters, or, where there are none (CPU, Pathways), from
  the live arrays of this process: then a replicated array counts on every device
  that holds a copy, and the limit is None.
  """
  out: dict[Any, tuple[int, int | None]] = {}
  from_arrays: dict[Any, int] | None = None
  for device in jax.local_devices():
    stats = device.memory_stats()
    if stats and "bytes_in_use" in stats:
      out[device] = (stats["bytes_in_use"], stats.get("bytes_limit"))
    else:
      if from_arrays is None:
        from_arrays = live_array_bytes()
      out[device] = (from_arrays.get(device, 0), None)
  return out


def live_array_bytes() -> dict[Any, int]:
  """Bytes of this process's live arrays on each device, every shard counted."""
  used: dict[Any, int] = collections.defaultdict(int)
  for array in jax.live_arrays():
    # By its layout: looking at the shards' data makes arrays of them, which then live.
    shard = math.prod(array.sharding.shard_shape(array.shape))
    size = array.nbytes * shard // array.size if array.size else 0
    for device in array.sharding.addressable_devices:
      used[device] += size
  return dict(used)


def show_hbm_usage(title: str = "") -> None:
  """Prints the memory in use on each local device, after a garbage collection."""
  import humanize

  gc.collect()
  for device, (used, limit) in device_memory().items():
    text = humanize.naturalsize(used, binary=True)
    if limit:
      text += f" of {humanize.naturalsize(limit, binary=True)}"
      text += f" ({100 * used / limit:.1f} %)"
    print(f"{title}: {device}: {text}" if title else f"{device}: {text}")
