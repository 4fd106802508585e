"""`tunix train`: from a configuration to a trained and exported model.

Everything that can be wrong is looked at before the first step: settings, mesh, data,
tokenizer, optimizer, and whether the run in the folder may go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tunix.cli import config as config_lib
from tunix.cli.build import (
  build,
  data as build_data,
  mesh as mesh_axes,
  optimizer,
  precision,
)
from tunix.cli.build.data import RunData
from tunix.cli.commands import export as export_main, report as report_main
from tunix.cli.jobs.job import Loaded
from tunix.cli.jobs.table import JOBS
from tunix.cli.run import (
  about,
  dry_run,
  folder as run_folder,
  lock as run_lock,
  processes as several,
  tiny,
)
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.result import Result, ends_of, how_to_go_on
from tunix.cli.settings import origins, reference, yaml_text
from tunix.cli.settings.run import RunSettings
from tunix.generate import capacity
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.transformer.model import Transformer
from tunix.plan import shipped
from tunix.report import page
from tunix.sft import launch
from tunix.sft.interrupts import Stopped
from tunix.sft.run import TrainResult
from tunix.utils import io, mesh as mesh_lib

_log = logging.getLogger(__name__)

# Characters of an error that the page shows: XLA's can fill a book.
_LONGEST_ERROR = 4000

HELP = """\
usage: tunix train [--config] FILE[,FILE] [--KEY.SUB=VALUE ...]
       tunix train --dry-run ...           looks at everything, trains nothing
       tunix train --tiny ...              two steps with a tiny model of the family
       tunix train --print-config ...      every value, and where it was set
       tunix train --help [SECTION] [--job=JOB]      the keys of a job
       tunix train --help all              of all jobs
       tunix train --schema [--job=JOB]    the JSON Schema of its files, for editors

Trains as the configuration says; the same command again resumes, and says so when the
run is finished. Later files override earlier ones, arguments override files. The keys
of all jobs ({jobs}) are in
  {path}

  tunix train --model.path=FOLDER --data.train=train.jsonl --lora.rank=8 \\
      --training.max_steps=200 --output_dir=out
  tunix train --job=dpo --model.path=FOLDER --data.train=pairs.jsonl --lora.rank=8 \\
      --training.max_steps=200 --output_dir=out
  tunix train --job=grpo --model.path=FOLDER --data.train=prompts.jsonl \\
      --reward.functions=exact_match --training.max_steps=200 --output_dir=out

Keys of the job {job}:
{keys}"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix train`."""
  if not argv or {"--help", "-h"} & set(argv):
    print(_help([word for word in argv if word not in ("--help", "-h")]))
  elif "--schema" in argv:
    schema = reference.json_schema(_job_of(argv, "--schema"))
    print(json.dumps(schema, indent=2, ensure_ascii=False))
  elif "--print-config" in argv:
    print(origins.describe(_without(argv, "--print-config")), end="")
  else:
    words = _without(argv, "--dry-run", "--tiny")
    config = tiny.load(words) if "--tiny" in argv else config_lib.load(words)
    (look if "--dry-run" in argv else run)(config)


def _help(words: list[str]) -> str:
  """Of everything, or of a section: the first word that names no file."""
  section = next(
    (w for w in words if not w.startswith("-") and not w.endswith((".yaml", ".yml"))),
    None,
  )
  if section == "all":
    return reference.base_config()
  words = [word for word in words if word != section]
  job = config_lib.job_of(words)
  told = reference.describe_keys(job, section)
  if section is not None:
    return told.strip()
  names, path = ", ".join(JOBS), yaml_text.BASE_PATH
  return HELP.format(jobs=names, path=path, job=job, keys=told)


def _without(argv: Sequence[str], *flags: str) -> list[str]:
  return [word for word in argv if word not in flags]


def _job_of(argv: Sequence[str], *flags: str) -> str:
  """The job that the other arguments, and files among them, speak of."""
  return config_lib.job_of(_without(argv, *flags))


def look(config: RunSettings) -> None:
  """Looks at all that can be known before a model is loaded, and says what it saw;
  writes nothing.

  Raises: as `run`, before its first step. RuntimeError also where a reward function
    fails on the first record.
  """
  config, folder = _at_home(config)
  mesh = None
  if config.distributed.coordinator is None:
    mesh = _mesh(config)
  run_lock.check(folder.path)
  config, tokenizer, data = prepare(config, folder)
  tx = optimizer.build_optimizer(config, optimizer.build_schedule(config))
  folder.check_resume(config, data.fingerprints)
  # Shapes lie somewhere too: on one device, where no mesh is asked for.
  where = mesh or jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
  model = build.shapes_of_model(config, where)
  build.check_vocabulary(model, tokenizer)
  _check_lengths(config, model, data)
  _say(_describe(config, model, data, mesh))
  _say(dry_run.describe(config, model, tokenizer, data, tx, folder))


