"""The report says what was found, and nothing else."""

import pathlib

import pytest

from tunix.examples.quickstart import report
from tunix.examples.quickstart.questions import Answer
from tunix.examples.quickstart.settings import Settings
from tunix.examples.quickstart.task import QuickstartData

RECORD = {"prompt": "1+2+3=", "response": "[6]", "answer": "6"}


def answers(*texts: str) -> list[Answer]:
  return [Answer(record=RECORD, text=text) for text in texts]


@pytest.fixture
def results():
  return report.Results(
    settings=Settings(output=pathlib.Path("my out"), sft_steps=30),
    data=QuickstartData(
      folder=pathlib.Path("my out/data"), train=[RECORD] * 3, held_out=[RECORD] * 4
    ),
    parameters=987654,
    curves={
      "sft": {"train": [(1, 7.0), (30, 5.0)], "eval": [(0, 7.5), (30, 5.25)]},
      "grpo": {"train": [(1, 0.4), (40, 0.9)], "eval": [(0, 0.25), (40, 0.875)]},
    },
    before=answers("[5]", "[6]", "6", "["),
    after=answers("[6]", "[6]", "[6]", "[7]"),
    seconds={"fine-tuning": 30.4, "GRPO": 45.0},
  )


def test_summary_has_loss_reward_and_accuracy(results):
  assert report.summary(results).splitlines() == [
    "fine-tuning: held-out loss      7.50 -> 5.25",
    "GRPO:        held-out reward    0.25 -> 0.88",
    "             greedy accuracy    25.0% -> 75.0%",
  ]


def test_markdown_has_what_was_found(results):
  text = report.markdown(results)
  for found in (
    "987,654 parameters",
    "3 sums with their answers (30 steps",
    "The 4 sums that it is asked",
    "| sft | 30 | loss, nats per token | 7.500 | 5.250 |",
    "| grpo | 40 | mean reward | 0.250 | 0.875 |",
    "| `1+2+3=` | `[6]` | `[5]` | `[6]` |",
    "Greedy accuracy: 25.0% -> 75.0%.",
    "| GRPO | 45 s |",
    "| all | 75 s |",
    "(sft/report.html) and [GRPO](grpo/report.html)",
    "(grpo/samples/index.html)",
  ):
    assert found in text


def test_commands_quote_paths(results):
  commands = [command for _, command in report.next_steps(results)]
  assert commands[0] == "tunix generate --model 'my out/grpo/export' --prompt 1+2+3="
  assert "--config 'my out/grpo.yaml' --algorithm.name=rloo" in commands[1]


def test_the_example_is_the_first_question(results):
  assert report.example(results) == "asked 1+2+3=  before GRPO [5]  after [6]"
