"""The command `tunix plan serve`: memory and speed of a server's engine.

It also has what this command and `tunix plan` share: their arguments and their output.
"""

from __future__ import annotations

import dataclasses
import json as json_lib
import pathlib
import re
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from tunix.cli import config as config_lib
from tunix.cli.commands import serve
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.make import loading
from tunix.cli.run import folder as run_folder
from tunix.cli.settings.options import Section, Values
from tunix.cli.settings.run import RunSettings
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import families, quantization
from tunix.models.transformer.model import Transformer
from tunix.perf import programs
from tunix.perf.programs import ProgramRecord
from tunix.plan import apart, program, rollout, topology as topology_lib, training
from tunix.plan.engine import DECODE, MIXED, EngineRecords
from tunix.plan.report import SERVE, RunEstimate
from tunix.utils import mesh as mesh_lib

_DOES_NOT_FIT = 1
_ABOUT = (
  "compiles the programs of `tunix serve MODEL` for chips that need not be here, and "
  "prints their memory and bounds of their speed. MODEL may also be the name of a "
  "preset; only shapes are read"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
  """The devices and the form of a plan.

  Attributes:
    topology: v5e:2x4, v6e:2x4, ..., h100:8, ..., cpu:8, or gpu.
    mesh: sizes of axes, as in fsdp=8,tp=2; null: tp over all devices.
    json: prints all figures, with every collective.
    markdown: prints the report as Markdown.
  """

  topology: str | None = None
  mesh: str | None = None
  json: bool = False
  markdown: bool = False


def main(argv: Sequence[str]) -> int:
  """Runs `tunix plan serve`; returns the exit code.

  Raises:
    FileNotFoundError: there is no such model.
    ImportError: libtpu, or the compiler for GPUs, is missing.
    ValueError: a number is out of range, or the topology or the mesh does not exist.
  """
  values = parser().read(argv)
  args, draft = values.build(PlanOptions), values.build(serve.ServeOptions).draft_model
  topology = check(args.topology, json=args.json, markdown=args.markdown)
  if draft is not None:
    raise ValueError(
      f"--draft_model is {draft!r}, but a plan has one model only: leave it "
      "out, and plan the draft model as a model of its own"
    )
  mesh = {"tp": -1} if args.mesh is None else axes(args.mesh)
  estimate = plan(values, topology, mesh)
  return show(estimate, json=args.json, markdown=args.markdown)


def parser() -> Parser:
  """Returns the parser of the arguments."""
  return serve.parser("tunix plan serve", _ABOUT, Section(PlanOptions))


def plan(values: Values, topology: str, mesh: dict[str, int]) -> RunEstimate:
  """Compiles the programs of a server for a topology.

  Args:
    values: options of `tunix serve`.
    topology: name of a topology, see `tunix.plan.topology`.
    mesh: {axis: size}.

  Returns:
    The estimate. Its programs are those of requests with all rules, except
    `prompt_logprobs`. A round is timed with slots that are half full.

  Raises:
    FileNotFoundError, ImportError, ValueError: see `main`.
  """
  return apart.plan(_plan, values, topology, mesh)


def _plan(values: Values, topology: str, mesh: dict[str, int]) -> RunEstimate:
  """Compiles the programs in this process; see `plan`."""
  where = topology_lib.find(topology)
  grid, settings = where.mesh(mesh), _settings(values.build(serve.ServeOptions))
  with mesh_lib.use_mesh(grid):
    model = loading.ModelLoader(settings, grid, of_shapes=True).model()
  described = describe(settings, model)
  if (form := values.build(serve.ServeOptions).weights) is not None:
    model = quantization.for_sampling(model, form)
    described += f", stored as {form}"
  config = serve.engine_config(values, model)
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
    model=described,
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


def _settings(args: serve.ServeOptions) -> RunSettings:
  """Returns settings that name the model of a server."""
  names = {name for family in families.FAMILIES.values() for name in family.presets}
  key, source = "name", args.model
  if source not in names or pathlib.Path(source).exists():
    key, source = "path", run_folder.export_of(source, None)[0]
  words = [f"--model.{key}={source}"]
  if args.dtype is not None:
    words += [f"--model.dtype={args.dtype}", f"--model.param_dtype={args.dtype}"]
  if args.images is not None:
    words.append(f"--model.images={str(args.images).lower()}")
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


def check(topology: str | None, *, json: bool, markdown: bool) -> str:
  """Returns the topology; refuses a plan without one, and two forms of output.

  Raises:
    ValueError: names the argument.
  """
  if json and markdown:
    raise ValueError("--json and --markdown are two forms of one plan: give one")
  if topology is None:
    raise ValueError("--topology is missing: give one such as --topology v5e:4x4")
  return topology


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
    if (match := re.fullmatch(r"\s*(\w+)=(-?\d+)\s*", part)) is None:
      raise ValueError(f"--mesh is {text!r}; expected sizes of axes, as in fsdp=8,tp=2")
    out[match[1]] = int(match[2])
  return out
