"""`tunix export`: writes a checkpoint or a model for other programs.

It writes a Hugging Face folder, a PEFT adapter, or a GGUF file for llama.cpp.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import tunix
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.jobs.sft import SFTRun
from tunix.cli.make import export as build_export, gguf as gguf_export, loading
from tunix.cli.run.folder import RunFolder
from tunix.cli.settings.run import ExportSettings, ModelSettings, RunSettings
from tunix.models import hub
from tunix.models.gguf import writer as gguf_writer
from tunix.models.transformer.model import Transformer
from tunix.rl.config import Role
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.steps import run_state
from tunix.sft.steps.run_state import RunState

_KINDS = ("full", "merged", "adapter")


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
  keys = ExportSettings(kind=args.kind, dtype=args.dtype, checksums=args.checksums)
  source, step = _locate(args)
  job = _Job(source, step, keys, args.gguf)
  job.check()
  if args.push_to_hub is not None:  # fails early if the user may not write there
    hub.create(args.push_to_hub, private=args.private)
  source = job.write(pathlib.Path(args.to))
  print(f"{source} is exported to {args.to} ({job.kind})")
  if args.push_to_hub is not None:
    message = f"{source}, exported by tunix {tunix.__version__}"
    print(f"uploaded: {hub.upload(args.to, args.push_to_hub, message=message)}")


def export(
  run: str | os.PathLike[str],
  to: str | os.PathLike[str],
  *,
  step: int | Literal["best"] | None = None,
  kind: str = "auto",
  dtype: str | None = None,
  gguf: str | None = None,
  checksums: bool = False,
) -> None:
  """Writes a checkpoint of a run as a folder, as `tunix export` does.

  Args:
    run: folder of the run.
    to: folder to write.
    step: step of the checkpoint, or "best" for the best evaluation; None: the newest.
    kind: "full", "merged", "adapter", or "auto": the adapter of a run with LoRA (in a
      GGUF file the merged model), else the model.
    dtype: dtype of the weights; None: that of the run's model.path.
    gguf: type of the tensors of a GGUF file, "f16", "bf16", "f32" or "q8_0"; None:
      safetensors.
    checksums: if True, SHA256SUMS is written beside the files.

  Raises:
    FileNotFoundError: there is no such run or checkpoint.
    ImportError: a GGUF file needs the package `gguf`.
    ValueError: the kind does not fit the run, or llama.cpp has no such model.
    OSError: the disk is full, and the target folder is unchanged.
  """
  keys: Any = {"kind": kind, "dtype": dtype, "checksums": checksums}
  source = RunFolder(pathlib.Path(run))
  at = best_step(source) if step == "best" else step
  job = _Job(source, at, ExportSettings(**keys), gguf)
  job.check()
  job.write(pathlib.Path(to))


@dataclasses.dataclass(frozen=True)
class _Job:
  """One export.

  Attributes:
    source: a run, or the folder or hub id of a model.
    step: step of the run; None: the newest.
    keys: kind and dtype.
    gguf: type of the tensors of a GGUF file; None: safetensors.
  """

  source: RunFolder | str
  step: int | None
  keys: ExportSettings
  gguf: str | None

  @functools.cached_property
  def config(self) -> RunSettings:
    """The settings of the run, or those of a run that starts from the model."""
    if isinstance(self.source, str):
      return SFTRun(model=ModelSettings(path=self.source), export=self.keys)
    # Without the run's mesh: its devices need not be on this machine.
    run = self.source.read_config()
    return dataclasses.replace(run, export=self.keys, mesh={})

  @property
  def kind(self) -> str:
    """The kind of export, with "auto" resolved."""
    is_auto = self.gguf is not None and self.keys.kind == "auto"
    return "merged" if is_auto and self.config.lora else self.config.export_kind

  def check(self) -> None:
    """Refuses what cannot be exported, before the weights are loaded."""
    if self.kind not in _KINDS:
      raise ValueError(
        f"kind is {self.kind!r}; expected one of auto, {', '.join(_KINDS)}"
      )
    loader = loading.ModelLoader(self.config)
    if isinstance(self.source, RunFolder):
      _check_step(self.source, self.step)
    else:
      loader.check()
    if self.gguf is not None:
      gguf_export.check(self.config, self.kind, self.gguf)

  def write(self, to: pathlib.Path) -> str:
    """Writes the folder. Returns a text that names the source."""
    model = loading.ModelLoader(self.config).model()
    name = self.source
    if isinstance(name, RunFolder):
      is_adapter = self.config.lora is not None
      step = restore(model, name, self.step, lora_only=is_adapter)
      name = f"step {step} of {name.path}"
    build_export.export(self.config, model, self.kind, to, self.gguf)
    return name


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
  source.add_argument(
    "--model", metavar="FOLDER", help="a model that was not trained here, or a hub id"
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
    choices=("auto", *_KINDS),
    default="auto",
    help="full: the model; with LoRA, merged: the model with the adapter merged, or "
    "adapter; auto, the default: adapter with LoRA (merged with --gguf), else full",
  )
  add(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    help="dtype of the weights; default: that of the run's model.path",
  )
  add(
    "--gguf",
    choices=tuple(gguf_writer.KINDS),
    help="write a GGUF file with tensors of this type for llama.cpp, and a Modelfile "
    "for Ollama",
  )
  add("--checksums", action="store_true", help="write SHA256SUMS of the files")
  add(
    "--push-to-hub",
    metavar="ORG/NAME",
    help="upload the folder; the repository is created if it does not exist",
  )
  add("--private", action="store_true", help="with --push-to-hub: a private repository")
  return made


def _locate(args: argparse.Namespace) -> tuple[RunFolder | str, int | None]:
  """Returns the run and its step, or the model."""
  if args.run is not None:
    run = RunFolder(pathlib.Path(args.run))
    return run, best_step(run) if args.best else args.step
  flag, given = "--checkpoint", args.checkpoint
  if args.model is not None:
    flag, given = "--model", args.model
  if args.step is not None or args.best:
    other = "--best" if args.best else "--step"
    raise ValueError(f"{flag} is {given}, which is one step; omit {other}")
  if args.model is not None:
    return args.model, None
  path = pathlib.Path(given).absolute()
  if not path.is_dir() or not path.name.isdigit():
    raise FileNotFoundError(
      f"--checkpoint is {path}, which is no checkpoint; give "
      "OUTPUT_DIR/checkpoints/STEP, or --run OUTPUT_DIR"
    )
  return RunFolder(path.parent.parent), int(path.name)