def _mesh(config: RunSettings) -> jax.sharding.Mesh | None:
  """The mesh of a run; None when none is asked for."""
  length = JOBS[config.job].length(config)
  return mesh_axes.build(config.mesh, config.training.batch_rows, length)


def _at_home(config: RunSettings) -> tuple[RunSettings, RunFolder]:
  """The settings with absolute paths, and the folder of the run.

  Raises:
    ValueError: no folder is named, or it is none that can be used.
  """
  if config.output_dir is None:
    raise ValueError(
      "output_dir is not set: give --output_dir=FOLDER for the run's files"
    )
  config = build.absolute_paths(config)
  folder = RunFolder(pathlib.Path(config.output_dir or ""))
  run_folder.check_writable("output_dir", folder.path, is_read=True)
  return config, folder


def run(config: RunSettings) -> Result:
  """Trains as `config` says, from the beginning or from where the folder's run stands.

  Raises:
    ValueError, FileNotFoundError: something about settings, data or model is wrong;
      nothing was trained.
    RuntimeError: another process is training in the folder.
    OSError: the disk is full; checkpoints written before are whole.
    Stopped: SIGINT or SIGTERM; a checkpoint was saved.
  """
  config, folder = _at_home(config)
  if config.compilation_cache is not None:
    shipped.use_cache(config.compilation_cache)
  several.start(config)
  mesh = _mesh(config)
  first = jax.process_index() == 0
  if first:
    run_lock.check(folder.path)
  config, tokenizer, data = prepare(config, folder)
  several.compare(config, data)
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)
  folder.check_resume(config, data.fingerprints)
  if (ended := folder.result(config)) is not None:
    if first and not (folder.path / page.NAME).is_file():
      with run_lock.hold(folder.path):  # killed between its last two files
        io.sweep(folder.path)
        _leave_page(folder)
    result = Result(**ended)
    _say(f"this run is finished: {result}; {how_to_go_on(config, data, result)}")
    return result
  run_folder.check_writable("output_dir", folder.path)
  with mesh_lib.use_mesh(mesh), contextlib.ExitStack() as held:
    model = build.build_model(config, mesh)
    build.check_vocabulary(model, tokenizer)
    _check_lengths(config, model, data)
    if first:
      held.enter_context(run_lock.hold(folder.path))
      io.sweep(folder.path)  # what a killed run was writing
      # Another process may have been quicker.
      folder.check_resume(config, data.fingerprints)
      folder.start(config, data.fingerprints, data.scans)
      io.write_json(folder.about_file, _about(config, model, data, mesh))
      held.push(functools.partial(_leave_page, folder))
    _say(_describe(config, model, data, mesh))
    if (cache := config.compilation_cache) is not None and shipped.is_in(cache):
      held.enter_context(shipped.loaded(cache, mesh, _say))
    loaded = Loaded(
      config=config,
      model=model,
      tokenizer=tokenizer,
      optimizer=tx,
      mesh=mesh,
      output_dir=folder.path,
      learning_rate=rate,
    )
    trainer = JOBS[config.job].build(loaded)
    if trainer.train_steps:
      _say(f"resuming after step {trainer.train_steps}")
    try:
      with launch.named_loss():
        outcome = trainer.train(data.train, data.eval)
    except Stopped:
      trainer.close()  # all is saved; the last lines of the metrics are written here
      raise
    trainer.close()
    result = _finish(config, model, folder, outcome)
  _say(f"done: {result}")
  if (folder.path / page.NAME).is_file():
    _say(f"curves, settings and samples: {folder.path / page.NAME}")
  return result


def prepare(
  config: RunSettings, folder: RunFolder
) -> tuple[RunSettings, TokenizerAdapter, RunData]:
  """The settled configuration with the tokenizer and the checked data.

  Raises:
    ValueError, FileNotFoundError: something about model, tokenizer or data is wrong.
  """
  build.check_model(config)
  config = build.settle_revision(config)
  JOBS[config.job].check(config)
  tokenizer = build.build_tokenizer(config)
  data = JOBS[config.job].data(config, tokenizer, folder.scans())
  config = precision.settle(build.settle_lora(build_data.settle(config)))
  return optimizer.settle(config, data.num_steps), tokenizer, data


