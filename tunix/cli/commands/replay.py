"""`tunix replay`: trains a run of RL again and compares its weights and metrics."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tunix.cli.commands import train
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.run.folder import RunFolder
from tunix.cli.settings import keys
from tunix.rl.schedules.journal import FOLDER
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.metrics import jsonl as metrics_jsonl
from tunix.sft.steps.run_state import RunState
from tunix.utils import attributes

_KEYS = ("rl.rollout_timeout_s", "distributed.process_id", "distributed.coordinator")
# What a repeated run does not need.
_WITHOUT = {"export.kind": "none", "logging.tensorboard": False, "logging.wandb": False}


def main(argv: Sequence[str]) -> None:
  """Runs `tunix replay`.

  Raises:
    FileNotFoundError: there is no such run, or it has no checkpoint.
    ValueError: the run is no run of RL, the folder of the repeated run is not empty, or
      the run has several processes and `--to` or `--distributed.process_id` is missing.
    ReplayError: an environment, a reward function or the engine answered otherwise.
    RuntimeError: weights or metrics differ.
  """
  args = parser().parse_args(argv)
  values = attributes.known(args, _KEYS)
  path = pathlib.Path(args.run)
  if args.to is not None:
    replay(path, pathlib.Path(args.to), values)
    return
  with tempfile.TemporaryDirectory(prefix="tunix-replay-") as scratch:
    replay(path, pathlib.Path(scratch), values, is_scratch=True)


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser(
    "tunix replay", "trains a run of RL again and compares weights and metrics"
  )
  made.add_argument("run", metavar="RUN", help="output_dir of the run")
  made.add_argument("--to", metavar="FOLDER", help="keep the repeated run in FOLDER")
  made.add_argument(
    "--timeout_s",
    dest="rl.rollout_timeout_s",
    type=float,
    metavar="S",
    help="seconds in which an environment must answer as before; default: "
    "rl.rollout_timeout_s of the run",
  )
  several = made.add_argument_group(
    "runs of several processes", "start the command once for each process"
  )
  several.add_argument(
    "--distributed.process_id", type=int, metavar="N", help="of this process, from 0"
  )
  several.add_argument(
    "--distributed.coordinator",
    metavar="HOST:PORT",
    help="address of process 0; default: that of the run",
  )
  return made


def replay(
  path: pathlib.Path,
  to: pathlib.Path,
  given: Mapping[str, Any],
  *,
  is_scratch: bool = False,
) -> None:
  """Trains a run again up to its newest checkpoint; compares both.

  Args:
    path: output_dir of the run.
    to: output_dir of the repeated run.
    given: keys of the repeated run that differ.
    is_scratch: True if no other process sees `to`.
  """
  run, again = RunFolder(path.absolute()), RunFolder(to.absolute())
  config = run.read_config()
  if not isinstance(config, RLRun):
    raise ValueError(
      f"{path} is a run of the job {config.job}, expected one of RL: a run of another "
      "job gives the same bytes when the same command runs in another folder"
    )
  coordinator, count = config.distributed.coordinator, config.distributed.num_processes
  is_first = given.get("distributed.process_id", 0) == 0
  if coordinator is not None and count != 1:
    is_named = coordinator == "auto" or "distributed.process_id" in given
    if is_scratch or not is_named:
      raise ValueError(
        f"{path} is a run of several processes (distributed.coordinator is "
        f"{coordinator!r}): start tunix replay for each of them, with one --to=FOLDER "
        "that all of them see, and with --distributed.process_id=0, 1, ... unless the "
        "coordinator is auto"
      )
  if not (steps := run.steps()):
    raise FileNotFoundError(f"{path} has no checkpoint: there is nothing to compare")
  if is_first and to.exists() and any(to.iterdir()):
    raise ValueError(f"{to} is not empty: a replay starts from the first step there")
  values: dict[str, Any] = _WITHOUT | {"output_dir": str(again.path), **given}
  values["training.max_steps"] = steps[-1]
  if config.rl.schedule == "greedy":
    values["rl.replay"] = str(run.checkpoints / FOLDER)
  for key, value in values.items():
    config = keys.with_value(config, key, value)
  train.run(config)
  # All processes read the versions together, and process 0 wrote the metrics.
  before, now = (json.loads(_version(folder, steps[-1])) for folder in (run, again))
  if jax.process_index() > 0:
    return
  lines = _compared_metrics(run, again, steps[-1])
  stamp = _compared_weights(before, now, steps[-1])
  print(
    f"the replay of {path} is equal: step {steps[-1]}, weights {stamp[:12]}, {lines} "
    "lines of metrics"
  )


def _compared_metrics(run: RunFolder, again: RunFolder, last: int) -> int:
  """Compares the metrics without timings up to a step; returns their number of lines.

  Raises:
    RuntimeError: gives the first step and metric that differ.
  """
  before, now = _metrics(run, last), _metrics(again, last)
  for (step, mode), values in before.items():
    other = now.get((step, mode), {})
    # As text: NaN equals NaN, and 0.0 differs from -0.0.
    names = [n for n in values if repr(values[n]) != repr(other.get(n))]
    if names:
      raise RuntimeError(
        f"the replay differs: {mode} metric {names[0]} of step {step} is "
        f"{other.get(names[0])}, and was {values[names[0]]}"
      )
  return len(before)


def _metrics(run: RunFolder, last: int) -> dict[tuple[int, str], dict[str, Any]]:
  records = metrics_jsonl.read_jsonl(run.logs / metrics_jsonl.METRICS_FILE)
  return {(x["step"], x["mode"]): x for x in records if x["step"] <= last}


def _compared_weights(before: Any, now: Any, step: int) -> str:
  """Compares the content stamps of the policies; returns the stamp.

  Raises:
    RuntimeError: they differ.
  """
  if before != now:
    raise RuntimeError(
      f"the replay differs: the weights of step {step} have the stamp {now['stamp']}, "
      f"and had {before['stamp']}"
    )
  return before["stamp"]


def _version(run: RunFolder, step: int) -> str:
  manager = CheckpointManager(run.checkpoints)
  try:
    saved = manager.restore_state(RunState(), step=step)
  finally:
    manager.close()
  assert saved is not None and saved[1].progress is not None
  return saved[1].progress["version"]
