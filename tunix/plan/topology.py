"""The devices a plan is for: of a TPU slice that is not here, or of this machine.

v5e:4x4      a TPU slice, as Cloud TPU names its shapes; needs libtpu, and no TPU
cpu:8        this machine's processor, as eight devices
gpu          the GPUs of this machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from tunix.perf import chips
from tunix.perf.chips import Chip

_TPU = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):(\d+x\d+(?:x\d+)?)")
_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
_EXAMPLES = "v5e:4x4, v6e:2x4, v5p:2x2x1, v4:2x2x1, tpu7x:2x2x1, cpu:8, gpu"


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices that programs can be compiled for.

  Attributes:
    name: as the user gave it.
    devices: JAX devices, real ones or a topology's.
    chip: what each of them can do; None: nobody said (CPUs).
  """

  name: str
  devices: Sequence[Any]
  chip: Chip | None

  @property
  def memory_bytes(self) -> float | None:
    """Of one device, for programs; None: not known."""
    if self.chip is not None and self.chip.memory_bytes is not None:
      return self.chip.memory_bytes
    if self.devices[0].platform != "gpu":
      return None
    return (self.devices[0].memory_stats() or {}).get("bytes_limit")

  def mesh(self, axes: Mapping[str, int]) -> Mesh:
    """A mesh over all of them; one size may be -1, what the others leave.

    Raises:
      ValueError: the sizes do not multiply out, or cannot be laid over the slice.
    """
    sizes, count = dict(axes), len(self.devices)
    open_ = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(open_) == 1 and known and count % known == 0:
      sizes[open_[0]] = count // known
    words = " x ".join(f"{name} {size}" for name, size in axes.items())
    if math.prod(sizes.values()) != count:
      raise ValueError(
        f"mesh {words} and {self.name} has {count} devices: choose sizes whose product "
        f"is {count}, one of them -1 for what the others leave"
      )
    try:
      return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=self.devices,
      )
    except NotImplementedError as error:
      raise ValueError(
        f"mesh {words} cannot be laid over {self.name}: JAX gives each axis whole "
        "sides of a slice, so choose sizes that are products of its sides"
      ) from error


def find(name: str) -> Topology:
  """The devices of a name.

  Call it before JAX is used where the name is "cpu:N": afterwards the number of CPU
  devices is fixed.

  Raises:
    ValueError: no such topology.
    ImportError: libtpu is missing.
    RuntimeError: this machine has no such devices.
  """
  if (slice_ := _TPU.fullmatch(name)) is not None:
    return _tpu(name, slice_[1])
  if (cpu := re.fullmatch(r"cpu:(\d+)", name)) is not None:
    return Topology(name, _cpus(int(cpu[1])), None)
  if name == "gpu":
    devices = jax.devices("gpu")
    return Topology(name, devices, chips.chip_of(devices[0]))
  raise ValueError(
    f"topology {name!r} is none that can be compiled for: use one such as {_EXAMPLES}"
  )


def _tpu(name: str, kind: str) -> Topology:
  if importlib.util.find_spec("libtpu") is None:
    raise ImportError(
      f"planning for {name} needs the TPU compiler, which asks for no TPU: "
      "pip install 'tunix[tpu]'"
    )
  # Else libtpu looks for the TPU of this machine, and complains on standard error.
  for variable, value in _NO_TPU.items():
    os.environ.setdefault(variable, value)
  # A JAX device of v4 is a chip of two cores; of a topology a core, without this.
  options = {"chip_config_name": "megacore"} if kind == "v4" else {}
  try:
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
  except jax.errors.JaxRuntimeError as error:
    if "lockfile" in str(error):
      raise RuntimeError(
        f"topology {name!r}: another process of this machine uses the TPU compiler; "
        "wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 where that one only plans too"
      ) from error
    reason = str(error).partition(": ")[2].partition("\n")[0]
    raise ValueError(
      f"topology {name!r}: the TPU compiler has none of this shape ({reason}); slices "
      f"are such as {_EXAMPLES}"
    ) from error
  return Topology(name, found.devices, chips.chip_of(found.devices[0]))


def _cpus(count: int) -> Sequence[Any]:
  if count < 1:
    raise ValueError(f"topology 'cpu:{count}': give at least one device")
  # Where XLA_FLAGS says how many, or JAX runs already: see what it has.
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    with contextlib.suppress(RuntimeError):
      jax.config.update("jax_num_cpu_devices", count)
  devices = jax.devices("cpu")
  if len(devices) < count:
    raise RuntimeError(
      f"topology 'cpu:{count}': this process has {len(devices)} CPU devices and JAX is "
      f"running; set XLA_FLAGS=--xla_force_host_platform_device_count={count} before"
    )
  return devices[:count]
