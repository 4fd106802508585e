"""Topologies that a plan compiles for: TPUs or GPUs elsewhere, or this machine.

v5e:4x4      a TPU slice, as Cloud TPU names its shapes; needs libtpu, but no TPU
h100:8       GPUs of one host; needs XLA's compiler for GPUs, but no GPU (see `gpus`)
h100:1x2x8   one slice of two hosts with eight GPUs each
cpu:8        the CPU of this machine as eight devices
gpu          the GPUs of this machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from tunix.perf import chips
from tunix.perf.chips import Chip
from tunix.plan import gpus
from tunix.utils import mesh as mesh_lib

_TPU = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):(\d+x\d+(?:x\d+)?)")
_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
_EXAMPLES = (
  "v5e:4x4, v6e:2x4, v5p:2x2x1, v4:2x2x1, tpu7x:2x2x1, cpu:8, gpu, "
  + ", ".join(f"{card}:8" for card in gpus.CARDS)
)


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices that programs can be compiled for.

  Attributes:
    name: name of the topology, as the user gave it.
    devices: JAX devices, either real or of a topology description.
    chip: rates of a device; None: not known (CPUs).
  """

  name: str
  devices: Sequence[Any]
  chip: Chip | None

  @property
  def memory_bytes(self) -> float | None:
    """Memory of one device that programs may use; None: not known."""
    if self.chip is not None and self.chip.memory_bytes is not None:
      return self.chip.memory_bytes
    if self.devices[0].platform != "gpu":
      return None
    return (self.devices[0].memory_stats() or {}).get("bytes_limit")

  def mesh(self, axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh over all devices, or some of them.

    Args:
      axes: {axis: size}. One size may be -1: all devices that the others leave.
      devices: some of the devices; None: all.

    Raises:
      ValueError: the product of the sizes is not the number of devices, or JAX cannot
        lay the mesh over the slice.
    """
    try:
      return mesh_lib.create_mesh(axes, self.devices if devices is None else devices)
    except NotImplementedError as error:
      raise ValueError(
        f"mesh is {dict(axes)}, which JAX cannot lay over {self.name}: each axis takes "
        "whole sides of a slice. Choose sizes that are products of its sides"
      ) from error


def find(name: str) -> Topology:
  """Returns the topology of a name.

  Call it for "cpu:N" before JAX is used: the first use of JAX fixes the number of CPU
  devices.

  Raises:
    ValueError: there is no such topology.
    ImportError: libtpu, or the compiler for GPUs, is missing.
    RuntimeError: this machine has no such devices.
  """
  if gpus.is_name(name):
    chips.plan_for(chip := gpus.chip(name))
    return Topology(name, gpus.devices(name), chip)
  if (slice_ := _TPU.fullmatch(name)) is not None:
    return _tpu(name, slice_[1])
  if (cpu := re.fullmatch(r"cpu:(\d+)", name)) is not None:
    return Topology(name, _cpus(int(cpu[1])), None)
  if name == "gpu":
    devices = jax.devices("gpu")
    return Topology(name, devices, chips.chip_of(devices[0]))
  raise ValueError(f"topology is {name!r}; expected one such as {_EXAMPLES}")


def _tpu(name: str, kind: str) -> Topology:
  if importlib.util.find_spec("libtpu") is None:
    raise ImportError(
      f"planning for {name} needs the TPU compiler, but no TPU: "
      "pip install 'tunix[tpu]'"
    )
  # Without these libtpu looks for a TPU of this machine, and complains about none.
  for variable, value in _NO_TPU.items():
    os.environ.setdefault(variable, value)
  # A JAX device of v4 is a chip of two cores. Without the option a device of a v4
  # topology would be one core.
  options = {"chip_config_name": "megacore"} if kind == "v4" else {}
  try:
    description = topologies.get_topology_desc(
      platform="tpu", topology_name=name, **options
    )
  except jax.errors.JaxRuntimeError as error:
    if "lockfile" in str(error):
      raise RuntimeError(
        f"topology is {name!r}, and another process of this machine uses the TPU "
        "compiler; wait for it. If it only plans, too, set "
        "ALLOW_MULTIPLE_LIBTPU_LOAD=1"
      ) from error
    reason = str(error).partition(": ")[2].partition("\n")[0]
    raise ValueError(
      f"topology is {name!r}, a shape that the TPU compiler does not know ({reason}); "
      f"expected one such as {_EXAMPLES}"
    ) from error
  return Topology(name, description.devices, chips.chip_of(description.devices[0]))


def _cpus(count: int) -> Sequence[Any]:
  if count < 1:
    raise ValueError(f"topology is 'cpu:{count}'; expected at least one device")
  # If XLA_FLAGS sets the number, or JAX runs already, it cannot be changed here.
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    with contextlib.suppress(RuntimeError):
      jax.config.update("jax_num_cpu_devices", count)
  devices = jax.devices("cpu")
  if len(devices) < count:
    raise RuntimeError(
      f"topology is 'cpu:{count}', but this process has {len(devices)} CPU devices and "
      "JAX is running already; set "
      f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before it starts"
    )
  return devices[:count]
