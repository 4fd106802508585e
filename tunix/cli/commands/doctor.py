"""The command `tunix doctor`: versions, devices, and checks of basic operations."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import tunix
from tunix.cli.commands.parts.arguments import Parser
from tunix.generate.sizes import capacity
from tunix.perf import chips
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.steps.run_state import RunState
from tunix.utils import mesh as mesh_lib, terminal

_PACKAGES = (
  *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "qwix", "numpy"),
  *("tokenizers", "libtpu", "transformers", "torch"),
)
# Printed with their values. Of secrets only the presence is printed.
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "HF_HOME")
_SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
_DISTRIBUTION = "tunix"


@dataclasses.dataclass(frozen=True)
class Finding:
  """One line of the report.

  Attributes:
    name: subject of the check.
    text: result; for a failure with the remedy.
    ok: False if something does not work.
  """

  name: str
  text: str
  ok: bool = True


def main(argv: Sequence[str]) -> int:
  """Runs `tunix doctor`; returns 1 if a check fails, else 0."""
  args = parser().parse_args(list(argv))
  findings = examine(pathlib.Path(args.folder) if args.folder else None)
  if args.json:
    print(json.dumps([dataclasses.asdict(one) for one in findings], indent=2))
  else:
    width = max(len(one.name) for one in findings)
    for one in findings:
      print(f"{'  ' if one.ok else '! '}{one.name:<{width}}  {one.text}")
  return 0 if all(one.ok for one in findings) else 1


def examine(folder: pathlib.Path | None = None) -> list[Finding]:
  """Runs all checks and returns their findings in order.

  Args:
    folder: folder in which a checkpoint is written; None: a temporary folder.
  """
  return [
    Finding("tunix", f"{tunix.__version__}, Python {platform.python_version()}"),
    Finding("system", f"{platform.platform()}, {os.cpu_count()} processors"),
    Finding("packages", ", ".join(_versions())),
    *_other_tunix(),
    *_extras(),
    Finding("environment", ", ".join(_environment()) or "nothing is set"),
    *_checked("devices", _devices),
    *_checked("mesh", _collective),
    *_checked("checkpoint", lambda: _checkpoint(folder)),
  ]


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser(
    prog="tunix doctor",
    description="Reports versions and devices of this machine, computes a sum over all "
    "devices, and writes and reads a checkpoint. Add the output to a bug report.",
  )
  made.add_argument("--folder", help="try the checkpoint in this folder")
  made.add_argument("--json", action="store_true", help="print the findings as JSON")
  return made


def _checked(name: str, check: Callable[[], str]) -> list[Finding]:
  """Returns the finding of a check, or of its failure."""
  try:
    return [Finding(name, check())]
  except (RuntimeError, ValueError, OSError) as error:
    reason = str(error).strip().partition("\n")[0]
    return [Finding(name, f"{type(error).__name__}: {reason}", ok=False)]


def _versions() -> list[str]:
  out = []
  for name in _PACKAGES:
    try:
      out.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      continue
  return out


def _other_tunix() -> list[Finding]:
  """Returns a failure if another distribution installs a package called `tunix`.

  Both in one environment overwrite each other's files.
  """
  owners = importlib.metadata.packages_distributions().get("tunix", [])
  others = sorted({name for name in owners if name.lower() != _DISTRIBUTION})
  if not others:
    return []
  return [
    Finding(
      "import name",
      f"{', '.join(others)} installs a package of the same name: keep the two in "
      "environments of their own",
      ok=False,
    )
  ]


def _extras() -> list[Finding]:
  """Returns one finding: which optional packages are missing, by extra."""
  try:
    requirements = importlib.metadata.requires(_DISTRIBUTION) or []
  except importlib.metadata.PackageNotFoundError:
    return [
      Finding("extras", "tunix is not installed here, but imported from a folder")
    ]
  missing: dict[str, list[str]] = {}
  for line in requirements:
    match = re.match(r"""([\w.-]+).*extra\s*==\s*["']([\w-]+)["']""", line)
    if match is None or match[1].lower() in (_DISTRIBUTION, "jax"):
      continue
    extra = missing.setdefault(match[2], [])
    if not any(importlib.metadata.distributions(name=match[1])):
      extra.append(match[1])
  states = [
    f"{extra} ({', '.join(names)} missing)" if names else f"{extra} is complete"
    for extra, names in missing.items()
  ]
  return [Finding("extras", "; ".join(states))]


def _environment() -> list[str]:
  values = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
  return values + [f"{name} is set" for name in _SECRETS if os.environ.get(name)]


def _devices() -> str:
  devices = jax.devices()
  first, count = devices[0], jax.process_count()
  chip = chips.chip_of(first)
  peak = "" if chip is None else f", {chip.flops / 1e12:,.0f} bfloat16 TFLOP/s each"
  return (
    f"{len(devices)} {first.platform} ({first.device_kind}){peak}, "
    f"{capacity.memory_bytes() / 2**30:,.1f} GiB of memory in all, "
    f"{count} process{'es' if count > 1 else ''}"
  )


def _mesh() -> Mesh:
  return mesh_lib.create_mesh({"fsdp": len(jax.devices())})


def _collective() -> str:
  """Computes a sum over all devices."""
  mesh = _mesh()
  rows = NamedSharding(mesh, P("fsdp"))
  numbers = jax.jit(
    lambda: jnp.arange(mesh.size, dtype=jnp.float32), out_shardings=rows
  )
  total = float(jax.jit(jnp.sum)(numbers()))
  expected = mesh.size * (mesh.size - 1) / 2
  if total != expected:
    raise RuntimeError(
      f"the sum over {terminal.counted(mesh.size, 'device')} is {total}; expected "
      f"{expected}"
    )
  return f"fsdp {mesh.size}: a sum over all devices is right"


def _checkpoint(folder: pathlib.Path | None) -> str:
  """Writes and reads a checkpoint of an array that all devices share."""
  mesh = _mesh()
  where = NamedSharding(mesh, P("fsdp"))
  saved = jax.device_put(np.arange(4.0 * mesh.size, dtype=np.float32), where)
  state = RunState(model_params={"x": saved}, progress={})
  with tempfile.TemporaryDirectory(dir=folder, prefix="tunix-doctor-") as name:
    free = shutil.disk_usage(name).free
    manager = CheckpointManager(name)
    manager.save_state(1, state, force=True)
    manager.wait()
    loaded = manager.restore_state(
      dataclasses.replace(state, model_params={"x": jnp.zeros_like(saved)})
    )
    manager.close()
  params = {} if loaded is None else loaded[1].model_params or {}
  if not np.array_equal(params.get("x", ()), saved):
    raise RuntimeError("the array read differs from the array written")
  place = "a temporary folder" if folder is None else str(folder)
  return f"written and read in {place}, {free / 2**30:,.1f} GiB free there"
