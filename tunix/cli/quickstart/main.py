"""`tunix quickstart`: the whole way on this machine, without a download.

Data and tokenizer from Python's standard library, a small model pretrained from
scratch, fine-tuned through `tunix train`, asked before and after, and reported on.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from tunix.cli.arguments import Parser
from tunix.cli.quickstart.settings import Settings, prepare_output


def main(argv: Sequence[str]) -> int:
  """Runs `tunix quickstart`; returns the exit code.

  Raises:
    ValueError: an option out of range, or a folder that is not empty.
    FileNotFoundError: the standard library's sources are not there.
    OSError: the disk is full or not writable.
  """
  args = _parse(argv)
  settings = Settings(
    output=pathlib.Path(args.output).expanduser(),
    seed=args.seed,
    pretrain_steps=args.pretrain_steps,
    finetune_steps=args.finetune_steps,
  )
  prepare_output(settings.output, overwrite=args.overwrite)
  try:
    run(settings)
  except KeyboardInterrupt as stop:
    # Stages are short and a half-filled folder is worth nothing: nothing is resumed.
    print(
      f"tunix: quickstart stopped, what it wrote is in {settings.output}; begin anew "
      "with --overwrite",
      file=sys.stderr,
    )
    return 128 + int(getattr(stop, "signum", signal.SIGINT))
  return 0


def run(settings: Settings) -> None:
  """Everything, into `settings.output`, which must be empty.

  Raises:
    Stopped, KeyboardInterrupt: SIGINT or SIGTERM.
    FileNotFoundError, OSError: see `main`.
  """
  print(f"tunix quickstart: about two minutes on two CPU cores; in {settings.output}")
  seconds: dict[str, float] = {}
  with _stage("imports", seconds):
    import jax

    from tunix.cli import plots
    from tunix.cli.quickstart import (
      data as quickstart_data,
      questions,
      report,
      train as training,
    )
    from tunix.utils import io

  with _stage("data and tokenizer", seconds):
    data = quickstart_data.build_data(settings.data, seed=settings.seed)
    tokenizer = quickstart_data.train_tokenizer(data, settings.vocab_size)
    print(", ".join(f"{name} {count:,}" for name, count in data.records.items()))
  with _stage(f"pretraining, {settings.pretrain_steps} steps", seconds):
    with training.progress_lines():
      model = training.pretrain(settings, data, tokenizer)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    del model
  asked = data.held_out[: settings.questions]
  with _stage("questions before", seconds):
    before = questions.ask(settings.checkpoint, asked, settings.answer_tokens)
  with _stage(f"fine-tuning, {settings.finetune_steps} steps", seconds):
    print(f"$ tunix train --config {settings.config_file}")
    with training.progress_lines():
      training.finetune(settings, data)
  with _stage("questions after", seconds):
    after = questions.ask(settings.export, asked, settings.answer_tokens)
  with _stage("report", seconds):
    questions.write_answers(settings.generations, before, after)
    losses = {
      "pretrain": training.read_losses(settings.pretrain),
      "finetune": training.read_losses(settings.finetune),
    }
    titles = {"pretrain": "Pretraining", "finetune": "Fine-tuning"}
    plots.save_loss_curves(
      settings.plot,
      [
        plots.Curve(title=titles[s], train=curve["train"], held_out=curve["eval"])
        for s, curve in losses.items()
      ],
    )
  results = report.Results(
    settings=settings,
    data=data,
    parameters=parameters,
    losses=losses,
    before=before,
    after=after,
    seconds=seconds,
  )
  io.write_atomic(settings.report, report.markdown(results).encode())
  _tell(report.summary(results), report.example(results))
  _tell(
    f"written to {settings.output} in {sum(seconds.values()):.0f} s:",
    *(f"  {path:20} {what}" for path, what in report.files(settings)),
  )
  _tell(
    "next:",
    *(f"  {what}:\n    {cmd}" for what, cmd in report.next_steps(results)),
  )


def _tell(*blocks: str) -> None:
  print("\n" + "\n".join(blocks), flush=True)


@contextlib.contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
  """Announces a stage and notes its wall time."""
  print(f"\n== {name}", flush=True)
  start = time.perf_counter()
  yield
  seconds[name] = time.perf_counter() - start


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser(
    "tunix quickstart",
    "Builds data from Python's standard library, pretrains a small model, fine-tunes "
    "it through `tunix train`, and reports. Needs no download.",
  )
  defaults = Settings(output=pathlib.Path("quickstart"))
  parser.add_argument(
    "--output", metavar="DIR", default=str(defaults.output), help="default: %(default)s"
  )
  parser.add_argument("--overwrite", action="store_true", help="replace what is there")
  for name, what in (
    ("seed", "of split, weights and order"),
    ("pretrain_steps", "fewer are faster and worse"),
    ("finetune_steps", "likewise"),
  ):
    parser.add_argument(
      f"--{name}",
      type=int,
      metavar="N",
      default=getattr(defaults, name),
      help=f"{what}; default: %(default)s",
    )
  return parser.parse_args(argv)
