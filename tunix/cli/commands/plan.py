"""The command `tunix plan`: memory and time of a run, before there are chips."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.cli import config as config_lib
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.commands.planning import fit as plan_fit, serve as plan_serve
from tunix.cli.jobs.job import Loaded
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import loading, optimizer
from tunix.cli.run import folder as run_folder
from tunix.cli.run.settle import settle_values
from tunix.cli.settings import mesh as mesh_axes
from tunix.cli.settings.run import RunSettings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.perf import programs
from tunix.perf.chips import Chip
from tunix.perf.programs import ProgramRecord
from tunix.plan import (
  apart,
  gpus,
  handover,
  program,
  residents,
  rl,
  rollout,
  shipped,
  topology as topology_lib,
  training,
)
from tunix.plan.engine import DECODE, HELPERS, MIXED, EngineRecords, Load
from tunix.plan.program import ProgramEstimate
from tunix.plan.report import RunEstimate
from tunix.plan.rl import OTHERS
from tunix.plan.rollout import LOOP, OPENING
from tunix.plan.training import STEP
from tunix.rl.rl_learner import RLLearner
from tunix.sft.peft_trainer import PeftTrainer
from tunix.utils import mesh as mesh_lib, terminal

HELP = """\
usage: tunix plan CONFIG --topology NAME [--mesh AXIS=SIZE,...] [--fit]
                  [--image-tokens N] [--ship FOLDER [--ship-key FILE]]
                  [--json | --markdown] [--KEY.SUB=VALUE ...]
       tunix plan serve MODEL --topology NAME [options of `tunix serve`]

