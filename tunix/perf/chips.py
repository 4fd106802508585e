"""Peak rates of JAX devices as their makers publish them."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Peak rates of one JAX device.

  Attributes:
    kind: prefix of its `device_kind`.
    flops: dense bfloat16 FLOP/s.
    memory_bytes: memory that a program may use; None: models of this kind differ.
    memory_rate: memory bandwidth, bytes/s.
    link_rate: bytes/s that the device can send to other devices of its slice or host,
      over all its links together. It can receive as much at the same time.
  """

  kind: str
  flops: float
  memory_bytes: float | None = None
  memory_rate: float | None = None
  link_rate: float | None = None


# Matched against the start of `device.device_kind`, first match wins.
# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}: "peak compute per chip",
# "HBM capacity" (v5e, v6e, v4: minus the 0.25 GiB of 16 that libtpu keeps), "HBM
# bandwidth", "inter-chip interconnect bandwidth" (Gbps divided by 8; bidirectional
# figures divided by 2). A JAX device is a chip, except on tpu7x, where it is one of the
# two chiplets of a chip and has half of everything.
# NVIDIA: data sheets of A100, H100, H200, HGX B200 and GB200. Rates "with sparsity" are
# divided by 2, and so are NVLink rates, which count both directions.
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
  """Returns the chip of a device; None for a device not in the table, such as a CPU.

  Args:
    device: a `jax.Device`, or the text of its `device_kind`.
  """
  kind = device if isinstance(device, str) else device.device_kind
  for chip in CHIPS:
    if kind.lower().startswith(chip.kind.lower()):
      return chip
  return None
