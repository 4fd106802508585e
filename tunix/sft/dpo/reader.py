"""`tunix.data.batches` under the name that it had, for scripts that read batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.data import batches
from tunix.data.batches import BadRows, TextOptions
from tunix.data.rows import SideBySide
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.sft.dpo.pairs import KTOTrainingInput, TrainingInput
from tunix.sft.losses import batch_fields


@dataclasses.dataclass(frozen=True)
class Reader:
  """Turns batches into token rows; see `batches.TextOptions` for the attributes."""

  tokenizer: TokenizerAdapter | None
  limits: SideBySide | None
  bad_rows: BadRows = "error"

  @property
  def _options(self) -> TextOptions:
    return TextOptions(**vars(self))

  def pairs(self, batch: Any) -> TrainingInput:
    """A DataInput, a TrainingInput, or a dict; see `batches.read_pairs`."""
    rows = batches.read_pairs(batch_fields(batch), self._options)
    return TrainingInput(**rows)

  def single(self, batch: Any) -> KTOTrainingInput:
    """A KTODataInput, a KTOTrainingInput, or a dict; see `batches.read_labelled`."""
    rows = batches.read_labelled(batch_fields(batch), self._options)
    return KTOTrainingInput(**rows)
