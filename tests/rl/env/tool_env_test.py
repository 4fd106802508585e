import asyncio
import json
import time

import pytest

from tests import toys_calls
from tests.rl.env import fakes, trl_env
from tunix.rl.env.adapters.gym import GymEnvironment
from tunix.rl.env.adapters.openenv import OpenEnvEnvironment
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.env import Action
from tunix.rl.env.making import group_of, one
from tunix.rl.env.runner import Runner
from tunix.rl.env.tool_env import ToolEnv
from tunix.rl.env.tools.calculator import calculate


class Script:
  """A policy that says given texts, one for each turn."""

  vocab_size = None

  def __init__(self, tokenizer, texts):
    self._tokenizer, self._texts = tokenizer, texts
    self._draws, self.prompts = [], []

  @property
  def open(self):
    return len(self._draws)

  def submit(self, draws):
    self._draws += draws

  def poll(self):
    draws, self._draws = self._draws, []
    return [self._drawn(draw) for draw in draws]

  def _drawn(self, draw):
    self.prompts.append(self._tokenizer.decode(draw.prompt, skip_special_tokens=False))
    ids = [*self._tokenizer.encode(self._texts[draw.turn])]
    ids.append(self._tokenizer.eos_ids()[0])
    return fakes.drawn(draw.episode, ids, "eos")


def called(name, **arguments):
  call = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>\n{call}\n</tool_call>"


def run(make, texts, count=1, max_turns=8, timeout_s=60, **values):
  tokenizer = toys_calls.tokenizer_of("qwen25")
  limits = EpisodeConfig(max_turns=max_turns, timeout_s=timeout_s)
  runner = Runner(tokenizer, limits, max_prompt_length=900, max_action_tokens=200)
  policy = Script(tokenizer, texts)
  maker = lambda: group_of(lambda: one(make, values), count)
  return runner.run([maker], count, policy), policy


def test_an_environment_of_trl_runs_unmodified():
  texts = [called("increment", step=2), called("increment", step=1), "done"]
  (episode,), policy = run(trl_env.Counter, texts, prompt="Count.", goal=3)
  assert episode.failure is None and episode.finish_reason == "done"
  assert episode.reward == 1.0 and len(episode.turns) == 3
  assert "Count. Reach 3." in policy.prompts[0] and "increment" in policy.prompts[0]
  assert "value 2" in policy.prompts[1] and "value 3" in policy.prompts[2]
  assert isinstance(episode.environment.environment, trl_env.Counter)
  assert len(episode.rows()) == 1


def test_a_limit_does_not_take_the_reward():
  texts = [called("increment", step=3), called("increment", step=0)]
  (episode,), _ = run(trl_env.Counter, texts, prompt="Count.", goal=3, max_turns=2)
  assert episode.finish_reason == "turns" and episode.reward == 1.0


def test_a_plain_reward_that_exits_or_hangs_costs_its_episode_only():
  kinds = iter(["exits", "hangs", "fine", "fine"])

  def make(prompt):
    how = next(kinds)

    def reward(messages):
      if how == "exits":
        raise SystemExit(3)
      if how == "hangs":
        time.sleep(3600)
      return 1.0

    return ToolEnv(prompt, [calculate], reward)

  episodes, _ = run(make, ["done"], count=4, prompt="?", timeout_s=2)
  failed = [episode.failure is not None for episode in episodes]
  assert failed == [True, True, False, False], [e.failure for e in episodes]


def test_mistakes_are_answers():
  texts = [
    called("increment", step="two"),
    called("decrement", step=1),
    "<tool_call>{oops}</tool_call>",
    "done",
  ]
  (episode,), policy = run(trl_env.Counter, texts, prompt="Count.")
  assert episode.failure is None and episode.reward == 0.0
  assert "expected the type 'integer'" in policy.prompts[1]
  assert "'decrement' is unknown" in policy.prompts[2]
  assert "could not be read" in policy.prompts[3]
  assert episode.turns[2].action.problem is not None
  assert episode.turns[0].metrics["tool_failures"] == 1


def test_functions_as_tools_and_a_reward_of_the_conversation():
  def double(x: int) -> int:
    """Doubles a number.

    Args:
      x: the number.
    """
    return 2 * x

  async def reward(messages):
    return float("14" in messages[-1]["content"])

  make = lambda prompt: ToolEnv(prompt, [double], reward)
  (episode,), _ = run(make, [called("double", x=7), "It is 14"], prompt="Twice 7?")
  assert [m["role"] for m in episode.messages] == [
    "user",
    "assistant",
    "tool",
    "assistant",
  ]
  assert episode.reward == 1.0


class Line:
  """A Gymnasium environment: walk from 0 to 3."""

  def close(self):
    self.closed = True

  def reset(self, *, seed=None):
    self.place = 0
    return self.place, {"seed": seed}

  def step(self, action):
    self.place += action
    return self.place, float(self.place == 3), self.place == 3, False, {}


def test_gymnasium():
  line = Line()
  make = lambda: GymEnvironment(line, int, lambda o: f"at {o}", penalty=-1.0)
  (episode,), policy = run(make, ["2", "left", "1"], prompt="unused")
  assert [turn.reward for turn in episode.turns] == [0.0, -1.0, 1.0]
  assert "at 0" in policy.prompts[0] and "at 2" in policy.prompts[1]
  assert "invalid literal" in policy.prompts[2] and line.closed


class Client:
  """An asynchronous client of OpenEnv, in this process."""

  class Result:
    def __init__(self, observation, reward, done):
      self.observation, self.reward, self.done = observation, reward, done

  async def reset(self, start):
    return self.Result({"n": start}, None, False)

  async def step(self, action):
    return self.Result({"n": action["add"]}, 2.0, True)


def test_openenv():
  env = OpenEnvEnvironment(
    Client(), lambda text: {"add": int(text)}, lambda o: f"n={o['n']}", start=5
  )
  assert asyncio.run(env.initial_observation()) == "n=5"
  action = Action([1])
  action.text = "4"
  result = asyncio.run(env.step(action))
  assert (result.reward, result.episode_done, result.next_observation) == (
    2,
    True,
    "n=4",
  )


def test_what_is_no_environment():
  (episode,), _ = run(lambda: object(), ["x"], prompt="?")
  assert "env returned an object" in episode.failure
  with pytest.raises(ValueError, match="is no tool"):
    ToolEnv("?", [3])
