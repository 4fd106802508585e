"""Helper functions for users: attention masks, device memory, wall-clock time."""

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
from tunix.sft.steps.module_state import is_lora

_log = logging.getLogger(__name__)


def make_causal_attn_mask(input_mask: jax.Array) -> jax.Array:
  """Returns a causal attention mask in which padding is never a key.

  Args:
    input_mask: [B, T], True on tokens and False on padding.

  Returns:
    bool [B, T, T]: True if the query (second axis) may attend to the key (third axis).

  Raises:
    ValueError: The mask has another number of dimensions.
  """
  if input_mask.ndim != 2:
    raise ValueError(
      f"input_mask has shape {input_mask.shape}; expected (batch, tokens)"
    )
  index = jnp.arange(input_mask.shape[1])
  return masks.causal_mask(index, index) & input_mask.astype(bool)[:, None, :]


def build_positions_from_mask(input_mask: jax.Array) -> jax.Array:
  """Returns positions that count tokens and not padding; the first token has 0.

  Args:
    input_mask: [B, T], True on tokens and False on padding.

  Returns:
    int32 [B, T]; padding has the position of the last token before it, or 0.
  """
  return masks.positions_from_mask(input_mask)


def is_lora_enabled(model: nnx.Module) -> bool:
  """Returns True if the model has LoRA parameters (`nnx.LoRAParam`)."""
  return is_lora(model)


@contextlib.contextmanager
def time_measure(
  context: str = "", suppress_logging: bool = False
) -> Iterator[Callable[[], float]]:
  """Measures the wall-clock time of a block, and logs it.

  Args:
    context: name of the block, for the log.
    suppress_logging: if True, nothing is logged.

  Yields:
    A function that returns the seconds so far; after the block, the block's seconds.
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
  """Returns (bytes in use, limit in bytes) of each local device.

  The numbers come from the counters of the device. Devices without counters (CPU,
  Pathways) get the bytes of this process's live arrays, and the limit None. A
  replicated array counts on every device that holds a copy.
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
  """Returns the bytes of this process's live arrays on each device, by shards."""
  used: dict[Any, int] = collections.defaultdict(int)
  for array in jax.live_arrays():
    # Computed from the sharding, because reading a shard's data would create an array
    # that is then live too.
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
