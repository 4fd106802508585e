"""The section `export`, and what it asks of the others."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings:
  """What is written to export/ when training has ended.

  Attributes:
    kind: full (the trained model), merged (adapters merged into the model), adapter
      (PEFT), none; auto: full, or adapter with LoRA.
    dtype: of the weights written; null: the checkpoint's (from scratch: the
      computation's).
    checkpoint: whose weights: those of the last step, or of the best evaluation as
      training.best says.
  """

  kind: Literal["auto", "full", "merged", "adapter", "none"] = "auto"
  dtype: Dtype | None = None
  checkpoint: Literal["last", "best"] = "last"

  def __post_init__(self):
    if self.kind == "none" and self.dtype is not None:
      raise ValueError(
        f"dtype is {self.dtype!r} and export.kind 'none': nothing would be written"
      )
    if self.kind == "none" and self.checkpoint == "best":
      raise ValueError(
        "checkpoint is 'best' and export.kind 'none': nothing would be written"
      )


def check(config: Any) -> None:
  """Refuses a RunSettings whose other sections do not fit its export.

  Raises:
    ValueError: begins with the key.
  """
  if config.export.checkpoint == "best" and config.training.best is None:
    raise ValueError(
      "export.checkpoint is 'best' and training.best is not set: say what is best, "
      "such as --training.best.metric=loss"
    )
  needs_lora = config.export.kind in ("merged", "adapter")
  if needs_lora and config.lora is None:
    raise ValueError(
      f"export.kind is {config.export.kind!r} and lora.rank is not set, so there is no "
      "adapter: use 'full', or train with LoRA"
    )
  if config.export.kind == "full" and config.lora is not None:
    raise ValueError(
      "export.kind is 'full' and lora.rank is set: use 'merged' (a whole model) or "
      "'adapter'"
    )
  whole = None if config.lora is None else config.lora.modules_to_save
  saves_head = config.fits_adapter or whole is None or "score" in whole
  if config.export.kind == "adapter" and not saves_head:
    raise ValueError(
      f"export.kind is 'adapter' and job is {config.job!r}: the head of scores is a "
      "part of an adapter only where lora.modules_to_save names it (score); use "
      "'merged'"
    )
  if config.export_kind == "adapter" and config.export.dtype is not None:
    raise ValueError(
      f"export.dtype is {config.export.dtype!r} and an adapter keeps its own "
      "(lora.dtype): set export.kind to 'merged', or leave it out"
    )
