"""The quickstart's results, as Markdown."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from tunix.cli.quickstart import task
from tunix.cli.plots import Series
from tunix.cli.quickstart.data import QuickstartData
from tunix.cli.quickstart.questions import Answer
from tunix.cli.quickstart.settings import Settings

_SHOWN = 5
_QUALITIES = (
  ("format", "in the right form"),
  ("name", "with the function's name"),
  ("arguments", "with all its arguments"),
)
_STAGES = (("pretrain", "pretraining"), ("finetune", "fine-tuning"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
  """What a quickstart found.

  Attributes:
    settings: what was asked for.
    data: the splits.
    parameters: of the model.
    losses: {"pretrain" or "finetune": {"train" or "eval": steps and losses}}.
    before, after: answers to the same questions.
    seconds: wall time by stage.
  """

  settings: Settings
  data: QuickstartData
  parameters: int
  losses: Mapping[str, Mapping[str, Series]]
  before: Sequence[Answer]
  after: Sequence[Answer]
  seconds: Mapping[str, float]

  def held_out(self, stage: str) -> tuple[float, float]:
    """Held-out loss before the first and after the last step of a stage."""
    series = self.losses[stage]["eval"]
    return series[0][1], series[-1][1]


def summary(results: Results) -> str:
  """The result in a few lines."""
  lines = []
  for stage, what in _STAGES:
    first, last = results.held_out(stage)
    lines.append(f"held-out loss, {what:13} {first:.2f} -> {last:.2f}")
  for (field, what), prefix in zip(_QUALITIES, ("answers ", "  ", "  ")):
    before, after = _shares(results, field)
    lines.append(f"{prefix + what:28} {before:>4} -> {after:>4}")
  return "\n".join(lines)


def example(results: Results) -> str:
  """One question with its answer."""
  answer = _shown(results)[0][1]
  text = "\n".join("  " + line for line in answer.text.strip().splitlines())
  return f"asked:    {answer.signature}\nanswered:\n{text}"


def next_steps(results: Results) -> list[tuple[str, str]]:
  """(what it does, the command) to go on with."""
  settings = results.settings
  export, config, adapted = (
    shlex.quote(str(path))
    for path in (
      settings.export,
      settings.config_file,
      settings.output / "finetune-lora",
    )
  )
  question = shlex.quote(_shown(results)[0][1].signature)
  return [
    (
      "ask the fine-tuned model",
      f"tunix generate --model {export} --chat --prompt {question}",
    ),
    ("see what was trained on", f"tunix data show {config} --rows 1"),
    (
      "fine-tune the pretrained model again, with LoRA",
      f"tunix train --config {config} --lora.rank=16 --output_dir={adapted}",
    ),
  ]


def markdown(results: Results) -> str:
  """The report; links are relative to its folder."""
  parts = [
    "# Quickstart report",
    _what_happened(results),
    "## Loss",
    f"![loss curves]({results.settings.plot.name})",
    _loss_table(results),
    "## Answers about functions never seen",
    _answer_table(results),
    *(_block(before, after) for before, after in _shown(results)),
    f"All answers are in `{results.settings.generations.name}`.",
    "## Time",
    _time_table(results),
    "## Files",
    _files(results.settings),
    "## Go on",
    "\n\n".join(
      f"To {what}:\n\n```bash\n{command}\n```" for what, command in next_steps(results)
    ),
  ]
  return "\n\n".join(parts) + "\n"


def files(settings: Settings) -> list[tuple[str, str]]:
  """(path within the folder, what it is)."""
  described = [
    (settings.report, "this report"),
    (settings.plot, "loss curves"),
    (settings.generations, "all answers, before and after"),
    (settings.export, "fine-tuned model, Hugging Face format"),
    (settings.checkpoint, "pretrained model, Hugging Face format"),
    (settings.config_file, "configuration of the fine-tuning"),
    (settings.finetune, "run of `tunix train`: checkpoints, logs"),
    (settings.pretrain, "metrics of the pretraining"),
    (settings.tokenizer, "tokenizer"),
    (settings.data, "data, JSON lines"),
  ]
  return [
    (path.relative_to(settings.output).as_posix(), what) for path, what in described
  ]


def _what_happened(results: Results) -> str:
  s, data = results.settings, results.data
  counts = {name: len(modules) for name, modules in data.modules.items()}
  batch = f"{s.batch_size} x {s.row_length} tokens"
  return (
    f"The data are signatures and docstrings of Python's standard library, split by "
    f"module: {counts['pretrain']} modules for pretraining, {counts['finetune']} for "
    f"fine-tuning, {counts['held_out']} held out. A Llama-style model of "
    f"{results.parameters:,} parameters was pretrained from scratch on "
    f"{data.records['pretrain']:,} texts ({s.pretrain_steps} steps of {batch}). "
    f"`tunix train` then fine-tuned it on {data.records['finetune']:,} chat records "
    f"({s.finetune_steps} steps): the user gives a signature, the assistant answers "
    "with name, arguments and summary. The questions are signatures of held-out "
    "modules that occur in no training data.\n\n"
    "A model of this size, trained for a minute, learns the form of an answer and to "
    "copy from the question. What it summarises is mostly invented."
  )


def _loss_table(results: Results) -> str:
  rows = []
  for stage, what in _STAGES:
    first, last = results.held_out(stage)
    steps = results.losses[stage]["train"][-1][0]
    rows.append((what, str(steps), f"{first:.3f}", f"{last:.3f}"))
  return _table(
    ("stage", "steps", "held-out loss before (nats per token)", "after"), rows
  )


def _answer_table(results: Results) -> str:
  rows = [(what, *_shares(results, field)) for field, what in _QUALITIES]
  return _table((f"of {len(results.after)} answers", "before", "after"), rows)


def _shares(results: Results, field: str) -> tuple[str, str]:
  """Of which share of the answers a check holds, before and after."""
  before, after = (
    task.share([answer.check for answer in answers], field)
    for answers in (results.before, results.after)
  )
  return f"{before:.0%}", f"{after:.0%}"


def _shown(results: Results) -> list[tuple[Answer, Answer]]:
  """The first questions, in the order of the data: nothing is picked."""
  return list(zip(results.before, results.after))[:_SHOWN]


def _block(before: Answer, after: Answer) -> str:
  # Four spaces make code whatever backticks the text has.
  parts = (
    f"Question: {after.signature}",
    f"Before:   {_one_line(before.text)}",
    f"After:\n{after.text.strip()}",
  )
  return "\n".join("    " + line for part in parts for line in part.splitlines())


def _one_line(text: str, longest: int = 70) -> str:
  line = " ".join(text.split())
  return line if len(line) <= longest else line[: longest - 3] + "..."


def _time_table(results: Results) -> str:
  rows = [(stage, f"{seconds:.0f} s") for stage, seconds in results.seconds.items()]
  rows.append(("all", f"{sum(results.seconds.values()):.0f} s"))
  return _table(("stage", "wall time"), rows)


def _files(settings: Settings) -> str:
  return "\n".join(f"- `{path}`: {what}" for path, what in files(settings))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)