def _finish(
  config: RunSettings, model: Transformer, folder: RunFolder, outcome: TrainResult
) -> Result:
  """Exports, and marks the run as ended."""
  kind, step, best = config.export_kind, outcome.steps, outcome.best
  if kind != "none":
    if config.export.checkpoint == "best" and best and best.step not in (None, step):
      lora_only = config.lora is not None
      step = export_main.restore(model, folder, best.step, lora_only=lora_only)
    if config.export.checkpoint == "best" and best and best.step is None:
      _log.warning(
        "export.checkpoint is 'best' and %s: the last step is exported", best
      )
    build.export(config, model, kind, folder.export)
  result = Result(
    steps=outcome.steps,
    ended_by=outcome.ended_by,
    best=None if best is None else dataclasses.asdict(best),
    **ends_of(config.job, folder.path / "logs" / "metrics.jsonl"),
    export=None if kind == "none" else str(folder.export),
    export_step=None if kind == "none" else step,
  )
  if jax.process_index() == 0:
    folder.write_result(dataclasses.asdict(result))
  return result


def _leave_page(
  folder: RunFolder,
  failure: type[BaseException] | None = None,
  error: BaseException | None = None,
  _: Any = None,
) -> None:
  """Writes the run's page, however the run ended, with what made it fail; what fails
  here hides nothing."""
  try:
    if isinstance(error, Exception):  # who interrupts a run knows why it ended
      said = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
      io.write_json(folder.failure_file, {"error": said})
    report_main.write(
      folder.path / page.NAME, [report_main.read(folder.path, folder.path.name)]
    )
  except (OSError, ValueError) as error:
    if failure is None:  # else there is a greater trouble to tell of
      _log.warning("%s of %s could not be written: %s", page.NAME, folder.path, error)


def _about(
  config: RunSettings, model: Transformer, data: RunData, mesh: Mesh | None
) -> dict[str, Any]:
  said = f"{_parameters(config, model)}\n{precision.describe(config, model)}"
  return about.describe(said, data.reports, JOBS[config.job].batch(config), mesh)


def _check_lengths(config: RunSettings, model: Transformer, data: RunData) -> None:
  """Refuses rows that memory cannot hold, and completions beyond the positions of the
  model that writes them."""
  job, sizes = JOBS[config.job], model.config
  what, length = job.length(config)
  rows = config.training.batch_rows.get("training.micro_batch_size", 1)
  # A backward pass keeps the hidden states of every layer at the least.
  token = sizes.num_layers * sizes.embed_dim * jnp.dtype(sizes.dtype).itemsize
  capacity.require(
    what, length, lambda n: rows * n * token, f"the hidden states of {rows} rows"
  )
  rollout, most = job.rollout(config), sizes.max_position
  if rollout is None or most is None:
    return
  for name, report in data.reports.items():
    longest, new = report.longest_prompt, rollout.max_tokens_to_generate
    longest = min(longest, rollout.max_prompt_length)  # what is longer was dropped
    if longest + new > most:
      raise ValueError(
        f"rollout.max_tokens_to_generate is {new} and the longest prompt of the {name} "
        f"data has {longest} tokens: the model has {most} positions, so that at most "
        f"{max(most - longest, 0)} new tokens fit"
      )


def _describe(
  config: RunSettings, model: Transformer, data: RunData, mesh: Mesh | None
) -> str:
  """What is about to happen, for the user to check."""
  job = JOBS[config.job]
  lines = [_parameters(config, model), precision.describe(config, model)]
  lines += [f"{name} data: {report}" for name, report in data.reports.items()]
  steps = "until the data ends" if data.num_steps is None else f"{data.num_steps} steps"
  lines += [f"{job.batch(config)}; {steps}", _devices(mesh)]
  lines.append(f"everything is written to {config.output_dir}")
  longest, (what, length) = model.config.max_position, job.length(config)
  if longest is not None and length > longest:
    lines.append(
      f"note: {what} {length} is beyond the {longest} positions that the model was "
      "made for"
    )
  return "\n".join(lines + job.notes(config, data))


def _parameters(config: RunSettings, model: Transformer) -> str:
  if config.lora is not None:
    return f"LoRA on:\n{lora.describe(model)}"
  total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
  return f"trainable {total:,} of {total:,} parameters"


def _devices(mesh: Mesh | None) -> str:
  kind, count = jax.devices()[0].platform, jax.device_count()
  if mesh is not None:
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"devices: {count} {kind} ({sizes})"
  unused = f"; {count - 1} more stay idle, `mesh` spreads the run" if count > 1 else ""
  return f"devices: 1 {kind}{unused}"


def _say(text: Any) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)
