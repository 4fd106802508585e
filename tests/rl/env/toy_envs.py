"""Environments on words that are numbers, for the tests of episodes."""

import os
import signal
import subprocess
import time

import numpy as np

from tunix.rl.env.env import StepResult
from tunix.rl.env.table import Table


class OneAnswer:
  """One action; the reward is the share of even words."""

  def __init__(self, prompt):
    self._prompt = prompt

  def initial_observation(self):
    return self._prompt

  def step(self, action):
    words = [int(word) for word in action.text.split()] or [1]
    even = sum(word % 2 == 0 for word in words) / len(words)
    return StepResult(reward=even, episode_done=True)


class Echo:
  """Answers each action with its first word and `number`, for `turns` turns."""

  def __init__(self, prompt, number=7, turns=3):
    self._prompt, self._number, self._left = prompt, number, turns
    self.actions = []

  async def initial_observation(self):
    return self._prompt, None

  async def step(self, action):
    self.actions.append(list(action))
    self._left -= 1
    return StepResult(
      reward=float(action[0] % 2),
      episode_done=self._left == 0,
      next_observation=f"{action[0]} {self._number}",
      metrics={"left": self._left},
      logs={"said": action[0]},
    )


class Ids(Echo):
  """The same with ids: each observation is the whole prompt."""

  async def initial_observation(self):
    self._seen = [int(word) for word in self._prompt.split()]
    return list(self._seen), None

  async def step(self, action):
    result = await super().step(action)
    self._seen = [*self._seen, *action, int(action[0]), self._number]
    result.next_observation = list(self._seen)
    return result


class Forgetful(Ids):
  """Its prompts forget what was drawn, so that each turn is a row."""

  async def step(self, action):
    result = await super().step(action)
    result.next_observation = [*map(int, self._prompt.split()), self._left + 2]
    return result


class Hostile:
  """Does what `how` says in its second answer; plays a friendly one elsewhere."""

  def __init__(self, prompt, how):
    self._prompt, self._how, self._count = prompt, how, 0

  def initial_observation(self):
    if self._how == "no prompt":
      return 17
    return self._prompt

  def step(self, action):
    del action
    self._count += 1
    if self._count == 2:
      if self._how == "raises":
        raise RuntimeError("the database is away")
      if self._how == "exits":
        raise SystemExit(3)
      if self._how == "hangs":
        time.sleep(3600)
      if self._how == "wrong type":
        return {"reward": 1.0}
      if self._how == "nan":
        return StepResult(reward=float("nan"), episode_done=True)
      if self._how == "floods":
        text = "3 " * 10**6
        return StepResult(reward=0.0, episode_done=False, next_observation=text)
      if self._how == "bad stop":
        return StepResult(
          reward=0.0, episode_done=False, next_observation="3", next_stop_condition=[{}]
        )
    return StepResult(reward=1.0, episode_done=self._count > 2, next_observation="3")


class BadRepr:
  """An object whose every use fails."""

  def __repr__(self):
    raise RuntimeError("no repr")

  def to_ints(self):
    raise RuntimeError("no ids")


def step(**fields):
  """A result that goes on with "3", with other fields."""
  given = {"reward": 0.0, "episode_done": False, "next_observation": "3", **fields}
  return StepResult(**given)


# Results of `step` that are wrong, and what the failure says.
WRONG = {
  "metrics are a number": (lambda: step(metrics=5), "TypeError"),
  "metrics are a list": (lambda: step(metrics=[1, 2]), "TypeError"),
  "logs are a text": (lambda: step(logs="abc"), "ValueError"),
  "a reward too large": (lambda: step(reward=10**400), "expected a number up to"),
  "done is an array": (lambda: step(episode_done=np.ones(2)), "ValueError"),
  "an id too large": (lambda: step(next_observation=[2**40]), "the id 1099511627776"),
  "an id below 0": (lambda: step(next_observation=[-1]), "the id -1"),
  "no ids": (lambda: step(next_observation=BadRepr()), "no ids"),
  "no repr": (lambda: BadRepr(), "BadRepr"),
  "many stops": (lambda: step(next_stop_condition=list(range(9))), "at most 8"),
}


class Wrong:
  """Gives one of `WRONG` in its first answer."""

  def __init__(self, prompt, how):
    self._prompt, self._how = prompt, how
    if how == "no tools":
      self.tool_schemas = None

  def initial_observation(self):
    if self._how == "no reward":
      return StepResult(reward=None, episode_done=False)
    return self._prompt

  def step(self, action):
    action.clear()  # what an environment does with its copy is its own business
    action.message["content"] = "changed"
    if self._how in WRONG:
      return WRONG[self._how][0]()
    return StepResult(reward=1.0, episode_done=True)


class Pairs:
  """A group that rewards the episode with the larger first word."""

  closed = 0

  def __init__(self, prompt, count=4):
    self._prompt, self._count = prompt, count

  def make_envs(self):
    return [Echo(self._prompt, turns=1) for _ in range(self._count)]

  async def compute_group_rewards(self, trajectory_group, env_group):
    firsts = [episode.turns[0].action[0] for episode in trajectory_group]
    assert [env.actions[0][0] for env in env_group] == firsts
    best = max(firsts)
    return [(10.0 * (first == best), {"first": first}) for first in firsts]

  def cleanup(self):
    type(self).closed += 1


class Seat:
  """A player of a game in which players say words in turn, `rounds` times."""

  def __init__(self, table, seat, said, rounds=2, fails=False):
    self._table, self._seat, self._said = table, seat, said
    self._left, self._fails = rounds, fails

  async def initial_observation(self):
    await self._table.turn(self._seat)
    return " ".join(map(str, [self._seat + 2, *self._said]))

  async def step(self, action):
    if self._fails:
      raise RuntimeError("the player left")
    self._said.append(action[0])
    self._left -= 1
    is_last = self._left == 0 and self._seat == 1
    if is_last:
      self._table.end()
    else:
      self._table.next()
    if self._left:
      await self._table.turn(self._seat)
    return StepResult(
      reward=float(self._seat),
      episode_done=self._left == 0,
      next_observation=str(self._said[-1]),
    )


class Game:
  """Two games of two players, which are the four episodes of a prompt."""

  def __init__(self, prompt, fails=False):
    del prompt
    self._fails = fails

  def make_envs(self):
    envs = []
    for game in range(2):
      table, said = Table(2), []
      for seat in range(2):
        fails = self._fails and game == 0 and seat == 0
        envs.append(Seat(table, seat, said, fails=fails))
    return envs


class Violent(Hostile):
  """Harms its process in its second answer."""

  def step(self, action):
    if self._count == 1:
      if self._how == "dies":
        os._exit(7)
      if self._how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
      if self._how == "forks":
        subprocess.Popen(["sleep", "3600"])
        time.sleep(3600)
      if self._how == "eats memory":
        self._eaten = bytearray(8 << 30)
    return super().step(action)
