"""The quickstart's results, as Markdown."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from tunix.cli.commands import tables
from tunix.examples.quickstart import questions
from tunix.examples.quickstart.questions import Answer
from tunix.examples.quickstart.settings import Settings
from tunix.examples.quickstart.task import QuickstartData
from tunix.examples.quickstart.train import Series
from tunix.report import page

_SHOWN = 8
_UNITS = {"sft": "loss, nats per token", "grpo": "mean reward"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
  """What a quickstart found.

  Attributes:
    settings: what was asked for.
    data: the sums.
    parameters: of the model.
    curves: {"sft" or "grpo": {"train" or "eval": steps, and losses or rewards}}.
    before, after: GRPO; answers to the same questions.
    seconds: wall time by stage.
  """

  settings: Settings
  data: QuickstartData
  parameters: int
  curves: Mapping[str, Mapping[str, Series]]
  before: Sequence[Answer]
  after: Sequence[Answer]
  seconds: Mapping[str, float]

  def held_out(self, stage: str) -> tuple[float, float]:
    """Held-out loss or reward before the first and after the last step of a stage."""
    series = self.curves[stage]["eval"]
    return series[0][1], series[-1][1]


def summary(results: Results) -> str:
  """The result in three lines."""
  loss, reward = (results.held_out(stage) for stage in ("sft", "grpo"))
  before, after = _accuracies(results)
  return f"""\
fine-tuning: held-out loss      {loss[0]:.2f} -> {loss[1]:.2f}
GRPO:        held-out reward    {reward[0]:.2f} -> {reward[1]:.2f}
             greedy accuracy    {before} -> {after}"""


def example(results: Results) -> str:
  """One question with its answers."""
  before, after = _shown(results)[0]
  prompt = before.record["prompt"]
  return f"asked {prompt}  before GRPO {before.text}  after {after.text}"


def next_steps(results: Results) -> list[tuple[str, str]]:
  """(what it does, the command) to go on with."""
  settings = results.settings
  model, config, other, question = (
    shlex.quote(str(word))
    for word in (
      settings.export("grpo"),
      settings.config_file("grpo"),
      settings.output / "grpo-rloo",
      _shown(results)[0][1].record["prompt"],
    )
  )
  return [
    ("ask the model", f"tunix generate --model {model} --prompt {question}"),
    (
      "reinforce the fine-tuned model again, by RLOO",
      f"tunix train --config {config} --algorithm.name=rloo --output_dir={other}",
    ),
  ]


def markdown(results: Results) -> str:
  """The report; links are relative to its folder."""
  s = results.settings
  file_list = "\n".join(f"- `{path}`: {what}" for path, what in files(s))
  commands = "\n\n".join(
    f"To {what}:\n\n```bash\n{command}\n```" for what, command in next_steps(results)
  )
  return f"""\
# Quickstart report

{_what_happened(results)}

## Loss and reward

{_stage_table(results)}

Curves are on the pages of the two runs: [fine-tuning]({_page(s, "sft")}) and \
[GRPO]({_page(s, "grpo")}).

## Answers to sums never seen

{_answer_table(results)}

All answers are in `{s.answers.name}`. What the model tried on the way, and how each try \
was rewarded, is on [the page of samples]({s.samples.relative_to(s.output).as_posix()}).

## Time

{_time_table(results)}

## Files

{file_list}

## Go on

{commands}
"""


def _page(settings: Settings, stage: str) -> str:
  """The link to a run's page."""
  return (settings.run(stage) / page.NAME).relative_to(settings.output).as_posix()


def files(settings: Settings) -> list[tuple[str, str]]:
  """(path within the folder, what it is)."""
  described = [
    (settings.report, "this report"),
    (settings.run("grpo") / page.NAME, "curves, settings and samples of GRPO, a page"),
    (settings.run("sft") / page.NAME, "the same of the fine-tuning"),
    (settings.samples, "what the model tried during GRPO, a page"),
    (settings.answers, "all answers, before and after GRPO"),
    (settings.export("grpo"), "the final model, Hugging Face format"),
    (settings.export("sft"), "the model after fine-tuning"),
    (settings.model, "the model before, with its tokenizer"),
    (settings.config_file("sft"), "configuration of the fine-tuning"),
    (settings.config_file("grpo"), "configuration of GRPO"),
    (settings.data, "data, JSON lines"),
  ]
  return [
    (path.relative_to(settings.output).as_posix(), what) for path, what in described
  ]


def _what_happened(results: Results) -> str:
  s, data = results.settings, results.data
  return (
    f"A Llama-style model of {results.parameters:,} parameters was to add three digits "
    f"and to answer in brackets. `tunix train` first showed it {len(data.train)} sums "
    f"with their answers ({s.sft_steps} steps of {s.sft_rows} x {s.row_length} tokens), "
    "and stopped while it was wrong about half of the time. Then GRPO "
    f"({s.grpo_steps} steps of {s.prompts} sums x {s.generations} tries) let it try, and "
    "reinforced the tries that were better than the others at the same sum: it was told "
    f"which answers are right, never shown one. The {len(data.held_out)} sums that it is "
    "asked here were in neither training.\n\n"
    f"Greedy accuracy: {' -> '.join(_accuracies(results))}."
  )


def _stage_table(results: Results) -> str:
  rows = []
  for stage, what in _UNITS.items():
    first, last = results.held_out(stage)
    steps = results.curves[stage]["train"][-1][0]
    rows.append((stage, str(steps), what, f"{first:.3f}", f"{last:.3f}"))
  return tables.markdown(("job", "steps", "on held-out sums", "before", "after"), rows)


def _answer_table(results: Results) -> str:
  rows = [
    (before.record["prompt"], before.record["response"], before.text, after.text)
    for before, after in _shown(results)
  ]
  cells = [[f"`{cell}`" for cell in row] for row in rows]
  return tables.markdown(("question", "right", "before GRPO", "after"), cells)


def _accuracies(results: Results) -> tuple[str, str]:
  before, after = map(questions.accuracy, (results.before, results.after))
  return f"{before:.1%}", f"{after:.1%}"


def _shown(results: Results) -> list[tuple[Answer, Answer]]:
  """The first questions, in the order of the data: nothing is picked."""
  return list(zip(results.before, results.after))[:_SHOWN]


def _time_table(results: Results) -> str:
  rows = [(stage, f"{seconds:.0f} s") for stage, seconds in results.seconds.items()]
  rows.append(("all", f"{sum(results.seconds.values()):.0f} s"))
  return tables.markdown(("stage", "wall time"), rows)
