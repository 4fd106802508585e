"""The mesh axes of the decoder's weights and activations."""

from __future__ import annotations

import dataclasses

Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
  """The mesh axes that split weights and activations.

  An axis that the mesh lacks, or that does not divide a dimension, is ignored there.

  Attributes:
    fsdp: axis or axes that split every weight along its model dimension.
    tp: axis that splits heads, hidden units and the vocabulary.
    ep: axis that splits the experts of a mixture. It also splits the batch and, with
      fsdp, all other weights.
    cp: axis that splits the tokens of every row and, with fsdp, the weights.
    batch: axes that split the batch; None means ("dp", fsdp, ep).
    step: axes that split the products of a decode step in place of its rows; set by
      `generate.layout`.
  """

  fsdp: Axes = "fsdp"
  tp: str | None = "tp"
  ep: str | None = "ep"
  cp: str | None = "cp"
  batch: tuple[str, ...] | None = None
  step: tuple[str, ...] = ()

  @property
  def batch_axes(self) -> tuple[str, ...]:
    """Mesh axes of the batch dimension of activations."""
    if self.batch is not None:
      return self.batch
    return tuple(dict.fromkeys(("dp", *self._fsdp, *_named(self.ep))))

  @property
  def weight_axes(self) -> tuple[str, ...]:
    """Mesh axes of the model dimension of weights.

    cp is among them: otherwise every device along cp would hold a copy of the weights.
    """
    return (*self._fsdp, *_named(self.ep), *_named(self.cp))

  @property
  def _fsdp(self) -> tuple[str, ...]:
    return (self.fsdp,) if isinstance(self.fsdp, str) else (self.fsdp or ())


def _named(axis: str | None) -> tuple[str, ...]:
  return () if axis is None else (axis,)
