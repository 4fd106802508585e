"""`tunix export`: writes a checkpoint as a Hugging Face folder or a PEFT adapter."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import tunix
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.make import export as build_export, loading
from tunix.cli.run.folder import RunFolder
from tunix.cli.settings.run import ExportSettings
from tunix.models import hub
from tunix.models.transformer.model import Transformer
from tunix.rl.config import Role
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.steps import run_state
from tunix.sft.steps.run_state import RunState


def main(argv: Sequence[str]) -> None:
  """Runs `tunix export`.

  Raises:
    FileNotFoundError: there is no such run or checkpoint.
    ValueError: the kind of export does not fit the run, or the hub refuses the upload.
    OSError: the disk is full, and the target folder is unchanged; or the hub is down.
  """
  args = parser().parse_args(argv)
  if args.private and args.push_to_hub is None:
    raise ValueError("--private is given, but nothing is uploaded; add --push-to-hub")
  run, step = _locate(args)
  keys = ExportSettings(kind=args.kind, dtype=args.dtype, checksums=args.checksums)
  # Without the run's mesh: its devices need not be on this machine.
  config = dataclasses.replace(run.read_config(), export=keys, mesh={})
  _check_step(run, step)
  if args.push_to_hub is not None:  # fails early if the user may not write there
    hub.create(args.push_to_hub, private=args.private)
  model = loading.ModelLoader(config, None).model()
  step = restore(model, run, step, lora_only=config.lora is not None)
  kind = config.export_kind
  build_export.export(config, model, kind, pathlib.Path(args.to))
  print(f"step {step} of {run.path} is exported to {args.to} ({kind})")
  if args.push_to_hub is not None:
    message = f"Step {step} of a run of tunix {tunix.__version__}"
    print(f"uploaded: {hub.upload(args.to, args.push_to_hub, message=message)}")


def best_step(run: RunFolder) -> int | None:
  """Returns the step of a run's best evaluation; None if the run has no checkpoint.

  Raises:
    ValueError: the newest checkpoint knows of no best evaluation.
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
      f"{run.path} has no best evaluation, because training.best was not set or no "
      "evaluation was finite; give --step"
    )
  return step


def restore(
  model: Transformer, run: RunFolder, step: int | None, *, lora_only: bool
) -> int:
  """Loads a checkpoint's weights into a model.

  Args:
    model: the model, which is changed.
    run: the folder of the run.
    step: step of the checkpoint; None: the newest one.
    lora_only: whether the checkpoint holds only the adapter.

  Returns: the step of the checkpoint.

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
    existing = f"it has those of steps {steps}" if steps else "it has none"
    missing = "a checkpoint" if step is None else f"the checkpoint of step {step}"
    raise FileNotFoundError(f"{run.path} lacks {missing}: {existing}")


def _restore_actor(
  model: Transformer, manager: CheckpointManager, step: int | None, lora_only: bool
) -> int:
  """Loads the policy's weights from a checkpoint of several models."""
  like = run_state.of_module(model, None, lora_only)
  role = Role.ACTOR.value
  request = RunState(model_params={role: like.model_params})
  restored = manager.restore_state(request, step=step, partial=True)
  assert restored is not None  # `_check_step` has found the checkpoint
  at, state = restored
  params = (state.model_params or {})[role]
  actor = dataclasses.replace(like, model_params=params)
  run_state.load_into(model, None, actor, lora_only)
  return at


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser("tunix export", "writes a checkpoint as a model or an adapter")
  source = made.add_mutually_exclusive_group(required=True)
  source.add_argument("--run", metavar="FOLDER", help="output_dir of a `tunix train`")
  source.add_argument(
    "--checkpoint", metavar="FOLDER", help="one checkpoint: OUTPUT_DIR/checkpoints/STEP"
  )
  which = made.add_mutually_exclusive_group()
  which.add_argument("--step", type=int, help="step of the run; default: the newest")
  which.add_argument(
    "--best", action="store_true", help="the step of the run's best evaluation"
  )
  add = made.add_argument
  add("--to", metavar="FOLDER", required=True, help="folder to write")
  add(
    "--kind",
    choices=("auto", "full", "merged", "adapter"),
    default="auto",
    help="full: the model; with LoRA, merged: the model with the adapter merged, or "
    "adapter; auto, the default: adapter with LoRA, else full",
  )
  add(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    help="dtype of the weights; default: that of the run's model.path",
  )
  add("--checksums", action="store_true", help="write SHA256SUMS of the files")
  add(
    "--push-to-hub",
    metavar="ORG/NAME",
    help="upload the folder; the repository is created if it does not exist",
  )
  add("--private", action="store_true", help="with --push-to-hub: a private repository")
  return made


def _locate(args: argparse.Namespace) -> tuple[RunFolder, int | None]:
  if args.run is not None:
    run = RunFolder(pathlib.Path(args.run))
    return run, best_step(run) if args.best else args.step
  path = pathlib.Path(args.checkpoint).absolute()
  if args.step is not None or args.best:
    flag = "--best" if args.best else "--step"
    raise ValueError(f"--checkpoint is {path}, which is one step; omit {flag}")
  if not path.is_dir() or not path.name.isdigit():
    raise FileNotFoundError(
      f"--checkpoint is {path}, which is no checkpoint; give "
      "OUTPUT_DIR/checkpoints/STEP, or --run OUTPUT_DIR"
    )
  return RunFolder(path.parent.parent), int(path.name)
