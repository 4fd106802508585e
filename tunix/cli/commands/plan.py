"""`tunix plan`: what a run needs, and how fast it can be, before there are chips."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.cli import config as config_lib
from tunix.cli.build import loading, mesh as mesh_axes, optimizer
from tunix.cli.commands import plan_fit
from tunix.cli.jobs.job import Loaded
from tunix.cli.jobs.rl import RLRun
from tunix.cli.jobs.table import JOBS
from tunix.cli.run import folder as run_folder
from tunix.cli.run.settle import settle_values
from tunix.cli.settings.run import RunSettings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.perf import programs
from tunix.perf.chips import Chip
from tunix.perf.programs import Noted
from tunix.plan import (
  program,
  residents,
  rl,
  rollout,
  shipped,
  topology as topology_lib,
  training,
)
from tunix.plan.program import ProgramPlan
from tunix.plan.report import Plan
from tunix.plan.rl import OTHERS
from tunix.plan.rollout import LOOP, OPENING
from tunix.plan.training import STEP
from tunix.rl.rl_learner import RLLearner
from tunix.utils import mesh as mesh_lib

HELP = """\
usage: tunix plan CONFIG --topology NAME [--mesh AXIS=SIZE,...] [--fit]
                  [--ship FOLDER] [--json | --markdown] [--KEY.SUB=VALUE ...]

