"""The environment in which all tests run: JAX's settings, XLA's flags, the cache.

Compilation is most of what the suite costs. Every process of every run therefore
compiles with the same settings and reads one folder of compiled programs. Three
settings make compilation cheap:

- `jax_disable_most_optimizations` switches LLVM's expensive passes off.
- `xla_cpu_disable_new_fusion_emitters` emits fusions without MLIR, which takes 0.3 of
  the time with jaxlib 0.10. jaxlib 0.12 knows one emitter only and ignores the option.
- `xla_cpu_parallel_codegen_split_count` of 1 makes one LLVM module of a program. The
  default of 32 is for machines with many cores: it takes 1.3 times the processor time
  and four times the memory mappings.

XLA fuses and plans buffers as for users. A test marked `shipped` runs with the settings
that users have; CI runs these tests by themselves (`make shipped`).
"""

import hashlib
import importlib.metadata
import os
import pathlib
import platform

DEVICES = 8
SHIPPED = "shipped"  # mark of a test, and value of the variable below
_VARIABLE = "TUNIX_TEST_SETTINGS"


def is_shipped() -> bool:
  """True if programs are compiled as users compile them."""
  return os.environ.get(_VARIABLE) == SHIPPED


def xla_flags(devices: int | None = DEVICES, *, shipped: bool | None = None) -> str:
  """Returns XLA_FLAGS for a process with simulated devices.

  Args:
    devices: number of devices; None: the flags leave it to the process.
    shipped: see `environment`.
  """
  count = "--xla_force_host_platform_device_count"
  flags = [
    *([] if devices is None else [f"{count}={devices}"]),
    # XLA aborts the process if a device has not come to a collective within 40 s,
    # which eight devices on two busy cores may take.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
  ]
  if not (is_shipped() if shipped is None else shipped):
    flags.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true")
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
  return " ".join(flags)


def settings(*, shipped: bool | None = None) -> dict[str, object]:
  """Returns the settings of JAX by name."""
  shipped = is_shipped() if shipped is None else shipped
  return {
    "jax_disable_most_optimizations": not shipped,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_compilation_cache_dir": str(programs()),
  }


def environment(
  devices: int = DEVICES, *, shipped: bool | None = None
) -> dict[str, str]:
  """Returns the variables of a process that a test starts.

  Args:
    devices: number of simulated devices.
    shipped: True compiles as users do, which pays if a program runs for more seconds
      than it compiles; None: as this process.
  """
  shipped = is_shipped() if shipped is None else shipped
  return {
    _VARIABLE: SHIPPED if shipped else "",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": xla_flags(devices, shipped=shipped),
    # One operation after the other: if many operations that run one by one on eight
    # devices are in flight, their collectives can wait for each other for ever.
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    **{name.upper(): str(x) for name, x in settings(shipped=shipped).items()},
  }


def choose(*, shipped: bool) -> None:
  """Sets the environment of this process and of those that it starts."""
  ours = environment(shipped=shipped)
  names = [flag.partition("=")[0] for flag in xla_flags(shipped=False).split()]
  given = os.environ.get("XLA_FLAGS", "").split()
  given = [flag for flag in given if flag.partition("=")[0] not in names]
  os.environ |= ours | {"XLA_FLAGS": " ".join([*given, ours["XLA_FLAGS"]])}


def programs() -> pathlib.Path:
  """Returns the folder of compiled programs.

  There is one for each version of JAX, each Python and each kind of processor, since a
  program that was compiled for another processor may not run.
  """
  cpu = pathlib.Path("/proc/cpuinfo")
  lines = cpu.read_text().splitlines() if cpu.exists() else []
  flags = [x for x in lines if x.startswith("flags")][:1] or [platform.processor()]
  kind = hashlib.sha256(repr((platform.machine(), flags)).encode()).hexdigest()[:8]
  versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
  root = (
    os.environ.get("TUNIX_TEST_CACHE") or pathlib.Path.home() / ".cache/tunix-tests"
  )
  return pathlib.Path(root) / "-".join([*versions, platform.python_version(), kind])
