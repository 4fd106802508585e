"""`tunix plan`: what a run needs, and how fast it can be, before there are chips."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.cli import (
  build,
  build_data,
  config as config_lib,
  mesh as mesh_axes,
  optimizer,
  plan_fit,
  precision,
)
from tunix.cli.jobs.job import Loaded
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import RunSettings
from tunix.plan import program, topology as topology_lib, training
from tunix.plan.report import Plan
from tunix.utils import mesh as mesh_lib

HELP = """\
usage: tunix plan CONFIG --topology NAME [--mesh AXIS=SIZE,...] [--fit]
                  [--json] [--KEY.SUB=VALUE ...]

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
  --json           everything, collectives one by one

Jobs that can be planned: {jobs}. The exit code is 1 where a program does not fit."""

_DOES_NOT_FIT = 1
_SCHEDULED = 1000  # steps, where nothing says how long a schedule is


def main(argv: Sequence[str]) -> int:
  """Runs `tunix plan`; returns the exit code."""
  words = list(argv)
  if not words or {"--help", "-h"} & set(words):
    print(HELP.format(jobs=", ".join(_planned())))
    return 0
  flags = {flag for flag in ("--json", "--fit") if flag in words}
  words = [word for word in words if word not in flags]
  name, words = _taken(words, "--topology")
  axes, words = _taken(words, "--mesh")
  if name is None:
    raise ValueError("--topology is missing: give one such as --topology v5e:4x4")
  mesh = None if axes is None else _axes(axes)
  made = plan(config_lib.load(words), name, mesh, fit="--fit" in flags)
  print(json.dumps(made.to_json(), indent=2) if "--json" in flags else made)
  return _DOES_NOT_FIT if made.fits is False else 0


def plan(
  config: RunSettings,
  topology: str,
  mesh: dict[str, int] | None = None,
  *,
  fit: bool = False,
) -> Plan:
  """Compiles the programs of a run for a topology.

  Args:
    config: of `tunix train`; its data is not read.
    topology: see `tunix.plan.topology`.
    mesh: sizes by axis; None: those of the configuration, else fsdp over all devices.
    fit: also look for the largest micro-batch that fits, or for settings that make the
      run fit; the step is compiled some times more.

  Raises:
    ValueError: a job that is not planned yet, a topology that does not exist, a mesh
      that does not multiply out, or settings that contradict each other.
    ImportError: libtpu is missing.
    FileNotFoundError: no such model.
  """
  job = JOBS[config.job]
  if job.example is None:
    raise ValueError(
      f"job is {config.job!r}, which cannot be planned yet: {', '.join(_planned())} can"
    )
  where = topology_lib.find(topology)
  made = where.mesh(mesh or config.mesh or {"fsdp": -1})
  config = settled(config, {axis: int(size) for axis, size in made.shape.items()})
  job.check(config)
  trainer = _trainer(config, made)
  with mesh_lib.use_mesh(made):
    lowered = training.of_trainer(trainer, job.example(config))
    programs = [
      program.plan(name, one, made.size, where.chip) for name, one in lowered.items()
    ]
  rows, length = _sequences(config)
  sizes = build.sizes_of_model(config)
  out = Plan(
    job=config.job,
    model=_words(config, trainer.model),
    topology=where.name,
    mesh=dict(config.mesh),
    devices=made.size,
    chip=where.chip,
    memory_bytes=where.memory_bytes,
    programs=programs,
    tokens=rows * length,
    model_flops=training.model_flops(trainer, sizes, rows, length),
    steps=config.training.max_steps,
  )
  return dataclasses.replace(out, advice=advise(config, made, out)) if fit else out


def _trainer(config: RunSettings, mesh: Mesh) -> Any:
  """What trains, of shapes on the mesh."""
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)  # tried out, which needs real devices
  with mesh_lib.use_mesh(mesh):
    loaded = Loaded(
      config=config,
      model=build.shapes_of_model(config, mesh),
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
  example = JOBS[config.job].example
  assert example is not None

  def peak(config: RunSettings) -> int:
    trainer = _trainer(config, mesh)
    with mesh_lib.use_mesh(mesh):
      return program.peak_bytes(trainer.lower_train_step(example(config)).compile())

  shards = math.prod(mesh.shape[axis] for axis in mesh_axes.data_axes(config.mesh))
  search = plan_fit.largest_micro_batch if made.fits else plan_fit.first_remedy
  found = search(config, shards, made.memory_bytes, peak)
  if found is None:
    return "nothing here makes it fit: take more chips, or a smaller model"
  what = "the largest micro-batch that fits" if made.fits else "it fits with"
  return f"{what}: {' '.join(found.words)} ({found.peak_bytes / 2**30:,.2f} GiB)"


def _planned() -> list[str]:
  return [name for name, job in JOBS.items() if job.example is not None]


def settled(config: RunSettings, mesh: dict[str, int]) -> RunSettings:
  """The configuration as a run would use it, on this mesh."""
  mesh_axes.check(mesh, config.training.batch_rows)
  config = dataclasses.replace(config, mesh=mesh)
  config = precision.settle(build.settle_lora(build_data.settle(config)))
  return optimizer.settle(config, config.training.max_steps or _SCHEDULED)


def _sequences(config: RunSettings) -> tuple[int, int]:
  """(rows of a step, tokens of each)."""
  job = JOBS[config.job]
  rows = config.training.global_batch_size
  assert job.example is not None
  completions = sum(name.endswith("_ids") for name in job.example(config)) - 1
  return rows * max(1, completions), job.length(config)[1]


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
