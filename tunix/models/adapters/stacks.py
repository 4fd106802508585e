"""Conversion between stacked adapters and PEFT's adapters of single tensors.

PEFT has one adapter per tensor of the checkpoint (per layer, per expert). A module of
the decoder may be a stack of several tensors. In the stack, a tensor without an adapter
gets zeros, and an adapter of a smaller rank is padded with zeros. These zeros get no
gradient and are left out when the adapter is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tunix.models.adapters import lora_modules
from tunix.models.adapters.lora_modules import Adapter
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.hf import values as hf_values
from tunix.utils import checks, mesh as mesh_lib


class TensorAdapter(NamedTuple):
  """The adapter of one tensor of the checkpoint.

  Attributes:
    name: Hugging Face's name of the module.
    a, b: the factors [in, r] and [r, out].
    magnitude: DoRA's magnitude [out], or None.
    scale: factor of A B.
    experts: number of experts E whose factors are joined, see parameters.py.
    stored: name of the module in PEFT's file; None for `name`.
  """

  name: str
  a: np.ndarray
  b: np.ndarray
  magnitude: np.ndarray | None
  scale: float
  experts: int = 1
  stored: str | None = None

  @property
  def rank(self) -> int:
    """The rank r of the adapter of each expert."""
    return self.b.shape[0] // self.experts


def unstacked(linear: Linear, names: list[str]) -> Iterator[TensorAdapter]:
  """Yields the adapters of a module, tensor by tensor, without the padding.

  Args:
    linear: a module with an adapter.
    names: Hugging Face's names of the module's tensors, in the order of its stack.
  """
  a, b = (mesh_lib.to_host(x) for x in lora_modules.pair_of(linear))
  a, b = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
  magnitude = lora_modules.magnitude_of(linear)
  magnitudes = None
  if magnitude is not None:
    magnitudes = mesh_lib.to_host(magnitude).reshape(-1, magnitude.shape[-1])
  for i, name in enumerate(names):
    # The rank of a tensor ends at its last column of A, or row of B, that is not zero.
    used = np.flatnonzero(np.any(a[i] != 0, axis=0) | np.any(b[i] != 0, axis=1))
    m = None if magnitudes is None else magnitudes[i]
    if not used.size and (m is None or not np.any(m)):
      continue
    rank = int(used[-1]) + 1 if used.size else a.shape[-1]
    yield TensorAdapter(name, a[i][:, :rank], b[i][:rank], m, linear.lora_scale)


def stacked(
  parts: list[TensorAdapter | None], shape: tuple[int, ...], peft: Mapping[str, Any]
) -> Adapter:
  """Returns the adapter of a stack, with all parts padded to the largest rank.

  Args:
    parts: one adapter per place of the stack; None for a place without one.
    shape: shape of the kernel, [*stack, in, out].
    peft: the contents of `adapter_config.json`.
  """
  present = [part for part in parts if part is not None]
  rank = max(part.b.shape[0] for part in present)
  scale = present[0].scale
  *stack, rows, columns = shape
  dtype = present[0].a.dtype
  a = np.zeros((len(parts), rows, rank), dtype)
  b = np.zeros((len(parts), rank, columns), dtype)
  m = None
  if (magnitude := present[0].magnitude) is not None:
    m = np.zeros((len(parts), columns), magnitude.dtype)
  for i, part in enumerate(parts):
    if part is None:
      continue
    used = part.b.shape[0]
    a[i, :, :used] = part.a
    # A stack has one scale, that of its first part. B of every other part is multiplied
    # by the ratio of the two scales, so that scale * A B stays the same.
    b[i, :used] = part.b if part.scale == scale else part.b * (part.scale / scale)
    if m is not None:
      m[i] = part.magnitude
  return Adapter(
    a=a.reshape(*stack, rows, rank),
    b=b.reshape(*stack, rank, columns),
    magnitude=None if m is None else m.reshape(*stack, columns),
    scale=scale,
    dropout=hf_values.number(peft, "lora_dropout", 0.0, checks.NOT_NEGATIVE),
    rslora=hf_values.flag(peft, "use_rslora"),
  )
