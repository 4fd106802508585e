"""`tunix train`: trains a model as a configuration says, and exports it.

Settings, mesh, data, tokenizer, optimizer and the run in the folder are checked before
the model is loaded, and the model before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Sequence

import jax

from tunix.cli import config as config_lib, origins, reference
from tunix.cli.commands import export as export_command, report
from tunix.cli.jobs.job import Loaded
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import export as build_export, objects
from tunix.cli.make.loading import ModelLoader
from tunix.cli.run import about, dry_run, folder as run_folder, tiny
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.prepare import Prepared, check_model, prepare
from tunix.cli.run.result import (
  JobResult,
  Result,
  by_mode,
  ends,
  how_to_train_longer,
  read_history,
)
from tunix.cli.settings import keys, yaml_text
from tunix.cli.settings.run import RunSettings
from tunix.models import lora
from tunix.models.transformer.model import Transformer
from tunix.plan import shipped
from tunix.report import page
from tunix.sft import launch
from tunix.sft.loop.interrupts import Stopped
from tunix.sft.loop.run import TrainResult
from tunix.sft.metrics.history import History
from tunix.utils import folder_lock, io, mesh as mesh_lib
from tunix.utils.setting import shared_values

_log = logging.getLogger(__name__)

# Most characters of an error on the run's page: XLA's can have thousands of lines.
_LONGEST_ERROR = 4000

HELP = """\
usage: tunix train [--config] FILE[,FILE] [--KEY.SUB=VALUE ...]
       tunix train --dry-run ...           check everything, train nothing
       tunix train --tiny ...              train two steps of a tiny model of the family
       tunix train --print-config ...      show every value, and where it was set
       tunix train --help [SECTION] [--job=JOB]      the keys of a job
       tunix train --help all              the keys of all jobs
       tunix train --schema [--job=JOB]    the JSON Schema of a job's files, for editors

Trains as the configuration says. The same command again resumes the run in output_dir;
if the run is finished, it says so. Later files override earlier ones, and arguments
override files. The keys of all jobs ({jobs}) are in
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
  flags = {"--help", "-h", "--schema", "--print-config", "--dry-run", "--tiny"}
  words = [word for word in argv if word not in flags]
  options = flags & set(argv)
  if not argv or options & {"--help", "-h"}:
    print(_help(words))
  elif "--schema" in options:
    schema = reference.json_schema(config_lib.job_of(words))
    print(json.dumps(schema, indent=2, ensure_ascii=False))
  elif "--print-config" in options:
    print(origins.describe(words), end="")
  else:
    config = tiny.load(words) if "--tiny" in options else config_lib.load(words)
    (look if "--dry-run" in options else run)(config)


def _help(words: list[str]) -> str:
  """Returns the help of all keys of a job, or of one section.

  Args:
    words: arguments besides --help. The first one that is no file and no option names
      the section.
  """

  def is_section(w):
    return not w.startswith("-") and not w.endswith((".yaml", ".yml"))

  section = next(filter(is_section, words), None)
  if section == "all":
    return reference.base_config()
  job = config_lib.job_of([word for word in words if word != section])
  text = reference.describe_keys(job, section)
  if section is not None:
    return text.strip()
  jobs, path = ", ".join(JOBS), yaml_text.BASE_PATH
  return HELP.format(jobs=jobs, path=path, job=job, keys=text)


def look(config: RunSettings) -> None:
  """Checks a run and describes its start (`--dry-run`).

  No weights are loaded, and nothing is written.

  Raises:
    ValueError, FileNotFoundError: as for `run`.
    RuntimeError: another process trains in the folder, or a reward function fails on
      the first record.
  """
  prepared = prepare(config, join=False)
  # Shapes need a mesh too.
  mesh = prepared.mesh or jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
  with keys.naming(prepared.config):
    model = ModelLoader(prepared.config, mesh, of_shapes=True).model()
    check_model(prepared, model)
  _say(about.describe_run(prepared, model, is_dry=True))
  _say(dry_run.describe_start(prepared, model))


