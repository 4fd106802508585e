"""What makes a run fit into its chips, or fills them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tunix.models.lora import LoraConfig

# Settings -> bytes of a device that the step takes at its peak; compiles it.
Peak = Callable[[Any], int]


@dataclasses.dataclass(frozen=True)
class Fit:
  """Settings that fit, as words of the command, and the peak with them."""

  words: tuple[str, ...]
  peak_bytes: int


def largest_micro_batch(
  config: Any, shards: int, memory: float, peak: Peak
) -> Fit | None:
  """The largest micro-batch that fits; None: not even the smallest.

  Args:
    config: settled settings.
    shards: parts that the mesh cuts rows into.
    memory: bytes of a device.
    peak: of settings; more rows never take less.
  """
  best, sizes = None, micro_batches(config, shards)
  while sizes:
    middle = len(sizes) // 2
    bytes_ = peak(with_micro_batch(config, sizes[middle]))
    if bytes_ <= memory:
      best = Fit((f"--training.micro_batch_size={sizes[middle]}",), bytes_)
      sizes = sizes[middle + 1 :]
    else:
      sizes = sizes[:middle]
  return best


def first_remedy(config: Any, shards: int, memory: float, peak: Peak) -> Fit | None:
  """The first settings that fit, each step keeping those before it; None: none does.

  In the order of what they cost: time first, then that the base is frozen, then its
  digits.
  """
  words: list[str] = []
  for word, config in _changes(config, shards):  # noqa: B020
    words.append(word)
    if (bytes_ := peak(config)) <= memory:
      return Fit(tuple(words), bytes_)
  return None


def micro_batches(config: Any, shards: int) -> list[int]:
  """Sizes of micro-batches that divide a step and divide over the mesh."""
  rows = config.training.global_batch_size
  return [n for n in range(shards, rows + 1, shards) if rows % n == 0]


def with_micro_batch(config: Any, rows: int) -> Any:
  """The settings with micro-batches of that many rows, evaluations alike."""
  training = dataclasses.replace(
    config.training, micro_batch_size=rows, eval_batch_size=rows
  )
  return dataclasses.replace(config, training=training)


def _changes(config: Any, shards: int) -> Iterator[tuple[str, Any]]:
  """(word, settings with it and with all before it)."""
  if config.model.remat not in ("block", "offload"):
    config = _with_model(config, remat="block")
    yield "--model.remat=block", config
  smallest = micro_batches(config, shards)[0]
  if config.training.micro_rows > smallest:
    config = with_micro_batch(config, smallest)
    yield f"--training.micro_batch_size={smallest}", config
  if config.model.remat != "offload":
    config = _with_model(config, remat="offload")
    yield "--model.remat=offload", config
  if not config.training.offload_optimizer and config.lora is None:
    training = dataclasses.replace(config.training, offload_optimizer=True)
    config = dataclasses.replace(config, training=training)
    yield "--training.offload_optimizer=true", config
  if not config.fits_adapter:
    return
  if config.lora is None:
    config = dataclasses.replace(config, lora=LoraConfig(rank=16))
    # Which trained weights needed, and frozen ones do not.
    config = _with_model(config, param_dtype=config.model.dtype)
    yield "--lora.rank=16", config
  if config.model.quantise is None:
    config = _with_model(config, quantise="nf4")
    yield "--model.quantise=nf4", config


def _with_model(config: Any, **changes: Any) -> Any:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
