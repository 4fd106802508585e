"""NVIDIA GPUs that programs can be compiled for where there are none.

XLA compiles for a GPU from a text that describes it. The values are those of XLA's own
descriptions (openxla/xla, xla/backends/gpu/target_config/specs), as far as compiling
asks for them. XLA measures kernels on the GPU itself to choose among them
(autotuning). Without the GPU it takes its defaults.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from tunix.perf import chips
from tunix.perf.chips import Chip
from tunix.utils import env

# The environment of a process that plans for GPUs: it does not touch the GPUs of this
# machine, and takes no time to make kernels fast that never run.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
FLAGS = (
  "--xla_gpu_autotune_level=0 --xla_backend_optimization_level=0 "
  "--xla_gpu_disable_gpuasm_optimizations=true"
)

_MOST = 8  # GPUs of a host
# Share of a GPU's memory that JAX takes, unless the variable says another one.
_SHARE, _SHARE_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PLUGINS = ("jax-cuda13", "jax-cuda12")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
  """The description of one GPU.

  Attributes:
    kind: its `device_kind`.
    capability: its major compute capability.
    cores: streaming multiprocessors.
    units: arithmetic units for float32 of a core.
    clock: clock rate, GHz.
    shared: shared memory of a core, bytes.
    cache: L2 cache, bytes.
    rate: bandwidth of its memory, bytes/s.
    memory: its memory, bytes.
  """

  kind: str
  capability: int
  cores: int
  units: int
  clock: float
  shared: int
  cache: int
  rate: int
  memory: int

  def __str__(self) -> str:
    """Returns the description as XLA reads it."""
    features = "NONE" if self.capability < 9 else "ACCELERATED_FEATURES"
    return f"""
      gpu_device_info {{
        cuda_compute_capability {{
          major: {self.capability} feature_extension: {features}
        }}
        core_count: {self.cores} fpus_per_core: {self.units}
        clock_rate_ghz: {self.clock} l2_cache_size: {self.cache}
        memory_bandwidth: {self.rate} device_memory_size: {self.memory}
        shared_memory_per_core: {self.shared} shared_memory_per_block: 49152
        shared_memory_per_block_optin: {self.shared - 1024}
        threads_per_warp: 32 threads_per_block_limit: 1024
        threads_per_core_limit: 2048 block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{self.kind}"
    """


_AMPERE = Card(
  kind="NVIDIA A100-SXM4-80GB",
  capability=8,
  cores=108,
  units=64,
  clock=1.41,
  shared=167936,
  cache=41943040,
  rate=2039040000000,
  memory=85100068864,
)
_HOPPER = Card(
  kind="NVIDIA H100 80GB HBM3",
  capability=9,
  cores=132,
  units=128,
  clock=1.98,
  shared=233472,
  cache=52428800,
  rate=3352320000000,
  memory=84942979072,
)
CARDS = {
  "a100-40": dataclasses.replace(
    _AMPERE, kind="NVIDIA A100-SXM4-40GB", rate=1555200000000, memory=42331013120
  ),
  "a100-80": _AMPERE,
  "b200": dataclasses.replace(
    _HOPPER,
    kind="NVIDIA B200",
    capability=10,
    cores=148,
    clock=1.965,
    cache=132644864,
    rate=7672320000000,
    memory=191514411008,
  ),
  "h100": _HOPPER,
  "h200": dataclasses.replace(
    _HOPPER, kind="NVIDIA H200 141GB HBM3e", rate=4800000000000, memory=151397597184
  ),
}


def is_name(topology: str) -> bool:
  """Returns True for the name of a card with a number of GPUs, right or wrong."""
  return topology.partition(":")[0] in CARDS


def shape(topology: str) -> tuple[int, int, int]:
  """Returns slices, hosts of a slice and GPUs of a host of a topology.

  Raises:
    ValueError: the numbers have another form, or no host has so many GPUs.
  """
  numbers = topology.partition(":")[2].split("x")
  sizes = tuple(int(x) for x in numbers) if all(map(str.isdecimal, numbers)) else ()
  if len(sizes) == 1:
    sizes = (1, 1, *sizes)
  if len(sizes) != 3 or min(sizes) < 1 or sizes[2] > _MOST:
    raise ValueError(
      f"topology is {topology!r}; expected 1 to {_MOST} GPUs, as in h100:8, or the "
      "numbers of slices, of hosts and of GPUs of a host, as in h100:1x2x8"
    )
  return sizes


def devices(topology: str) -> Sequence[Any]:
  """Returns the devices of a topology, such as "h100:8".

  Call it in a process with `ENVIRONMENT` and `FLAGS` (see `apart`).

  Raises:
    ValueError: see `shape`.
    ImportError: the compiler for GPUs is missing, or has another version than JAX.
  """
  sizes = shape(topology)
  check_packages(topology)
  return topologies.get_topology_desc(
    topology,
    "cuda",
    target_config=str(CARDS[topology.partition(":")[0]]),
    topology="x".join(map(str, sizes)),
  ).devices


def chip(topology: str) -> Chip:
  """Returns the rates of a GPU of a topology, and the memory that JAX takes of it."""
  card = CARDS[topology.partition(":")[0]]
  known = chips.chip_of(card.kind)
  assert known is not None, card.kind
  share = float(env.value(_SHARE_VARIABLE) or _SHARE)
  memory = math.floor(share * card.memory)
  return dataclasses.replace(known, kind=card.kind, memory_bytes=memory)


def check_packages(topology: str) -> None:
  """Refuses to plan without JAX's plugin for GPUs of the version of jaxlib.

  Raises:
    ImportError: names the package, both versions and the command that installs it.
  """

  def module(plugin):
    return plugin.replace("-", "_") + "_plugin"

  installed = [x for x in _PLUGINS if importlib.util.find_spec(module(x)) is not None]
  if not installed:
    raise ImportError(
      f"XLA's compiler for GPUs is not installed; a plan for {topology} needs it, and "
      "needs no GPU: pip install 'tunix[plan-gpu]'"
    )
  wanted = importlib.metadata.version("jaxlib")
  for package in (f"{installed[0]}-plugin", f"{installed[0]}-pjrt"):
    if (version := importlib.metadata.version(package)) != wanted:
      raise ImportError(
        f"{package} is {version}, and jaxlib is {wanted}; expected equal versions. "
        f"pip install '{package}=={wanted}'"
      )
