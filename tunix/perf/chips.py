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
_CHIPS: tuple[tuple[str, float, float | None, float | None, float | None], ...] = (
  # kind, TFLOP/s, memory in GiB, memory and links in GB/s
  ("TPU v4", 275, 31.75, 1228, 300),
  ("TPU v5 lite", 197, 15.75, 819, 200),
  ("TPU v5e", 197, 15.75, 819, 200),
  ("TPU v5", 459, 95, 2765, 600),  # v5p; "TPU v5p" starts so, too
  ("TPU v6 lite", 918, 31.25, 1640, 448),
  ("TPU v6e", 918, 31.25, 1640, 448),
  ("TPU7x", 2307 / 2, 94.75, 7380 / 2, 600 / 2),
  ("TPU v7x", 2307 / 2, 94.75, 7380 / 2, 600 / 2),
  ("NVIDIA A100-SXM4-40GB", 312, None, 1555, 300),
  ("NVIDIA A100-SXM4-80GB", 312, None, 2039, 300),
  ("NVIDIA A100", 312, None, None, 300),
  ("NVIDIA H100 PCIe", 756, None, 2000, None),
  ("NVIDIA H100 NVL", 835.5, None, 3900, 300),
  ("NVIDIA H100", 989.4, None, 3350, 450),
  ("NVIDIA H200 NVL", 835.5, None, 4800, 450),
  ("NVIDIA H200", 989.4, None, 4800, 450),
  ("NVIDIA B200", 2250, None, 8000, 900),
  ("NVIDIA GB200", 2500, None, 8000, 900),
)


def _giga(value: float | None) -> float | None:
  return None if value is None else value * 1e9


CHIPS = tuple(
  Chip(
    kind=kind,
    flops=tflops * 1e12,
    memory_bytes=None if memory is None else memory * 2.0**30,
    memory_rate=_giga(memory_rate),
    link_rate=_giga(link_rate),
  )
  for kind, tflops, memory, memory_rate, link_rate in _CHIPS
)


# Chips of the GPUs that this process plans for. They cannot be asked for their memory.
_planned: dict[str, Chip] = {}


def plan_for(chip: Chip) -> None:
  """Makes `chip_of` return this chip for its kind from now on."""
  _planned[chip.kind] = chip


def chip_of(device: Any) -> Chip | None:
  """Returns the chip of a device; None for a device not in the table, such as a CPU.

  Args:
    device: a `jax.Device`, or the text of its `device_kind`.
  """
  kind = device if isinstance(device, str) else device.device_kind
  for chip in (*_planned.values(), *CHIPS):
    if kind.lower().startswith(chip.kind.lower()):
      return chip
  return None
