"""Ready environments: numbers to find, arithmetic, programs with tests, search, a game.

    tunix train --job=grpo --env=tunix.examples.environments:calculator \
      --model=Qwen/Qwen3-0.6B --data.train=questions.jsonl

Each function or class here is a value of the key `env`. The columns of the data that it
needs are its arguments.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tunix.rl.env.env import Action, Message, StepResult
from tunix.rl.env.table import Table
from tunix.rl.env.tool_env import ToolEnv
from tunix.rl.env.tools.calculator import calculate
from tunix.rl.env.tools.python_tool import PythonTool
from tunix.rl.env.tools.search_tool import SearchTool
from tunix.sandbox.jail import Jail
from tunix.utils import text_files

_CODE = re.compile(r"```(?:python)?\n(.*?)```", re.S)
_CELLS = range(9)
_LINES = (
  *((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8)),
  *((0, 4, 8), (2, 4, 6)),
)


class Guess:
  """Hides a number; the policy names numbers and is told "higher" or "lower".

  Args:
    hidden: the number, from 1 to `high`.
    high: largest number.
  """

  def __init__(self, hidden: int, high: int = 100):
    self._hidden, self._high = hidden, high

  def initial_observation(self) -> str:
    """Returns the question."""
    return (
      f"I think of a whole number from 1 to {self._high}. Name one number at a time; I "
      "answer higher or lower."
    )

  def step(self, action: Action) -> StepResult:
    """Compares the last number of an answer with the hidden one."""
    numbers = re.findall(r"\d+", action.message["content"])
    if not numbers:
      return StepResult(
        reward=0.0, episode_done=False, next_observation="Name a number."
      )
    guess = int(numbers[-1])
    word = "higher" if guess < self._hidden else "lower"
    is_found = guess == self._hidden
    return StepResult(
      reward=float(is_found), episode_done=is_found, next_observation=f"{word}"
    )


def _last_number(messages: Sequence[Message]) -> str | None:
  numbers = re.findall(
    r"-?\d+(?:\.\d+)?", str(messages[-1]["content"]).replace(",", "")
  )
  return numbers[-1] if numbers else None


def calculator(prompt: Any, answer: Any) -> ToolEnv:
  """A question in words with a calculator; 1 if the last number is the answer.

  Args:
    prompt: the question.
    answer: the right number.
  """

  def reward(messages: list[Message]) -> float:
    number = _last_number(messages)
    return float(number is not None and float(number) == float(answer))

  return ToolEnv(prompt, [calculate], reward)


def code(prompt: Any, tests: str) -> ToolEnv:
  """A programming task with Python to try; the share of lines of `tests` that pass.

  The last block of code of the final answer is run once for each test, in a jail.

  Args:
    prompt: the task.
    tests: statements such as `assert add(1, 2) == 3`, one a line.
  """
  tool = PythonTool()

  def reward(messages: list[Message]) -> float:
    blocks = _CODE.findall(str(messages[-1]["content"]))
    lines = [line for line in text_files.lines(tests) if line.strip()]
    if not blocks or not lines:
      return 0.0
    return sum(_passes(tool.jail, f"{blocks[-1]}\n{line}\n") for line in lines) / len(
      lines
    )

  return ToolEnv(prompt, [tool], reward)


def _passes(jail: Jail, program: str) -> bool:
  result = jail.run([sys.executable, "-s", "main.py"], files={"main.py": program})
  return result.exit_code == 0


def search(prompt: Any, answer: str, corpus: str) -> ToolEnv:
  """A question over a corpus that the policy searches; 1 if the answer is named.

  Args:
    prompt: the question.
    answer: text that the final answer must have.
    corpus: file of documents, one JSON object with "text" in each line.
  """

  def reward(messages: list[Message]) -> float:
    return float(answer.lower() in str(messages[-1]["content"]).lower())

  with _LOCK:  # environments are made in several threads
    index = _index(corpus)
  return ToolEnv(prompt, [index], reward)


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=8)
def _index(corpus: str) -> SearchTool:
  return SearchTool(corpus)


class TicTacToe:
  """Games of tic-tac-toe; the policy is both players of each game.

  The first player is X. A player that wins gets 1 and the other one -1; a draw gives 0.
  A move that is no free cell loses the game.

  Args:
    games: games of a prompt; `algorithm.num_generations` must be twice as many.
  """

  def __init__(self, games: int = 4):
    self._games = games

  def make_envs(self) -> list[Player]:
    """Returns the two players of each game."""
    envs = []
    for _ in range(self._games):
      game = _Game()
      envs += [Player(game, seat) for seat in range(2)]
    return envs


class _Game:
  """The board of a game, and who won."""

  def __init__(self):
    self.cells, self.table = [""] * 9, Table(2)
    self.winner: int | None = None

  def play(self, seat: int, text: str) -> None:
    """Makes a move; ends the game if it is over."""
    digit = re.search(r"[1-9]", text)
    cell = int(digit[0]) - 1 if digit else -1
    if cell < 0 or self.cells[cell]:
      self.winner = 1 - seat
      self.table.end()
      return
    self.cells[cell] = "XO"[seat]
    if any(all(self.cells[i] == "XO"[seat] for i in line) for line in _LINES):
      self.winner = seat
    if self.winner is not None or all(self.cells):
      self.table.end()
    else:
      self.table.next()

  def shown(self) -> str:
    """Returns the board; free cells show their numbers."""
    cells = [self.cells[i] or str(i + 1) for i in _CELLS]
    return "\n".join(" ".join(cells[i : i + 3]) for i in (0, 3, 6))


class Player:
  """One player of a game, an episode of its own."""

  def __init__(self, game: _Game, seat: int):
    self._game, self._seat = game, seat

  async def initial_observation(self) -> str:
    """Waits for the first turn of this player."""
    await self._game.table.turn(self._seat)
    return f"You are {'XO'[self._seat]}. Name a free cell.\n{self._game.shown()}"

  async def step(self, action: Action) -> StepResult:
    """Makes a move and waits for the other player's."""
    game = self._game
    if not game.table.is_over:
      game.play(self._seat, action.message["content"])
      await game.table.turn(self._seat)
    reward = 0.0
    if game.table.is_over and game.winner is not None:
      reward = 1.0 if game.winner == self._seat else -1.0
    return StepResult(
      reward=reward, episode_done=game.table.is_over, next_observation=game.shown()
    )
