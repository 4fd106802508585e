"""The report says what was found, and nothing else."""

import pathlib

import pytest

from tunix.cli.quickstart import report
from tunix.cli.quickstart.data import QuickstartData
from tunix.cli.quickstart.questions import Answer
from tunix.cli.quickstart.settings import Settings
from tunix.cli.quickstart.task import Check


def answer(text: str, *right: bool) -> Answer:
  check = Check(format=right[0], name=right[1], arguments=right[2])
  return Answer(signature="def f(a)", text=text, check=check)


@pytest.fixture
def results():
  wrong = answer("```\nnonsense", False, False, False)
  names = ("pretrain", "pretrain_eval", "finetune", "finetune_eval")
  return report.Results(
    settings=Settings(output=pathlib.Path("my out"), pretrain_steps=30),
    data=QuickstartData(
      folder=pathlib.Path("my out/data"),
      records=dict(zip(names, (1111, 12, 2222, 13))),
      modules={"pretrain": ("a", "b"), "finetune": ("c",), "held_out": ("d",)},
      held_out=(),
    ),
    parameters=987654,
    losses={
      "pretrain": {"train": [(1, 7.0), (30, 5.0)], "eval": [(0, 7.5), (30, 5.25)]},
      "finetune": {"train": [(1, 6.0), (40, 2.0)], "eval": [(0, 6.5), (40, 3.125)]},
    },
    before=[wrong] * 4,
    after=[
      answer("Name: f\nArguments: a\nSummary: Does it.", True, True, True),
      answer("Name: g\nArguments: a\nSummary: Does it.", True, False, True),
      wrong,
      wrong,
    ],
    seconds={"pretraining": 30.4, "fine-tuning": 45.0},
  )


def test_summary_has_losses_and_shares(results):
  assert report.summary(results).splitlines() == [
    "held-out loss, pretraining   7.50 -> 5.25",
    "held-out loss, fine-tuning   6.50 -> 3.12",
    "answers in the right form      0% ->  50%",
    "  with the function's name     0% ->  25%",
    "  with all its arguments       0% ->  50%",
  ]


def test_markdown_has_what_was_found(results):
  text = report.markdown(results)
  for found in (
    "987,654 parameters",
    "1,111 texts (30 steps of",
    "2,222 chat records",
    "| pretraining | 30 | 7.500 | 5.250 |",
    "| fine-tuning | 40 | 6.500 | 3.125 |",
    "| in the right form | 0% | 50% |",
    "| pretraining | 30 s |",
    "| all | 75 s |",
    "![loss curves](loss.png)",
    "    Before:   ``` nonsense",
    "    Name: f\n    Arguments: a\n    Summary: Does it.",
  ):
    assert found in text


def test_commands_quote_paths(results):
  commands = [command for _, command in report.next_steps(results)]
  assert commands[0] == (
    "tunix generate --model 'my out/finetune/export' --chat --prompt 'def f(a)'"
  )
  assert "--config 'my out/finetune.yaml' --lora.rank=" in commands[2]


def test_the_example_is_the_first_question(results):
  assert "def f(a)" in report.example(results)
  assert "  Summary: Does it." in report.example(results)
