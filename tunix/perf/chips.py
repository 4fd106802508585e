"""What one JAX device can do: arithmetic, memory and links, from its makers' pages."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One JAX device.

  Attributes:
    kind: how its `device_kind` begins.
    flops: dense bfloat16 FLOP/s.
    memory_bytes: that a program may use; None: models of this kind differ.
    memory_rate: bytes/s from and to its memory.
    link_rate: bytes/s that it can send to other devices of its slice or host, over all
      its links together, and as many that it can receive meanwhile.
  """

  kind: str
  flops: float
  memory_bytes: float | None = None
  memory_rate: float | None = None
  link_rate: float | None = None


# Matched against the start of `device.device_kind`, first match wins.
# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}: "peak compute per chip",
# "HBM capacity" (v5e, v6e, v4: less what libtpu keeps, 0.25 GiB of 16), "HBM
# bandwidth", "inter-chip interconnect bandwidth" (of Gbps an eighth; of what is given
# as bidirectional the half). A JAX device is a chip; on tpu7x it is one of the chip's
# two chiplets and has half of everything.
# NVIDIA: data sheets of A100, H100, H200, HGX B200 and GB200; where they give the rate
# "with sparsity", half of it, and half of NVLink's, which counts both directions.
_GIB = 2.0**30
CHIPS = (
  Chip(
    kind="TPU v4",
    flops=275e12,
    memory_bytes=31.75 * _GIB,
    memory_rate=1228e9,
    link_rate=300e9,
  ),
  *(
    Chip(
      kind=kind,
      flops=197e12,
      memory_bytes=15.75 * _GIB,
      memory_rate=819e9,
      link_rate=200e9,
    )
    for kind in ("TPU v5 lite", "TPU v5e")
  ),
  Chip(  # v5p; "TPU v5p" starts so, too
    kind="TPU v5",
    flops=459e12,
    memory_bytes=95 * _GIB,
    memory_rate=2765e9,
    link_rate=600e9,
  ),
  *(
    Chip(
      kind=kind,
      flops=918e12,
      memory_bytes=31.25 * _GIB,
      memory_rate=1640e9,
      link_rate=448e9,
    )
    for kind in ("TPU v6 lite", "TPU v6e")
  ),
  *(
    Chip(
      kind=kind,
      flops=2307e12 / 2,
      memory_bytes=94.75 * _GIB,
      memory_rate=7380e9 / 2,
      link_rate=600e9 / 2,
    )
    for kind in ("TPU7x", "TPU v7x")
  ),
  Chip(kind="NVIDIA A100", flops=312e12, link_rate=300e9),
  Chip(kind="NVIDIA H100 PCIe", flops=756e12, memory_rate=2000e9),
  Chip(kind="NVIDIA H100 NVL", flops=835.5e12, memory_rate=3900e9, link_rate=300e9),
  Chip(kind="NVIDIA H100", flops=989.4e12, memory_rate=3350e9, link_rate=450e9),
  Chip(kind="NVIDIA H200 NVL", flops=835.5e12, memory_rate=4800e9, link_rate=450e9),
  Chip(kind="NVIDIA H200", flops=989.4e12, memory_rate=4800e9, link_rate=450e9),
  Chip(kind="NVIDIA B200", flops=2250e12, memory_rate=8000e9, link_rate=900e9),
  Chip(kind="NVIDIA GB200", flops=2500e12, memory_rate=8000e9, link_rate=900e9),
)


def chip_of(device: Any) -> Chip | None:
  """The chip of a device; None if it is not in the table (every CPU).

  Args:
    device: a `jax.Device`, or the text of its `device_kind`.
  """
  kind = device if isinstance(device, str) else device.device_kind
  for chip in CHIPS:
    if kind.lower().startswith(chip.kind.lower()):
      return chip
  return None
