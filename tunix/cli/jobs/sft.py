"""The job sft: supervised fine-tuning on given completions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from tunix.cli.jobs.job import Job, Loaded, length_of, micro_batches
from tunix.cli.settings.data import RowSettings
from tunix.cli.settings.run import StreamRun
from tunix.data import records
from tunix.data.records import Kind
from tunix.sft.config import TrainingConfig
from tunix.sft.peft_trainer import PeftTrainer
from tunix.utils import terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTRun(StreamRun):
  """Settings of a run of the job sft."""

  reads_images: ClassVar[bool] = True

  job: Literal["sft"] = "sft"
  data: RowSettings = dataclasses.field(default=RowSettings())

  def kind(self, *, training: bool) -> Kind:
    """Returns the kind of the records: examples."""
    del training
    return records.SFT

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Returns the key of the row length."""
    del kind
    return {"max_length": "data.max_length"}


def _build(run: Loaded) -> PeftTrainer:
  options = TrainingConfig(**run.training_options())
  return PeftTrainer(run.model, run.optimizer, options, run.logger())


def rows(config: Any) -> str:
  """Describes the batch of a step in words."""
  sizes, length = config.training, config.data.max_length
  rows = f"{sizes.global_batch_size:,} x {length:,} tokens"
  if config.data.packing:
    rows += ", packed"
  elif config.pad_to != "max_length" or config.data.length_buckets:
    records = terminal.counted(sizes.global_batch_size, "record")
    rows = f"{records} of at most {terminal.counted(length, 'token')}"
  return f"batches: {rows}{micro_batches(config)}"


row_length = length_of("data", "max_length")


def example(config: Any) -> dict[str, np.ndarray]:
  """Returns a global batch of full rows."""
  shape = config.training.global_batch_size, config.data.max_length
  ones = np.ones(shape, np.int32)
  positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  return {
    "input_tokens": ones,
    "input_mask": ones,
    "positions": positions,
    "segment_ids": ones,
  }


SFT = Job(
  summary="supervised fine-tuning",
  records=(records.SFT,),
  first_values={"data.max_length": 1024, "data.num_epochs": 3},
  settings=SFTRun,
  build=_build,
  results={"loss": "loss"},
  batch=rows,
  length=row_length,
  example=example,
)
