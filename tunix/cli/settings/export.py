"""The section `export`, and its checks against other sections."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.utils import attributes

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings:
  """The model or adapter that is written to export/ at the end.

  Attributes:
    kind: full: the trained model; merged: the model with its adapters merged; adapter:
      the adapter in PEFT's format; none: nothing. auto: full, or adapter with LoRA.
    dtype: dtype of the written weights; null: the checkpoint's, or the computation's if
      there is no checkpoint.
    checkpoint: step of the written weights: the last step, or the step of the best
      evaluation, which training.best defines.
    checksums: if True, SHA256SUMS is written beside the files, for `sha256sum -c`. The
      files are compared with it whenever tunix loads the folder.
  """

  kind: Literal["auto", "full", "merged", "adapter", "none"] = "auto"
  dtype: Dtype | None = None
  checkpoint: Literal["last", "best"] = "last"
  checksums: bool = False

  def __post_init__(self):
    usual = {field.name: field.default for field in dataclasses.fields(self)}
    for name, value in attributes.of_fields(self).items():
      if self.kind == "none" and name != "kind" and value != usual[name]:
        raise ValueError(
          f"{name} is {value!r} and export.kind 'none', which writes nothing. "
          "Leave one of them out"
        )


def check(config: Any) -> None:
  """Refuses an export that contradicts other sections of the settings.

  Args:
    config: a RunSettings.

  Raises:
    ValueError: begins with the key.
  """
  if config.export.checkpoint == "best" and config.training.best is None:
    raise ValueError(
      "export.checkpoint is 'best' and training.best is not set. Name the metric, such "
      "as --training.best.metric=loss"
    )
  needs_lora = config.export.kind in ("merged", "adapter")
  if needs_lora and config.lora is None:
    raise ValueError(
      f"export.kind is {config.export.kind!r} and lora.rank is not set, so there is no "
      "adapter. Use 'full', or train with LoRA"
    )
  if config.export.kind == "full" and config.lora is not None:
    raise ValueError(
      "export.kind is 'full' and lora.rank is set. Use 'merged' (a whole model) or "
      "'adapter'"
    )
  whole = None if config.lora is None else config.lora.modules_to_save
  saves_head = config.fits_adapter or whole is None or "score" in whole
  if config.export.kind == "adapter" and not saves_head:
    raise ValueError(
      f"export.kind is 'adapter' and job is {config.job!r}: an adapter holds the head "
      "of scores only if lora.modules_to_save names it (score). Use 'merged'"
    )
  if config.export_kind == "adapter" and config.export.dtype is not None:
    raise ValueError(
      f"export.dtype is {config.export.dtype!r} and an adapter is written in "
      "lora.dtype. Set export.kind to 'merged', or leave export.dtype out"
    )
