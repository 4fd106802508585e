"""`tunix quickstart`: fine-tuning, GRPO and a report on this machine, no download.

A fresh small model is fine-tuned on sums until two thirds or more of its answers are
right, then GRPO reinforces right answers. Each step is a command of `tunix` that is
printed and run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence

from tunix.cli.commands.parts.arguments import Parser
from tunix.utils import checks

# Everything a quickstart writes into its folder. --overwrite deletes nothing else.
_NAMES = (
  *("train.jsonl", "eval.jsonl", "model", "sft.yaml", "sft", "grpo.yaml", "grpo"),
  *("report.html", "report.md", "grpo-rloo"),
  *("answers.jsonl", "curves.png", "data"),  # of earlier versions
)


def main(argv: Sequence[str]) -> int:
  """Runs `tunix quickstart`; returns the exit code.

  Raises:
    ValueError: an option out of range, or a folder with other files.
    OSError: the disk is full or not writable.
  """
  args = parser().parse_args(argv)
  checks.number("--seed", args.seed, checks.SEED, whole=True)
  checks.number("--sft_steps", args.sft_steps, checks.COUNT, whole=True)
  checks.number("--grpo_steps", args.grpo_steps, checks.COUNT, whole=True)
  folder = pathlib.Path(args.output).expanduser()
  prepare_output(folder, overwrite=args.overwrite)
  try:
    run(folder.absolute(), args)
  except KeyboardInterrupt as stop:
    # The steps take a minute or two each, so a stopped quickstart is not resumed.
    print(
      f"tunix: quickstart stopped; its files are in {folder}. Start again with "
      "--overwrite",
      file=sys.stderr,
    )
    return 128 + int(getattr(stop, "signum", signal.SIGINT))
  return 0


def run(folder: pathlib.Path, args: argparse.Namespace) -> None:
  """Runs all steps in an empty folder.

  Args:
    folder: an absolute path.
    args: `seed`, `sft_steps` and `grpo_steps`.

  Raises:
    Stopped, KeyboardInterrupt: SIGINT or SIGTERM.
    OSError: the disk is full or not writable.
  """
  # These imports take seconds, and `--help` and a refused folder need none of them.
  from tunix.cli.commands import init, report, train
  from tunix.examples.quickstart import task
  from tunix.report import series

  print(f"Writing sums and a fresh small model to {folder}", flush=True)
  question = task.write_data(
    folder / "train.jsonl", folder / "eval.jsonl", seed=args.seed
  )
  parameters = task.write_model(folder / "model", seed=args.seed)
  commands = {"init": init, "train": train, "report": report}
  for words in steps(folder, args):
    print("\n$ tunix", " \\\n    ".join(map(shlex.quote, words)), flush=True)
    commands[words[0]].main(words[1:])
  accuracy = series.read(folder / "grpo").by_name["pass@1"]["eval"]
  assert accuracy.first is not None and accuracy.last is not None
  export, config = folder / "grpo" / "export", folder / "grpo.yaml"
  ask = _command("generate", "--model", export, "--prompt", question["prompt"])
  output = f"--output_dir={folder / 'grpo-rloo'}"
  again = _command("train", "--config", config, "--algorithm.name=rloo", output)
  text = f"""\
A Llama-style model of {parameters:,} parameters was fine-tuned for {
    args.sft_steps
  } steps
on sums with their answers, then reinforced for {
    args.grpo_steps
  } steps by GRPO on its own
answers. The held-out sums are in neither training.

- accuracy on held-out sums before GRPO: {accuracy.first.value:.1%}
- accuracy on held-out sums after GRPO: {accuracy.last.value:.1%}

Open these pages in a browser:

- report.html: curves of both runs
- sft/report.html, grpo/report.html: curves, settings and samples of one run
- grpo/samples/index.html: answers that the model tried during GRPO

Ask the model, or reinforce the fine-tuned model again by RLOO:

    {ask}
    {again}
