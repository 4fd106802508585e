"""The job sft: fine-tuning on given completions."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.cli import build
from tunix.cli.jobs.job import Job
from tunix.cli.settings import RowSettings, StreamRun
from tunix.data import records
from tunix.data.records import Kind
from tunix.sft.config import TrainingConfig
from tunix.sft.peft_trainer import PeftTrainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTRun(StreamRun):
  """Supervised fine-tuning."""

  job: Literal["sft"] = "sft"
  data: RowSettings = dataclasses.field(default=RowSettings())

  def kind(self, *, training: bool) -> Kind:
    """Examples, always."""
    del training
    return records.SFT

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Rows have one length."""
    del kind
    return {"max_length": "data.max_length"}


def _build(
  config: SFTRun,
  model: Any,
  tokenizer: Any,
  tx: Any,
  *,
  mesh,
  output_dir,
  learning_rate,
) -> PeftTrainer:
  del tokenizer, mesh
  options = build.training_options(config, output_dir, learning_rate)
  logger = build.build_logger(config, output_dir)
  return PeftTrainer(model, tx, TrainingConfig(**options), logger)


def rows(config: Any) -> str:
  """A step of rows of one length, in words."""
  sizes = config.training
  packed = ", packed" if config.data.packing else ""
  return (
    f"batches: {sizes.global_batch_size} x {config.data.max_length} tokens{packed}, "
    f"in {sizes.micro_batches} micro-batches"
  )


def row_length(config: Any) -> tuple[str, int]:
  """The key that says how long rows are, and what it says."""
  return "data.max_length", config.data.max_length


SFT = Job(
  settings=SFTRun,
  build=_build,
  results={"loss": "loss"},
  batch=rows,
  length=row_length,
)