def run(config: RunSettings, *, keeps: bool = True) -> JobResult:
  """Trains from the beginning, or resumes the run in the folder.

  Args:
    config: settings as loaded.
    keeps: False writes no checkpoints, logs and samples; output_dir is then a folder
      that the caller deletes.

  Raises:
    ValueError, FileNotFoundError: something about settings, data or model is wrong;
      nothing was trained.
    RuntimeError: another process trains in the folder, or a weight is not finite.
    OSError: the disk is full; earlier checkpoints are complete.
    Stopped: SIGINT or SIGTERM; a checkpoint was saved.
  """
  prepared = prepare(config)
  config, folder, mesh = prepared.config, prepared.folder, prepared.mesh
  if (values := folder.result(config)) is not None:
    return _finished(prepared, Result.from_json(values))
  run_folder.check_writable("output_dir", folder.path)
  with (
    mesh_lib.use_mesh(mesh),
    contextlib.ExitStack() as stack,
    launch.shared_failure(),
  ):
    if (path := config.model.path) is not None and not objects.is_name(path):
      _say(f"loading the model {path} ...")
    with keys.naming(config):
      model = ModelLoader(config, mesh).model()
      check_model(prepared, model)
    if jax.process_index() == 0:
      _start(prepared, model, stack)
    _say(about.describe_run(prepared, model, keeps=keeps))
    notes = about.notes(prepared, model)
    if (cache := config.compilation_cache) is not None and shipped.is_in(cache):
      stack.enter_context(shipped.loaded(cache, mesh, _say))
    loaded = Loaded(
      config=prepared.sized,
      model=model,
      tokenizer=prepared.tokenizer,
      optimizer=prepared.optimizer,
      mesh=mesh,
      rollout_mesh=prepared.rollout_mesh,
      output_dir=folder.path if keeps else None,
      learning_rate=prepared.learning_rate,
      images=prepared.data.images,
    )
    # Not around the training, whose errors are also those of the user's functions.
    with keys.naming(config):
      trainer = JOBS[config.job].build(loaded)
    if (evaluation := prepared.evaluation) is not None:
      stack.callback(evaluation.close)
      trainer.with_evaluation(evaluation)
    if trainer.train_steps:
      _say(f"resuming after step {trainer.train_steps}")
    try:
      outcome = trainer.train(prepared.data.train, prepared.data.eval)
    except Stopped:
      trainer.close()  # writes the last lines of the metrics; the checkpoint is saved
      raise
    trainer.close()
    # Only the first process has written its last metrics to the files by now.
    reads = keeps and jax.process_index() == 0
    history = read_history(folder.logs) if reads else by_mode(trainer.history)
    result = _finish(config, model, folder, outcome, history, notes)
  _say(f"done: {result}")
  if keeps and (folder.path / page.NAME).is_file():
    _say(f"curves, settings and samples: {folder.path / page.NAME}")
  return JobResult(
    **shared_values(Result, result),
    output_dir=str(folder.path) if keeps else None,
    history=history,
    tokenizer=prepared.tokenizer,
    trainer=trainer,
    trained=model,
  )


def _finished(run: Prepared, result: Result) -> JobResult:
  """Reports a run that is finished already."""
  folder = run.folder
  if jax.process_index() == 0 and not (folder.path / page.NAME).is_file():
    with folder_lock.hold(folder.path):  # the run was killed between its last two files
      io.sweep(folder.path)
      _write_page(folder)
  advice = how_to_train_longer(run.config, run.data, result)
  _say(f"this run is finished: {result}; {advice}")
  return JobResult(
    **shared_values(Result, result),
    output_dir=str(folder.path),
    history=read_history(folder.logs),
    tokenizer=run.tokenizer,
    trained=_of_object(run),
  )


def _of_object(run: Prepared) -> Transformer | None:
  """Returns the object `model.path` with the exported adapter; None for other runs."""
  path, export = run.config.model.path, run.folder.export
  if not objects.is_name(path) or not (export / "adapter_config.json").is_file():
    return None
  base = objects.get(path)
  return None if lora.config_of(base) else lora.load_adapter(base, export)


def _start(run: Prepared, model: Transformer, stack: contextlib.ExitStack) -> None:
  """Locks the folder, and writes the files of a start.

  Args:
    run: the prepared run.
    model: the model of the run.
    stack: receives the lock, and the writing of the run's page at the end.
  """
  folder, fingerprints = run.folder, run.data.fingerprints
  stack.enter_context(folder_lock.hold(folder.path))
  io.sweep(folder.path)  # partial files of a killed process
  # Another process may have trained in the folder since the first check.
  folder.check_resume(run.config, fingerprints)
  folder.start(run.config, fingerprints, run.data.scans)
  io.write_json(folder.about_file, about.as_json(run, model))
  stack.push(functools.partial(_write_page, folder))


def _finish(
  config: RunSettings,
  model: Transformer,
  folder: RunFolder,
  outcome: TrainResult,
  history: History,
  notes: Sequence[str],
) -> Result:
  """Exports the model, and writes the result, which marks the run as finished."""
  kind, step, best = config.export_kind, outcome.steps, outcome.best
  if kind != "none":
    if config.export.checkpoint == "best" and best is not None:
      if best.step is None:
        _log.warning(
          "export.checkpoint is 'best' and %s: the last step is exported", best
        )
      elif best.step != step:
        lora_only = config.lora is not None
        step = export_command.restore(model, folder, best.step, lora_only=lora_only)
    build_export.export(config, model, kind, folder.export)
  result = Result(
    steps=outcome.steps,
    ended_by=outcome.ended_by,
    best=None if best is None else dataclasses.asdict(best),
    metrics=ends(config.job, history),
    export=None if kind == "none" else str(folder.export),
    export_step=None if kind == "none" else step,
    notes=(*notes, *outcome.notes),
  )
  if jax.process_index() == 0:
    folder.write_result(result.to_json())
  return result


def _write_page(
  folder: RunFolder,
  failure: type[BaseException] | None = None,
  error: BaseException | None = None,
  _: object = None,
) -> None:
  """Writes the run's page, however the run ended, with the error that ended it.

  An error while the page is written never replaces the error of the run.
  """
  try:
    if isinstance(error, Exception):  # an interrupt is no failure
      text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
      io.write_json(folder.failure_file, {"error": text})
    report.write(folder.path / page.NAME, [report.read(folder.path, folder.path.name)])
  except (OSError, ValueError) as problem:
    if failure is None:
      name = page.NAME
      _log.warning("%s of %s could not be written: %s", name, folder.path, problem)


def _say(text: object) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)
