"""Search for settings that make a run fit into its chips, or that fill them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings.run import RunSettings
from tunix.models.lora import LoraConfig

# Settings -> peak bytes of a device, and the program with this peak. Each call compiles
# the programs of a step.
Peak = Callable[[Any], tuple[int, str]]

# Kind of an RL job's batches -> last words of the names of its programs.
_PROGRAMS = {
  "train": ("update",),
  "compute_logps": ("scoring",),
  "rollout": ("prefill", "decode", "mixed"),
}


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
  """Returns the largest micro-batch of training that fits; None: none fits.

  Args:
    config: settled settings.
    shards: number of parts that the mesh splits rows into.
    memory: memory of a device, bytes.
    peak: peak memory as a function of the settings. It must not fall with more rows.
  """
  best, sizes = None, micro_batches(config, shards)
  while sizes:
    middle = len(sizes) // 2
    word, changed = _micro_batch(config, "train", sizes[middle])
    bytes_, _ = peak(changed)
    if bytes_ <= memory:
      best = Fit((word,), bytes_)
      sizes = sizes[middle + 1 :]
    else:
      sizes = sizes[:middle]
  return best


def first_remedy(
  config: RunSettings, shards: int, memory: float, peak: Peak, found: tuple[int, str]
) -> Fit | None:
  """Returns the first settings that fit; None: none do.

  Each attempt keeps the changes before it that save memory. Rematerialization and
  smaller batches are tried if the program with the highest peak has them. The order is
  that of their costs: first changes that cost time, then a frozen base model, then a
  base of fewer bits.

  Args:
    config, shards, memory, peak: see `largest_micro_batch`.
    found: the result of `peak` for these settings.
  """
  words: list[str] = []
  changes, (bytes_, largest) = list(_CHANGES), found
  while bytes_ > memory:
    offers = ((change, change(config, shards, largest)) for change in changes)
    tried = next(((change, offer) for change, offer in offers if offer), None)
    if tried is None:
      return None
    change, (word, changed) = tried
    changes.remove(change)
    if (now := peak(changed))[0] < bytes_:
      words.append(word)
      config, (bytes_, largest) = changed, now
  return Fit(tuple(words), bytes_)


def micro_batches(config: Any, shards: int) -> list[int]:
  """Returns micro-batch sizes that divide a batch and split over the mesh.

  They count rows, or the prompts of an RL job, whose batch is that of an update. If no
  size splits, it is the whole batch, whose rows every shard then holds.
  """
  count, rows = config.training.global_batch_size, 1
  if isinstance(config, RLRun):
    rows = JOBS[config.job].sequences(config) // count
    count = config.rl.mini_batch_size or count
  sizes = [n for n in range(1, count + 1) if count % n == 0]
  # Rows of a program are prompts if a group shares its prompt, else completions.
  by_prompts = [n for n in sizes if n % shards == 0]
  return by_prompts or [n for n in sizes if n * rows % shards == 0] or [count]


def _micro_batch(config: Any, kind: str, size: int) -> tuple[str, Any]:
  """Returns the argument for `size` rows or prompts at once, and settings with it.

  Args:
    config: the settings.
    kind: "train", or another kind of an RL job's batches.
    size: number of rows, or of prompts.
  """
  if isinstance(config, RLRun):
    key = f"{kind}_micro_batch_size"
    rl = dataclasses.replace(config.rl, **{key: size})
    return f"--rl.{key}={size}", dataclasses.replace(config, rl=rl)
  training = dataclasses.replace(
    config.training, micro_batch_size=size, eval_batch_size=size
  )
  changed = dataclasses.replace(config, training=training)
  return f"--training.micro_batch_size={size}", changed


# The changes of `first_remedy`. Each takes the settings, the number of parts that the
# mesh splits rows into, and the name of the program with the highest peak. It returns
# the argument and the settings with it, or None if the change is no help.
Offer = tuple[str, Any] | None


def _remat(config: Any, shards: int, largest: str) -> Offer:
  del shards
  if config.model.remat in ("block", "offload") or not _trains(config, largest):
    return None
  return "--model.remat=block", _with_model(config, remat="block")


def _smallest(kind: str, config: Any, shards: int, largest: str) -> Offer:
  if isinstance(config, RLRun):
    if not largest.endswith(_PROGRAMS[kind]):
      return None
    is_whole = config.env is not None or config.rl.schedule == "greedy"
    if kind == "rollout" and is_whole:
      return None  # their engine works on all prompts, or on several batches, at once
    whole = config.training.global_batch_size
    now = getattr(config.rl, f"{kind}_micro_batch_size")
    now = now or (kind == "train" and config.rl.mini_batch_size) or whole
  elif kind == "train":
    now = config.training.micro_rows
  else:
    return None
  least = micro_batches(config, shards)[0]
  return _micro_batch(config, kind, least) if least < now else None


def _offload_activations(config: Any, shards: int, largest: str) -> Offer:
  del shards
  if config.model.remat == "offload" or not _trains(config, largest):
    return None
  return "--model.remat=offload", _with_model(config, remat="offload")


def _offload_models(config: Any, shards: int, largest: str) -> Offer:
  del shards, largest
  if not isinstance(config, RLRun) or config.rl.offload_to_cpu:
    return None
  rl = dataclasses.replace(config.rl, offload_to_cpu=True)
  return "--rl.offload_to_cpu=true", dataclasses.replace(config, rl=rl)


def _offload_optimizer(config: Any, shards: int, largest: str) -> Offer:
  del shards, largest
  if config.training.offload_optimizer or config.lora is not None:
    return None
  training = dataclasses.replace(config.training, offload_optimizer=True)
  changed = dataclasses.replace(config, training=training)
  return "--training.offload_optimizer=true", changed


def _adapter(config: Any, shards: int, largest: str) -> Offer:
  del shards, largest
  if not config.fits_adapter or config.lora is not None:
    return None
  try:
    config = dataclasses.replace(config, lora=LoraConfig(rank=16))
  except ValueError:  # another setting trains or exports all weights
    return None
  # Trained weights may need float32, frozen ones do not.
  return "--lora.rank=16", _with_model(config, param_dtype=config.model.dtype)


def _quantize(config: Any, shards: int, largest: str) -> Offer:
  if not config.fits_adapter or config.model.quantize:
    return None
  words = ["--model.quantize=nf4"]
  if config.lora is None:  # adapters alone have saved nothing
    if (adapter := _adapter(config, shards, largest)) is None:
      return None
    words.insert(0, adapter[0])
    config = adapter[1]
  return " ".join(words), _with_model(config, quantize="nf4")


_CHANGES = (
  _remat,
  *(functools.partial(_smallest, kind) for kind in _PROGRAMS),
  *(_offload_activations, _offload_models, _offload_optimizer, _adapter, _quantize),
)


def _trains(config: Any, name: str) -> bool:
  """Returns whether a program computes gradients."""
  return name.endswith(_PROGRAMS["train"] if isinstance(config, RLRun) else "step")


def _with_model(config: Any, **changes: Any) -> Any:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