Compiles the programs of `tunix train CONFIG` for chips that need not be here, and
prints the memory that each program takes on a chip and a lower bound of its time. No
data is read. Of the model only the shapes are needed: a preset (model.name), or the
config.json of a folder.

  tunix plan --model.name=llama3p1_8b --training.global_batch_size=16 \\
      --data.max_length=4096 --topology v5e:4x4 --mesh fsdp=8,tp=2

  --topology NAME  v5e:4x4, v6e:2x4, v5p:2x2x1, ... (needs libtpu, but no TPU), h100:8,
                   h200:1, a100-80:1x2x8, ... (needs tunix[plan-gpu], but no GPU),
                   cpu:8, gpu (this machine's)
  --mesh AXES      instead of the configuration's mesh; without either, fsdp over all
  --fit            also find the largest micro-batch that fits, or settings that make
                   the run fit
  --image-tokens N the rows of the job sft have images of N tokens (0)
  --ship FOLDER    also write the compiled programs: `tunix train CONFIG
                   --compilation_cache=FOLDER` loads them instead of compiling
  --ship-key FILE  also sign FOLDER with the key in FILE, which `tunix train` then needs
                   as --compilation_cache_key=FILE
  --json           print all figures, with every collective
  --markdown       print the table and the summary as Markdown

Every job can be planned. For grpo and ppo the plan shows rollouts, scoring and updates.
`tunix plan serve MODEL` plans a server: see `tunix plan serve --help`.
The exit code is 1 if a program does not fit."""

_SCHEDULED = 1000  # steps of a schedule, if nothing gives the length of the run


def main(argv: Sequence[str]) -> int:
  """Runs `tunix plan`; returns the exit code."""
  if argv and argv[0] == "serve":
    return plan_serve.main(argv[1:])
  if not argv or {"--help", "-h"} & set(argv):
    print(HELP)
    return 0
  parser = Parser("tunix plan", "")
  for name in ("--topology", "--mesh", "--ship", "--ship-key"):
    parser.add_argument(name)
  parser.add_argument("--image-tokens", type=int, default=0)
  for name in ("--fit", "--json", "--markdown"):
    parser.add_argument(name, action="store_true")
  args, words = parser.parse_known_args(list(argv))
  plan_serve.check(args.topology, json=args.json, markdown=args.markdown)
  if args.ship_key is not None and args.ship is None:
    raise ValueError(
      f"--ship-key is {args.ship_key!r} and --ship is missing: give the folder to sign"
    )
  mesh = None
  if args.mesh is not None and args.mesh.startswith("{"):  # as `tunix train` takes it
    words.append(f"--mesh={args.mesh}")
  elif args.mesh is not None:
    mesh = plan_serve.axes(args.mesh)
  config = config_lib.load(words)
  options = {"fit": args.fit, "image_tokens": args.image_tokens}
  options |= {"ship": args.ship, "ship_key": args.ship_key}
  estimate = plan(config, args.topology, mesh, **options)
  return plan_serve.show(estimate, json=args.json, markdown=args.markdown)


def plan(
  config: RunSettings,
  topology: str,
  mesh: dict[str, int] | None = None,
  *,
  fit: bool = False,
  image_tokens: int = 0,
  ship: str | None = None,
  ship_key: str | None = None,
) -> RunEstimate:
  """Compiles the programs of a run for a topology.

  Args:
    config: settings of `tunix train`. Its data is not read.
    topology: name of a topology, see `tunix.plan.topology`.
    mesh: {axis: size}; None: the mesh of the configuration, or fsdp over all devices.
    fit: also search for the largest micro-batch that fits, or for settings that make
      the run fit. The step is compiled several more times.
    image_tokens: number of soft tokens of the images in a row; 0: there are none.
    ship: folder for the compiled programs (see `tunix.plan.shipped`). Nothing is
      written if a program does not fit.
    ship_key: file with the key that signs the folder; None: it is not signed.

  Returns: the estimate of the run.

  Raises:
    ValueError: the topology does not exist, the mesh does not match its devices,
      settings contradict each other, the job or the model plans no images,
      `ship_key` is no file with a key, or `ship` is given for GPUs that are not there.
    ImportError: libtpu, or the compiler for GPUs, is missing.
    FileNotFoundError: there is no such model.
    OSError: `ship` cannot be written.
  """
  options = {"fit": fit, "image_tokens": image_tokens}
  options |= {"ship": ship, "ship_key": ship_key}
  return apart.plan(_plan, config, topology, mesh, **options)


def _plan(
  config: RunSettings,
  topology: str,
  mesh: dict[str, int] | None,
  *,
  fit: bool,
  image_tokens: int,
  ship: str | None,
  ship_key: str | None,
) -> RunEstimate:
  """Compiles the programs in this process; see `plan`."""
  if ship is not None and gpus.is_name(topology):
    raise ValueError(
      f"--ship is {ship!r} and --topology {topology}; XLA chooses kernels on the GPU "
      "itself. Leave --ship out, or plan there with --topology gpu"
    )
  if ship is not None:
    run_folder.check_writable("--ship", pathlib.Path(ship))
  key = None if ship_key is None else shipped.signing_key(ship_key, ship)
  job = JOBS[config.job]
  room = getattr(getattr(config, "episode", None), "max_image_tokens", 0)
  if room:
    raise ValueError(
      f"episode.max_image_tokens is {room}, and plans of {config.job} have no images; "
      "expected 0. Leave it out: the plan is then that of the run without images"
    )
  where = topology_lib.find(topology)
  devices, sampling = mesh_axes.divided(config.rollout_axes, where.devices)
  if sampling is not None and ship is not None:
    raise ValueError(
      f"--ship is {ship!r} and rl.rollout_mesh {config.rollout_axes}; programs of two "
      "meshes are not shipped. Leave one of them out"
    )
  grid = where.mesh(mesh or config.mesh or {"fsdp": -1}, devices)
  config = settled(config, {axis: int(size) for axis, size in grid.shape.items()})
  job.check(config)
  with contextlib.ExitStack() as held:
    if ship is not None:
      cache = held.enter_context(tempfile.TemporaryDirectory())
      held.enter_context(shipped.cache_in(cache))
    trainer = _trainer(config, grid, sampling)
    records = _records(config, trainer, grid, image_tokens)
    out = _estimate(config, trainer, records, grid, where, sampling)
    if ship is not None:
      batches = _example(config, image_tokens), *job.shorter(config)
      message = _ship(ship, cache, trainer, grid, batches, records, out.fits, key)
      if isinstance(config, RLRun) and config.rl.bucketed_lengths:
        message += (
          "; not those of batches with shorter rows, which compile in the run. "
          "rl.bucketed_lengths=false pads all to one length"
        )
      out = dataclasses.replace(out, shipped=message)
  if not fit:
    return out
  told = advise(config, grid, out, image_tokens, sampling)
  return dataclasses.replace(out, advice=told)


def _estimate(
  config: RunSettings,
  trainer: PeftTrainer | RLLearner,
  records: dict[str, ProgramRecord],
  mesh: Mesh,
  where: topology_lib.Topology,
  sampling: Mesh | None,
) -> RunEstimate:
  """Compiles the programs of a step and collects the figures of the run."""
  planned = _planned(config, trainer, records, mesh, where.chip, sampling)
  job = JOBS[config.job]
  rows, length = job.sequences(config), job.length(config)[1]
  sizes, of_roles = loading.ModelLoader(config).sizes(), _trainers(trainer)
  updates = max(one.calls for name, one in records.items() if name in of_roles)
  loop = planned.get(LOOP)
  steps = config.training.max_steps
  sampled = sent = None
  if sampling is not None and isinstance(trainer, RLLearner):
    assert isinstance(config, RLRun)
    lag = config.rl.staleness
    sent = handover.of_cluster(trainer.rl_cluster, sampling, where.chip, lag)
  if DECODE in records:
    context = _load(config, records).context
    sampled = EngineRecords(records).estimate(planned, where.memory_bytes, context)
  return RunEstimate(
    job=config.job,
    model=plan_serve.describe(config, of_roles[min(of_roles)].model),
    topology=where.name,
    mesh=dict(config.mesh),
    devices=len(where.devices),
    chip=where.chip,
    memory_bytes=where.memory_bytes,
    programs=[*planned.values()],
    tokens=rows * length,
    # The formula counts logits of every token; a program may need those of few.
    model_flops=sum(
      min(
        training.model_flops(one, sizes, rows, length),
        planned[name].flops * planned[name].runs,
      )
      for name, one in of_roles.items()
    ),
    steps=None if steps is None else -(-steps // updates),
    rollouts=loop
    and rollout.of_loop(records[LOOP], loop, where.memory_bytes, records.get(OPENING)),
    engine=sampled,
    handover=sent,
  )


def _ship(
  folder: str,
  cache: str,
  trainer: PeftTrainer | RLLearner,
  mesh: Mesh,
  batches: Sequence[Any],
  records: dict[str, ProgramRecord],
  fits: bool | None,
  key: bytes | None,
) -> str:
  """Writes the compiled programs, and those of other sizes; returns a summary."""
  if fits is False:
    return "nothing is shipped of a run that does not fit"
  with programs.recording(records, all_sizes=True):
    for batch in batches:
      _lower(trainer, batch, mesh)
  names = []
  for name, first in records.items():
    for one in (first, *first.others):
      _ = one.compiled  # fills the cache
      names.append(name)
  size = shipped.write(folder, cache, mesh, names, key)
  signed = "" if key is None else ", signed"
  count = terminal.counted(len(names), "program")
  return f"shipped: {count}, {size / 2**20:,.1f} MiB, in {folder}{signed}"


def _lower(trainer: PeftTrainer | RLLearner, batch: Any, mesh: Mesh) -> None:
  """Goes through a step on a batch, so that its programs are recorded."""
  if isinstance(trainer, RLLearner):
    trainer.lower_step(batch)
    return
  with mesh_lib.use_mesh(mesh):
    trainer.lower_train_step(batch)


def _example(config: RunSettings, image_tokens: int) -> Any:
  """Returns a global batch; rows of the job sft have blank images of so many tokens."""
  batch = JOBS[config.job].example(config)
  if not image_tokens:
    return batch
  reader = loading.ModelLoader(config).image_reader() if config.job == "sft" else None
  if reader is None or image_tokens < 0:
    raise ValueError(
      f"--image-tokens is {image_tokens}, the job {config.job} and the model "
      f"{config.model.path or config.model.name}; expected a positive number, sft and "
      "a folder whose model reads images (model.images=true). Leave --image-tokens out"
    )
  rows = config.training.global_batch_size
  one = reader.processor.row([], image_tokens)
  images = jax.tree.map(lambda x: np.broadcast_to(x, (rows, *x.shape)), one)
  return {**batch, "images": images}


def _records(
  config: RunSettings,
  trainer: PeftTrainer | RLLearner,
  mesh: Mesh,
  image_tokens: int = 0,
) -> dict[str, ProgramRecord]:
  """Returns {name: program} of a step."""
  batch = _example(config, image_tokens)
  if isinstance(trainer, RLLearner):
    return rl.of_learner(trainer, batch)  # enters the mesh of each role
  with mesh_lib.use_mesh(mesh):
    return training.of_trainer(trainer, batch)


def _trainers(trainer: PeftTrainer | RLLearner) -> dict[str, Any]:
  """Returns {name of the update program: trainer}."""
  return rl.trainers(trainer) if isinstance(trainer, RLLearner) else {STEP: trainer}


def _planned(
  config: RunSettings,
  trainer: PeftTrainer | RLLearner,
  records: dict[str, ProgramRecord],
  mesh: Mesh,
  chip: Chip | None,
  sampling: Mesh | None,
) -> dict[str, ProgramEstimate]:
  """Returns {name: estimate} of the programs of a step."""
  elsewhere = [MIXED, DECODE, *HELPERS]  # the engine frees its cache after each call
  if isinstance(config, RLRun) and config.rl.offload_to_cpu:
    elsewhere += OTHERS
  sides: dict[bool, dict[str, ProgramRecord]] = {False: {}, True: {}}
  for name, one in records.items():
    sides[residents.is_on(one, sampling)][name] = one
  beside = {
    k: v for x in sides.values() for k, v in residents.beside(x, elsewhere).items()
  }
  if isinstance(config, RLRun) and (copies := config.rl.weight_copies):
    assert isinstance(trainer, RLLearner)
    waiting = handover.waiting_bytes(trainer.rl_cluster, sampling, copies)
    for name in sides[sampling is not None]:
      beside[name] += waiting
  passes: dict[str, int] = {}
  moved: dict[str, float] = {}
  if LOOP in records:
    passes[LOOP] = rollout.passes(records[LOOP])
  if DECODE in records:
    load, sampled = _load(config, records), EngineRecords(records)
    passes |= sampled.rounds(load)
    moved |= dict.fromkeys((MIXED, DECODE), sampled.read_bytes(load.context))
  return {
    name: program.estimate(
      name,
      one,
      (sampling if sampling is not None and name in sides[True] else mesh).size,
      chip,
      passes=passes.get(name),
      moved_bytes=moved.get(name),
      beside_bytes=beside[name],
      only_samples=name in sides[True],
    )
    for name, one in records.items()
    if one.gives_arrays and name not in HELPERS
  }


def _load(config: RunSettings, records: dict[str, ProgramRecord]) -> Load:
  """Returns the completions of one call of the engine, of which a step has several."""
  job, prompts = JOBS[config.job], config.training.global_batch_size
  section = job.rollout(config)
  assert section is not None
  return Load(
    prompts=-(-prompts // records[DECODE].calls),
    samples=job.sequences(config) // prompts,
    prompt_tokens=section.max_prompt_length,
    new_tokens=section.max_tokens_to_generate,
  )


def _trainer(config: RunSettings, mesh: Mesh, sampling: Mesh | None = None) -> Any:
  """Builds the trainer or learner of a job from shapes on its meshes."""
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)  # runs once, which needs real devices
  with mesh_lib.use_mesh(mesh), programs.recording():
    loaded = Loaded(
      config=config,
      model=loading.ModelLoader(config, mesh, of_shapes=True).model(),
      tokenizer=TokenizerAdapter(rollout.NoText()),
      optimizer=tx,
      mesh=mesh,
      rollout_mesh=sampling,
      output_dir=None,
      learning_rate=rate,
      of_shapes=True,
    )
    return JOBS[config.job].build(loaded)


def advise(
  config: RunSettings,
  mesh: Mesh,
  estimate: RunEstimate,
  image_tokens: int = 0,
  sampling: Mesh | None = None,
) -> str:
  """Searches for settings that fill the chips or fit into them; returns a sentence."""
  if estimate.memory_bytes is None:
    raise ValueError(
      "--fit compares with the memory of a device, which is not known for "
      f"{estimate.topology}: give the topology of a TPU or a GPU"
    )

  def peak(config: RunSettings) -> tuple[int, str]:
    trainer = _trainer(config, mesh, sampling)
    records = _records(config, trainer, mesh, image_tokens)
    planned = _planned(config, trainer, records, mesh, estimate.chip, sampling)
    largest = max(planned.values(), key=lambda one: one.held_bytes)
    return largest.held_bytes, largest.name

  shards = math.prod(mesh.shape[axis] for axis in mesh_axes.data_axes(config.mesh))
  memory, found = estimate.memory_bytes, (estimate.peak_bytes, estimate.largest)
  if estimate.fits:
    better = plan_fit.largest_micro_batch(config, shards, memory, peak)
  else:
    better = plan_fit.first_remedy(config, shards, memory, peak, found)
  if better is None and estimate.fits:
    return "no other micro-batch of training fits"
  if better is None:
    return "nothing here makes it fit: take more chips, or a smaller model"
  what = "the largest micro-batch that fits" if estimate.fits else "it fits with"
  return f"{what}: {' '.join(better.words)} ({better.peak_bytes / 2**30:,.2f} GiB)"


def settled(config: RunSettings, mesh: dict[str, int]) -> RunSettings:
  """Returns the configuration as a run on this mesh would use it."""
  mesh_axes.check(mesh, config.training.batch_rows)
  mesh_axes.check_length(mesh, *JOBS[config.job].length(config))
  config = dataclasses.replace(config, mesh=mesh)
  return settle_values(config, config.training.max_steps or _SCHEDULED)
