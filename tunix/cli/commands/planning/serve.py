"""The command `tunix plan serve`: memory and speed of a server's engine.

It also has what this command and `tunix plan` share: their arguments and their output.
"""

from __future__ import annotations

import argparse
import json as json_lib
import pathlib
import re
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from tunix.cli import config as config_lib
from tunix.cli.commands import serve
from tunix.cli.make import loading
from tunix.cli.run import folder as run_folder
from tunix.cli.settings.run import RunSettings
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import families
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.perf.programs import ProgramRecord
from tunix.plan import program, rollout, topology as topology_lib, training
from tunix.plan.engine import DECODE, MIXED, EngineRecords
from tunix.plan.report import SERVE, RunEstimate
from tunix.utils import mesh as mesh_lib

_DOES_NOT_FIT = 1
_ABOUT = (
  "compiles the programs of `tunix serve MODEL` for chips that need not be here, and "
  "prints their memory and bounds of their speed. MODEL may also be the name of a "
  "preset; only shapes are read"
)


def main(argv: Sequence[str]) -> int:
  """Runs `tunix plan serve`; returns the exit code.

  Raises:
    FileNotFoundError: there is no such model.
    ImportError: libtpu is missing.
    ValueError: a number is out of range, or the topology or the mesh does not exist.
  """
  made = serve.parser()
  made.prog, made.description = "tunix plan serve", _ABOUT
  add_arguments(made)
  args = made.parse_args(list(argv))
  check(args)
  if args.draft_model is not None:
    raise ValueError(
      f"--draft_model is {args.draft_model!r}, but a plan has one model only: leave it "
      "out, and plan the draft model as a model of its own"
    )
  mesh = {"tp": -1} if args.mesh is None else axes(args.mesh)
  estimate = plan(args, args.topology, mesh)
  return show(estimate, json=args.json, markdown=args.markdown)


def plan(args: argparse.Namespace, topology: str, mesh: dict[str, int]) -> RunEstimate:
  """Compiles the programs of a server for a topology.

  Args:
    args: arguments of `tunix serve`.
    topology: name of a topology, see `tunix.plan.topology`.
    mesh: {axis: size}.

  Returns:
    The estimate. Its programs are those of requests with all rules, except
    `prompt_logprobs`. A round is timed with slots that are half full.

  Raises:
    FileNotFoundError, ImportError, ValueError: see `main`.
  """
  where = topology_lib.find(topology)
  grid, settings = where.mesh(mesh), _settings(args)
  with mesh_lib.use_mesh(grid):
    model = loading.ModelLoader(settings, grid, of_shapes=True).model()
  config = serve.engine_config(args, model)
  records = _records(model, config)
  sampled, context = EngineRecords(records), config.max_tokens // 2
  planned = {
    name: program.estimate(
      name,
      records[name],
      grid.size,
      where.chip,
      passes=1,
      moved_bytes=sampled.read_bytes(context),
    )
    for name in (MIXED, DECODE)
  }
  return RunEstimate(
    job=SERVE,
    model=describe(settings, model),
    topology=where.name,
    mesh={axis: int(size) for axis, size in grid.shape.items()},
    devices=grid.size,
    chip=where.chip,
    memory_bytes=where.memory_bytes,
    programs=[*planned.values()],
    tokens=0,
    model_flops=0.0,
    engine=sampled.estimate(planned, where.memory_bytes, context),
  )


def _settings(args: argparse.Namespace) -> RunSettings:
  """Returns settings that name the model of a server."""
  names = {name for family in families.FAMILIES.values() for name in family.presets}
  key, source = "name", args.model
  if source not in names or pathlib.Path(source).exists():
    key, source = "path", run_folder.export_of(source, None)[0]
  words = [f"--model.{key}={source}"]
  if args.dtype is not None:
    words += [f"--model.dtype={args.dtype}", f"--model.param_dtype={args.dtype}"]
  return config_lib.load(words)


def _records(model: Transformer, config: EngineConfig) -> dict[str, ProgramRecord]:
  """Returns {name: program} of an engine whose requests use all rules."""
  request = EngineRequest(
    prompt=np.zeros(1, np.int32),
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    seed=0,
    stop_ids=(),
    logit_bias={0: 1.0},
    logprobs=True,
    top_logprobs=min(1, config.max_top_logprobs),
  )
  with programs.recording() as records:
    Engine(model, TokenizerAdapter(rollout.NoText()), config).run([request])
  return records


# Arguments and output of both commands.


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of a plan."""
  add = parser.add_argument
  add("--topology", metavar="NAME", help="v5e:2x4, v6e:2x4, ..., cpu:8, or gpu")
  add("--mesh", metavar="AXIS=SIZE,...", help="default: tp over all devices")
  add("--json", action="store_true", help="print all figures, with every collective")
  add("--markdown", action="store_true", help="print the report as Markdown")


def check(args: argparse.Namespace) -> None:
  """Refuses a plan without a topology, and two forms of output.

  Raises:
    ValueError: names the argument.
  """
  if args.json and args.markdown:
    raise ValueError("--json and --markdown are two forms of one plan: give one")
  if args.topology is None:
    raise ValueError("--topology is missing: give one such as --topology v5e:4x4")


def show(estimate: RunEstimate, *, json: bool, markdown: bool) -> int:
  """Prints an estimate; returns the exit code of the command."""
  if json:
    print(json_lib.dumps(estimate.to_json(), indent=2))
  else:
    print(estimate.to_markdown() if markdown else estimate)
  return _DOES_NOT_FIT if estimate.fits is False else 0


def describe(config: RunSettings, model: nnx.Module) -> str:
  """Returns the model of a plan in words."""
  source = config.model.name or config.model.path
  total = sum(x.size for x in jax.tree.leaves(training.parameters(model)))
  adapters = "" if config.lora is None else f", LoRA of rank {config.lora.rank}"
  stored = (
    "" if config.model.quantize is None else f", stored as {config.model.quantize}"
  )
  return f"{source}, {total / 1e9:,.2f} billion parameters{adapters}{stored}"


def axes(text: str) -> dict[str, int]:
  """Parses `fsdp=8,tp=2` as {axis: size}.

  Raises:
    ValueError: the text has another form.
  """
  out: dict[str, int] = {}
  for part in text.split(","):
    if (found := re.fullmatch(r"\s*(\w+)=(-?\d+)\s*", part)) is None:
      raise ValueError(f"--mesh is {text!r}; expected sizes of axes, as in fsdp=8,tp=2")
    out[found[1]] = int(found[2])
  return out
