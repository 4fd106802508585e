"""`tunix quickstart`: the whole way on this machine, without a download.

A fresh small model is fine-tuned on sums until it half knows them, then reinforced by
GRPO, both by `tunix train`; asked before and after, and reported on.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from tunix.cli.commands.arguments import Parser
from tunix.examples.quickstart.settings import Settings, prepare_output


def main(argv: Sequence[str]) -> int:
  """Runs `tunix quickstart`; returns the exit code.

  Raises:
    ValueError: an option out of range, or a folder that is not empty.
    OSError: the disk is full or not writable.
  """
  args = _parse(argv)
  settings = Settings(
    output=pathlib.Path(args.output).expanduser(),
    seed=args.seed,
    sft_steps=args.sft_steps,
    grpo_steps=args.grpo_steps,
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
    OSError: see `main`.
  """
  print(f"tunix quickstart: a few minutes on two CPU cores; in {settings.output}")
  seconds: dict[str, float] = {}
  with _stage("imports", seconds):
    # Not above: `--help` and a refused folder need none of it.
    from tunix.examples.quickstart import questions, report, task, train as training
    from tunix.report import page
    from tunix.utils import io

  with _stage("data, tokenizer, fresh model", seconds):
    data = task.build_data(
      settings.data, seed=settings.seed, held_out=settings.held_out
    )
    parameters = training.write_model(settings, task.make_tokenizer())
    counts = f"{len(data.train)} sums to learn from, {len(data.held_out)} held out"
    print(f"{counts}; {parameters:,} parameters")
  answers, names = {}, {"sft": "fine-tuning", "grpo": "reinforcement by GRPO"}
  for stage, name in names.items():
    with _stage(name, seconds):
      print(f"$ tunix train --config {settings.config_file(stage)}")
      with training.progress_lines():
        training.train(settings, data, stage)
    with _stage(f"questions after {name}", seconds):
      model = settings.export(stage)
      answers[stage] = questions.ask(model, data.held_out, settings.answer_tokens)
      print(f"{questions.accuracy(answers[stage]):.1%} of the answers are right")
  results = report.Results(
    settings=settings,
    data=data,
    parameters=parameters,
    curves={
      stage: training.read_series(settings.run(stage), metric)
      for stage, metric in training.METRICS.items()
    },
    before=answers["sft"],
    after=answers["grpo"],
    seconds=seconds,
  )
  with _stage("report", seconds):
    questions.write_answers(settings.answers, results.before, results.after)
  io.write_atomic(settings.report, report.markdown(results).encode())
  _tell(report.summary(results), report.example(results))
  _tell(
    f"written to {settings.output} in {sum(seconds.values()):.0f} s:",
    *(f"  {path:27} {what}" for path, what in report.files(settings)),
  )
  _tell(
    "next:",
    *(f"  {what}:\n    {cmd}" for what, cmd in report.next_steps(results)),
  )
  _tell(f"open {settings.run('grpo') / page.NAME} in a browser to see the run")


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
    "Fine-tunes a fresh small model on sums until it half knows them, then reinforces "
    "it by GRPO, both through `tunix train`, and reports. Needs no download.",
  )
  defaults = Settings(output=pathlib.Path("quickstart"))
  parser.add_argument(
    "--output", metavar="DIR", default=str(defaults.output), help="default: %(default)s"
  )
  parser.add_argument("--overwrite", action="store_true", help="replace what is there")
  for name, what in (
    ("seed", "of split, weights and order"),
    ("sft_steps", "fewer are faster and worse"),
    ("grpo_steps", "likewise"),
  ):
    parser.add_argument(
      f"--{name}",
      type=int,
      metavar="N",
      default=getattr(defaults, name),
      help=f"{what}; default: %(default)s",
    )
  return parser.parse_args(argv)
