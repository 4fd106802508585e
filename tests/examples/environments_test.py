"""The ready environments, with a policy that says given texts."""

import json

import pytest

from tests.rl.env.tool_env_test import called, run
from tunix.examples import environments


def test_guess():
  texts = ["is it 40 ?", "I do not know", "then 70", "42"]
  (episode,), policy = run(environments.Guess, texts, prompt="", hidden=42)
  assert [turn.reward for turn in episode.turns] == [0, 0, 0, 1]
  assert "higher" in policy.prompts[1] and "Name a number" in policy.prompts[2]
  assert "lower" in policy.prompts[3] and episode.finish_reason == "done"


@pytest.mark.parametrize(("said", "reward"), [("It is 56.", 1.0), ("It is 55.", 0.0)])
def test_calculator(said, reward):
  texts = [called("calculate", expression="7*8"), said]
  make = environments.calculator
  (episode,), policy = run(make, texts, prompt="What is 7 times 8?", answer=56)
  assert episode.reward == reward and "56" in policy.prompts[1]


def test_code():
  program = "```python\ndef add(a, b):\n  return a + b if a else 0\n```"
  tests = "assert add(1, 2) == 3\nassert add(0, 2) == 2"
  texts = [called("python", code="print(1 + 2)"), program]
  (episode,), policy = run(environments.code, texts, prompt="Write add.", tests=tests)
  assert episode.failure is None and episode.reward == 0.5
  assert "3" in policy.prompts[1]


def test_search(tmp_path):
  corpus = tmp_path / "corpus.jsonl"
  texts = ["The Danube ends in the Black Sea.", "The Rhine ends in the North Sea."]
  corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  said = [called("search", query="where does the Danube end"), "In the black sea."]
  options = {"answer": "Black Sea", "corpus": str(corpus)}
  (episode,), policy = run(environments.search, said, prompt="Where?", **options)
  assert episode.reward == 1.0 and "Danube ends" in policy.prompts[1]


def test_tic_tac_toe():
  class Moves(list):
    """X plays 1, 2, 3 and O plays 4, 5: by the cells that a prompt shows as free."""

    def __getitem__(self, turn):
      return str(turn + 1)

  episodes, _ = run(
    environments.TicTacToe, Moves(), count=2, prompt="", games=1, max_turns=9
  )
  # X takes cell 1 in its first turn, and O names the same cell, which loses.
  assert [episode.reward for episode in episodes] == [1.0, -1.0]
  assert [len(episode.turns) for episode in episodes] == [1, 1]