"""
  (folder / "report.md").write_text(f"# Quickstart report\n\n{text}", "utf-8")
  print(f"\n{text}\nThis text is in {folder / 'report.md'}", flush=True)


def steps(folder: pathlib.Path, args: argparse.Namespace) -> list[list[str]]:
  """Returns the commands of the quickstart, in order, without the word `tunix`."""
  from tunix.examples.quickstart import task

  shared = {
    "seed": args.seed,
    "data.train": folder / "train.jsonl",
    "data.eval": folder / "eval.jsonl",
    "lora.rank": None,
    "logging.tensorboard": False,
  }
  sft = {
    "output_dir": folder / "sft",
    "model.path": folder / "model",
    "data.max_length": task.ROW_LENGTH,
    "data.packing": True,
    "optimizer.name": "adamw",
    "optimizer.args": {"b2": 0.98, "weight_decay": 0.05},
    "schedule.name": "warmup_constant_schedule",
    "schedule.args": {
      "init_value": 0.0,
      "warmup_steps": max(1, round(0.1 * args.sft_steps)),
    },
    "training.learning_rate": 4e-3,
    "training.max_steps": args.sft_steps,
    "training.global_batch_size": 16,
    "training.eval_every_n_steps": -(-args.sft_steps // 5),
  }
  grpo = {
    "output_dir": folder / "grpo",
    "model.path": folder / "sft" / "export",
    "algorithm.num_generations": 8,
    "algorithm.beta": 0.0,
    "algorithm.pass_threshold": task.RIGHT,
    "rollout.max_prompt_length": 8,
    "rollout.max_tokens_to_generate": 6,
    "rollout.eval_temperature": 0.0,
    "reward.functions": task.REWARDS,
    "reward.weights": task.WEIGHTS,
    "training.learning_rate": 1.5e-4,
    "training.max_steps": args.grpo_steps,
    "training.global_batch_size": 16,
    "training.eval_batch_size": task.HELD_OUT,
    "training.eval_every_n_steps": -(-args.grpo_steps // 5),
    "samples.every_n_rollouts": max(1, args.grpo_steps // 20),
  }
  commands = []
  for job, keys in (("sft", sft), ("grpo", grpo)):
    file = str(folder / f"{job}.yaml")
    overrides = [f"--{key}={_yaml(value)}" for key, value in (shared | keys).items()]
    commands.append(["init", job, f"--output={file}", *overrides])
    commands.append(["train", f"--config={file}"])
  runs = [str(folder / job) for job in ("sft", "grpo")]
  return [*commands, ["report", *runs, f"--output={folder / 'report.html'}"]]


def _yaml(value: object) -> str:
  # JSON is YAML too, whatever characters a reward function has.
  return str(value) if isinstance(value, str | pathlib.Path) else json.dumps(value)


def _command(*words: object) -> str:
  return f"tunix {shlex.join(map(str, words))}"


def prepare_output(folder: pathlib.Path, *, overwrite: bool) -> None:
  """Makes an empty folder.

  Args:
    folder: the folder.
    overwrite: if True, the files of an earlier quickstart are deleted.

  Raises:
    ValueError: the folder holds other files, or files of a quickstart without
      `overwrite`.
    NotADirectoryError: it is a file.
    OSError: it cannot be made or emptied.
  """
  if folder.exists() and not folder.is_dir():
    raise NotADirectoryError(f"--output is {folder}, a file; expected a folder")
  paths = sorted(folder.iterdir()) if folder.is_dir() else []
  foreign = [path.name for path in paths if path.name not in _NAMES]
  if foreign:
    raise ValueError(
      f"--output is {folder}, which holds {foreign[0]!r}; expected a folder with "
      "nothing but a quickstart. Choose another folder"
    )
  if paths and not overwrite:
    raise ValueError(
      f"--output is {folder}, which holds a quickstart; expected an empty folder. "
      "Choose another one, or add --overwrite"
    )
  for path in paths:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  folder.mkdir(parents=True, exist_ok=True)


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser(
    "tunix quickstart",
    "Fine-tunes a fresh small model on sums until it half knows them, reinforces right "
    "answers by GRPO, and reports. Takes some minutes and needs no download.",
  )
  made.add_argument(
    "--output", metavar="DIR", default="quickstart", help="default: %(default)s"
  )
  made.add_argument(
    "--overwrite", action="store_true", help="replace an earlier quickstart"
  )
  for name, default, meaning in (
    ("seed", 0, "seed of the held-out sums, the weights and the order of the data"),
    ("sft_steps", 150, "optimizer steps of fine-tuning; fewer are faster and worse"),
    ("grpo_steps", 100, "optimizer steps of GRPO; fewer are faster and worse"),
  ):
    made.add_argument(
      f"--{name}",
      type=int,
      metavar="N",
      default=default,
      help=f"{meaning}; default: %(default)s",
    )
  return made
