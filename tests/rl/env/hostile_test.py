"""Environments whose answers are built to stop the run."""

import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest

from tests.rl.env import fakes
from tunix.generate.sizes import text_size
from tunix.rl.env.env import Action, EnvError, StepResult
from tunix.rl.env.processes import EnvProcesses


class Answering:
  """Gives `answer()` after its first action."""

  def __init__(self, answer):
    self._answer = answer

  def initial_observation(self):
    return "3"

  def step(self, action):
    del action
    return self._answer()


class Unshown:
  def __str__(self):
    raise ValueError("no text")


class Exiting:
  @property
  def reward(self):
    raise SystemExit(3)


text: Any = "1"  # where a number belongs


def raises(error):
  raise error


def episode_of(answer):
  (episode,) = fakes.run(lambda: Answering(answer), max_tokens=64)
  return episode


@pytest.mark.parametrize(
  "answer, part",
  [
    (lambda: raises(EnvError(Unshown())), "cannot be shown"),
    (lambda: raises(EnvError("x" * 10**6)), "xxx"),
    (lambda: raises(ValueError("x" * 10**6)), "ValueError"),
    (Exiting, "SystemExit"),
    (lambda: StepResult(reward=text, episode_done=True), "reward"),
    (lambda: StepResult(reward=10**5000, episode_done=True), "reward"),
    (lambda: (x for x in ()), "expected a StepResult"),
  ],
)
def test_a_hostile_answer_costs_its_episode_and_a_short_line(answer, part):
  failure = episode_of(answer).failure
  assert failure is not None and part in failure and len(failure) <= 1000


def test_lists_without_text_count_as_characters():
  nested = []
  for _ in range(12):
    nested = [nested, nested]
  assert not text_size.may_fit(nested, 10)
  assert text_size.may_fit(nested, 20)  # 8,191 lists
  assert text_size.may_fit("x" * 1000, 2)


def test_a_message_that_contains_itself_ends_its_episode():
  content: list[Any] = ["3"]
  content.append(content)
  step = StepResult(
    reward=0.0,
    episode_done=False,
    next_observation=[{"role": "user", "content": content}],
  )
  assert episode_of(lambda: step).finish_reason == "observation"


class NoJson:
  def initial_observation(self):
    return "3", {"a set"}

  def step(self, action):
    del action
    return StepResult(reward=1.0, episode_done=True)


def test_a_value_that_is_no_json_does_not_cost_the_process(monkeypatch):
  with contextlib.closing(EnvProcesses(NoJson, timeout_s=60.0)) as running:
    env = running.environment()
    with pytest.raises(EnvError, match="not JSON serializable"):
      env.initial_observation()
    assert env.step(Action([1])).reward == 1.0
    env.close()
    # A process that was killed while it was idle serves no other episode.
    (child,) = running._children.running
    os.kill(child.pid, signal.SIGKILL)
    while not child.exited():
      time.sleep(0.01)
    start = mock.Mock(side_effect=EnvError("a new process"))
    monkeypatch.setattr(running._children, "start", start)
    with pytest.raises(EnvError, match="a new process"):
      running.environment()
