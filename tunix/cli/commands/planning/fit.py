"""Search for settings that make a run fit into its chips, or that fill them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tunix.cli.settings.run import RunSettings
from tunix.models.lora import LoraConfig

# Settings -> peak bytes of a device in the train step. Each call compiles the step.
Peak = Callable[[Any], int]


@dataclasses.dataclass(frozen=True)
class Fit:
  """Settings that fit.

  Attributes:
    words: the settings as arguments of the command.
    peak_bytes: peak memory of a device with them.
  """

  words: tuple[str, ...]
  peak_bytes: int


def largest_micro_batch(
  config: RunSettings, shards: int, memory: float, peak: Peak
) -> Fit | None:
  """Returns the largest micro-batch that fits; None: not even the smallest fits.

  Args:
    config: settled settings.
    shards: number of parts that the mesh splits rows into.
    memory: memory of a device, bytes.
    peak: peak memory as a function of the settings. It must not fall with more rows.
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


def first_remedy(
  config: RunSettings, shards: int, memory: float, peak: Peak
) -> Fit | None:
  """Returns the first settings that fit; None: none do.

  Each attempt keeps the changes before it. The order is that of their costs: first
  changes that cost time, then a frozen base model, then a base of fewer bits.
  """
  words: list[str] = []
  for word, config in _changes(config, shards):  # noqa: B020
    words.append(word)
    if (bytes_ := peak(config)) <= memory:
      return Fit(tuple(words), bytes_)
  return None


def micro_batches(config: Any, shards: int) -> list[int]:
  """Returns micro-batch sizes that divide a global batch and split over the mesh."""
  rows = config.training.global_batch_size
  return [n for n in range(shards, rows + 1, shards) if rows % n == 0]


def with_micro_batch(config: Any, rows: int) -> Any:
  """Returns the settings with `rows` rows in each training and evaluation batch."""
  training = dataclasses.replace(
    config.training, micro_batch_size=rows, eval_batch_size=rows
  )
  return dataclasses.replace(config, training=training)


def _changes(config: Any, shards: int) -> Iterator[tuple[str, Any]]:
  """Yields (argument, settings with it and with all arguments before it)."""
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
    # Trained weights may need float32, frozen ones do not.
    config = _with_model(config, param_dtype=config.model.dtype)
    yield "--lora.rank=16", config
  if config.model.quantize is None:
    config = _with_model(config, quantize="nf4")
    yield "--model.quantize=nf4", config


def _with_model(config: Any, **changes: Any) -> Any:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