Compiles the programs of `tunix train CONFIG` for chips that need not be here, and says
what each of them takes of a chip's memory, and how fast it can be at most. Nothing of
the data is read, and of the model only its shapes: a preset (model.name), or the
config.json of a folder.

  tunix plan --model.name=llama3p1_8b --training.global_batch_size=16 \\
      --data.max_length=4096 --topology v5e:4x4 --mesh fsdp=8,tp=2

  --topology NAME  v5e:4x4, v6e:2x4, v5p:2x2x1, ... (needs libtpu, but no TPU), cpu:8,
                   gpu (this machine's)
  --mesh AXES      instead of the configuration's mesh; without either, fsdp over all
  --fit            also find the largest micro-batch that fits, or what makes it fit
  --ship FOLDER    also write the compiled programs: `tunix train CONFIG
                   --compilation_cache=FOLDER` loads them instead of compiling
  --json           everything, collectives one by one
  --markdown       the table and what follows from it, to paste

Every job is planned, also those that sample: grpo and ppo show the rollouts beside
scoring and updates. The exit code is 1 where a program does not fit."""

_DOES_NOT_FIT = 1
_SCHEDULED = 1000  # steps, where nothing says how long a schedule is


def main(argv: Sequence[str]) -> int:
  """Runs `tunix plan`; returns the exit code."""
  words = list(argv)
  if not words or {"--help", "-h"} & set(words):
    print(HELP)
    return 0
  flags = {flag for flag in ("--json", "--markdown", "--fit") if flag in words}
  if {"--json", "--markdown"} <= flags:
    raise ValueError("--json and --markdown are two forms of one plan: give one")
  words = [word for word in words if word not in flags]
  name, words = _taken(words, "--topology")
  axes, words = _taken(words, "--mesh")
  folder, words = _taken(words, "--ship")
  if name is None:
    raise ValueError("--topology is missing: give one such as --topology v5e:4x4")
  if axes is not None and axes.startswith("{"):  # as `tunix train` takes it
    axes, words = None, [*words, f"--mesh={axes}"]
  mesh = None if axes is None else _axes(axes)
  made = plan(config_lib.load(words), name, mesh, fit="--fit" in flags, ship=folder)
  print(_shown(made, flags))
  return _DOES_NOT_FIT if made.fits is False else 0


def _shown(made: Plan, flags: set[str]) -> str:
  if "--json" in flags:
    return json.dumps(made.to_json(), indent=2)
  return made.to_markdown() if "--markdown" in flags else str(made)


def plan(
  config: RunSettings,
  topology: str,
  mesh: dict[str, int] | None = None,
  *,
  fit: bool = False,
  ship: str | None = None,
) -> Plan:
  """Compiles the programs of a run for a topology.

  Args:
    config: of `tunix train`; its data is not read.
    topology: see `tunix.plan.topology`.
    mesh: sizes by axis; None: those of the configuration, else fsdp over all devices.
    fit: also look for the largest micro-batch that fits, or for settings that make the
      run fit; the step is compiled some times more.
    ship: folder to write the compiled programs to (see `tunix.plan.shipped`), unless
      one of them does not fit.

  Raises:
    ValueError: a topology that does not exist, a mesh that does not multiply out, or
      settings that contradict each other.
    ImportError: libtpu is missing.
    FileNotFoundError: no such model.
    OSError: `ship` cannot be written.
  """
  if ship is not None:
    run_folder.check_writable("--ship", pathlib.Path(ship))
  job = JOBS[config.job]
  where = topology_lib.find(topology)
  made = where.mesh(mesh or config.mesh or {"fsdp": -1})
  config = settled(config, {axis: int(size) for axis, size in made.shape.items()})
  job.check(config)
  with contextlib.ExitStack() as held:
    if ship is not None:
      cache = held.enter_context(tempfile.TemporaryDirectory())
      held.enter_context(shipped.cache_in(cache))
    trainer = _trainer(config, made)
    noted = _noted(config, trainer, made)
    out = _described(config, trainer, noted, made, where)
    if ship is not None:
      message = _ship(ship, cache, config, trainer, made, noted, out.fits)
      out = dataclasses.replace(out, shipped=message)
  return dataclasses.replace(out, advice=advise(config, made, out)) if fit else out


def _described(
  config: RunSettings,
  trainer: Any,
  noted: dict[str, Noted],
  mesh: Mesh,
  where: topology_lib.Topology,
) -> Plan:
  """Compiles the programs of a step and collects the figures of the run."""
  planned = _planned(config, noted, mesh, where.chip)
  job = JOBS[config.job]
  rows, length = job.sequences(config), job.length(config)[1]
  sizes, of_roles = loading.ModelLoader(config).sizes(), _trainers(trainer)
  updates = max(one.calls for name, one in noted.items() if name in of_roles)
  loop = planned.get(LOOP)
  steps = config.training.max_steps
  return Plan(
    job=config.job,
    model=_words(config, of_roles[min(of_roles)].model),
    topology=where.name,
    mesh=dict(config.mesh),
    devices=mesh.size,
    chip=where.chip,
    memory_bytes=where.memory_bytes,
    programs=[*planned.values()],
    tokens=rows * length,
    model_flops=sum(
      training.model_flops(one, sizes, rows, length) for one in of_roles.values()
    ),
    steps=None if steps is None else -(-steps // updates),
    rollouts=loop
    and rollout.of_loop(noted[LOOP], loop, where.memory_bytes, noted.get(OPENING)),
  )


def _ship(
  folder: str,
  cache: str,
  config: RunSettings,
  trainer: Any,
  mesh: Mesh,
  noted: dict[str, Noted],
  fits: bool | None,
) -> str:
  """Writes the compiled programs, and those of shorter prompts; returns a summary."""
  if fits is False:
    return "nothing is shipped of a run that does not fit"
  with programs.noted(noted):
    for batch in JOBS[config.job].shorter(config):
      _lower(trainer, batch, mesh)
  names = []
  for name, first in noted.items():
    for one in (first, *first.others):
      _ = one.compiled  # fills the cache
      names.append(name)
  size = shipped.write(folder, cache, mesh, names)
  return f"shipped: {len(names)} programs, {size / 2**20:,.1f} MiB, in {folder}"


def _lower(trainer: Any, batch: Any, mesh: Mesh) -> None:
  """Goes through a step on a batch, for the programs it calls to be noted."""
  if isinstance(trainer, RLLearner):
    trainer.lower_step(batch)
    return
  with mesh_lib.use_mesh(mesh):
    trainer.lower_train_step(batch)


def _noted(config: RunSettings, trainer: Any, mesh: Mesh) -> dict[str, Noted]:
  """{name: program} of a step."""
  batch = JOBS[config.job].example(config)
  if isinstance(trainer, RLLearner):
    return rl.of_learner(trainer, batch)  # every role works on the mesh it lies on
  with mesh_lib.use_mesh(mesh):
    return training.of_trainer(trainer, batch)


def _trainers(trainer: Any) -> dict[str, Any]:
  """What is trained, by the name of its update."""
  return rl.trainers(trainer) if isinstance(trainer, RLLearner) else {STEP: trainer}


def _planned(
  config: RunSettings, noted: dict[str, Noted], mesh: Mesh, chip: Chip | None
) -> dict[str, ProgramPlan]:
  """{name: what it needs} of the programs of a step."""
  elsewhere = OTHERS if isinstance(config, RLRun) and config.rl.offload_to_cpu else ()
  beside = residents.beside(noted, elsewhere)
  return {
    name: program.plan(
      name,
      one,
      mesh.size,
      chip,
      passes=rollout.passes(one) if name == LOOP else None,
      beside_bytes=beside[name],
    )
    for name, one in noted.items()
    if one.gives_arrays
  }


def _trainer(config: RunSettings, mesh: Mesh) -> Any:
  """What trains, of shapes on the mesh."""
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)  # tried out, which needs real devices
  with mesh_lib.use_mesh(mesh), programs.noted():
    loaded = Loaded(
      config=config,
      model=loading.ModelLoader(config, mesh, of_shapes=True).model(),
      tokenizer=TokenizerAdapter(rollout.NoText()),
      optimizer=tx,
      mesh=mesh,
      output_dir=None,
      learning_rate=rate,
      of_shapes=True,
    )
    return JOBS[config.job].build(loaded)


def advise(config: RunSettings, mesh: Mesh, made: Plan) -> str:
  """What `fit` looks for, in words."""
  if made.memory_bytes is None:
    raise ValueError(
      "--fit compares with the memory of a device, which is not known of "
      f"{made.topology}: give the topology of a TPU, or gpu"
    )
  if isinstance(config, RLRun):
    raise ValueError(
      f"--fit is not there for the job {config.job}: change rl.train_micro_batch_size, "
      "rl.rollout_micro_batch_size or rl.compute_logps_micro_batch_size, whichever "
      "program takes most, and plan again"
    )

  def peak(config: RunSettings) -> int:
    noted = _noted(config, _trainer(config, mesh), mesh)
    return program.peak_of(noted[STEP]) + residents.beside(noted)[STEP]

  shards = math.prod(mesh.shape[axis] for axis in mesh_axes.data_axes(config.mesh))
  search = plan_fit.largest_micro_batch if made.fits else plan_fit.first_remedy
  found = search(config, shards, made.memory_bytes, peak)
  if found is None:
    return "nothing here makes it fit: take more chips, or a smaller model"
  what = "the largest micro-batch that fits" if made.fits else "it fits with"
  return f"{what}: {' '.join(found.words)} ({found.peak_bytes / 2**30:,.2f} GiB)"


def settled(config: RunSettings, mesh: dict[str, int]) -> RunSettings:
  """The configuration as a run would use it, on this mesh."""
  mesh_axes.check(mesh, config.training.batch_rows)
  mesh_axes.check_length(mesh, *JOBS[config.job].length(config))
  config = dataclasses.replace(config, mesh=mesh)
  return settle_values(config, config.training.max_steps or _SCHEDULED)


def _words(config: RunSettings, model: nnx.Module) -> str:
  source = config.model.name or config.model.path
  total = sum(x.size for x in jax.tree.leaves(training.parameters(model)))
  adapters = "" if config.lora is None else f", LoRA of rank {config.lora.rank}"
  stored = (
    "" if config.model.quantise is None else f", stored as {config.model.quantise}"
  )
  return f"{source}, {total / 1e9:,.2f} billion parameters{adapters}{stored}"


def _taken(words: list[str], flag: str) -> tuple[str | None, list[str]]:
  """The value of a flag, and the other words."""
  for i, word in enumerate(words):
    name, equals, value = word.partition("=")
    if name != flag:
      continue
    if equals:
      return value, words[:i] + words[i + 1 :]
    if i + 1 == len(words) or words[i + 1].startswith("--"):
      raise ValueError(f"{flag} has no value: write {flag} VALUE")
    return words[i + 1], words[:i] + words[i + 2 :]
  return None, words


def _axes(text: str) -> dict[str, int]:
  """`fsdp=8,tp=2` as sizes by axis.

  Raises:
    ValueError: it is written otherwise.
  """
  out: dict[str, int] = {}
  for part in text.split(","):
    if (found := re.fullmatch(r"\s*(\w+)=(-?\d+)\s*", part)) is None:
      raise ValueError(f"--mesh {text!r}: write axes and sizes, such as fsdp=8,tp=2")
    out[found[1]] = int(found[2])
  return out
