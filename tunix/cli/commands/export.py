"""`tunix export`: a checkpoint of a run as a Hugging Face folder or a PEFT adapter."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import tunix
from tunix.cli.build import export as build_export, loading
from tunix.cli.commands.arguments import Parser
from tunix.cli.jobs.rl import RLRun
from tunix.cli.run.folder import RunFolder
from tunix.cli.settings.run import ExportSettings, RunSettings
from tunix.models import hub
from tunix.models.transformer.model import Transformer
from tunix.rl.config import Role
from tunix.sft import run_state
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.run_state import RunState


def main(argv: Sequence[str]) -> None:
  """Runs `tunix export`.

  Raises:
    FileNotFoundError: there is no such run or checkpoint.
    ValueError: the run has no such kind of export, or the hub lets nobody write there.
    OSError: the disk is full; the target folder is as it was. Or the hub is away.
  """
  args = _parse(argv)
  run, step = _locate(args)
  config = _with_export(run.read_config(), args.kind, args.dtype)
  _check_step(run, step)
  if args.push_to_hub is not None:  # who may not is told before anything takes time
    hub.create(args.push_to_hub, private=args.private)
  model = loading.build_model(config, None)
  step = restore(model, run, step, lora_only=config.lora is not None)
  kind = config.export_kind
  build_export.export(config, model, kind, pathlib.Path(args.to))
  print(f"step {step} of {run.path} is exported to {args.to} ({kind})")
  if args.push_to_hub is not None:
    message = f"Step {step} of a run of tunix {tunix.__version__}"
    print(f"uploaded: {hub.upload(args.to, args.push_to_hub, message=message)}")


def best_step(run: RunFolder) -> int | None:
  """The step of a run's best evaluation, as its newest checkpoint knows it; None where
  the run has no checkpoint.

  Raises:
    ValueError: it was not asked to look for one.
  """
  manager = CheckpointManager(run.checkpoints if run.steps() else None)
  saved = manager.restore_state(RunState())
  manager.close()
  if saved is None:
    return None
  progress = saved[1].progress or {}
  position = progress.get("counts") or progress.get("learner") or {}
  step = (position.get("best") or {}).get("step")
  if step is None:
    raise ValueError(
      f"{run.path} knows of no best evaluation: it was trained without training.best, "
      "or none was finite; give --step"
    )
  return step


def restore(
  model: Transformer, run: RunFolder, step: int | None, *, lora_only: bool
) -> int:
  """Puts a checkpoint's weights into `model`; returns its step (the newest for None).

  Raises:
    FileNotFoundError: the run has no checkpoint, or none of that step.
    ValueError: the checkpoint belongs to another model.
  """
  _check_step(run, step)
  manager = CheckpointManager(run.checkpoints)
  if isinstance(run.read_config(), RLRun):
    at = _restore_actor(model, manager, step, lora_only)
  else:
    at, _ = manager.restore(model, step=step, restore_only_lora_params=lora_only)
  manager.close()
  return at


def _check_step(run: RunFolder, step: int | None) -> None:
  steps = run.steps()
  if not steps or (step is not None and step not in steps):
    found = f"it has those of steps {steps}" if steps else "it has none"
    wanted = "a checkpoint" if step is None else f"the checkpoint of step {step}"
    raise FileNotFoundError(f"{run.path} lacks {wanted}: {found}")


def _restore_actor(
  model: Transformer, manager: CheckpointManager, step: int | None, lora_only: bool
) -> int:
  """The policy's weights out of a checkpoint that holds several models."""
  like = run_state.of_module(model, None, lora_only)
  role = Role.ACTOR.value
  wanted = RunState(model_params={role: like.model_params})
  restored = manager.restore_state(wanted, step=step, partial=True)
  assert restored is not None  # `restore` has looked
  at, state = restored
  params = (state.model_params or {})[role]
  actor = dataclasses.replace(like, model_params=params)
  run_state.load_into(model, None, actor, lora_only)
  return at


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser("tunix export", (__doc__ or "").split(":", 1)[1].strip())
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument("--run", metavar="FOLDER", help="output_dir of a `tunix train`")
  source.add_argument(
    "--checkpoint", metavar="FOLDER", help="one checkpoint: OUTPUT_DIR/checkpoints/STEP"
  )
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--step", type=int, help="with --run: this one, not the newest")
  which.add_argument(
    "--best", action="store_true", help="with --run: that of the best evaluation"
  )
  parser.add_argument("--to", metavar="FOLDER", required=True, help="where to write")
  parser.add_argument(
    "--kind",
    choices=("auto", "full", "merged", "adapter"),
    default="auto",
    help="the model; with LoRA the merged model or the adapter; auto: full or adapter",
  )
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    help="of the weights written; that of the run's model.path if not given",
  )
  parser.add_argument(
    "--push-to-hub",
    metavar="ORG/NAME",
    help="uploads what was written; the model is made where it is not there yet",
  )
  parser.add_argument(
    "--private", action="store_true", help="with --push-to-hub: others do not see it"
  )
  args = parser.parse_args(argv)
  if args.private and args.push_to_hub is None:
    raise ValueError("--private is given and nothing is uploaded: add --push-to-hub")
  return args


def _locate(args: argparse.Namespace) -> tuple[RunFolder, int | None]:
  if args.run is not None:
    run = RunFolder(pathlib.Path(args.run))
    return run, best_step(run) if args.best else args.step
  path = pathlib.Path(args.checkpoint).absolute()
  if args.step is not None or args.best:
    flag = "--best" if args.best else "--step"
    raise ValueError(f"--checkpoint {path} is one step already: leave {flag} out")
  if not path.is_dir() or not path.name.isdigit():
    raise FileNotFoundError(
      f"{path} is no checkpoint: give OUTPUT_DIR/checkpoints/STEP, or --run OUTPUT_DIR"
    )
  return RunFolder(path.parent.parent), int(path.name)


def _with_export(config: RunSettings, kind: str, dtype: str | None) -> RunSettings:
  """The run's settings with another export; kinds that do not fit it are refused.

  The mesh of the run is left out: its devices need not be here.
  """
  keys = ExportSettings(kind=kind, dtype=dtype)  # pyright: ignore[reportArgumentType]
  return dataclasses.replace(config, export=keys, mesh={})
