"""Limits of episodes, with a policy that draws the same ids."""

import threading
import time

import pytest

from tests import toys_calls
from tests.rl.env import fakes
from tunix.rl.env.env import EnvGroup, StepResult


class Scripted:
  """Gives a first observation, and then `answer(turn)` after each action."""

  def __init__(self, first, answer, **attributes):
    self._first, self._answer, self._turn = first, answer, 0
    self.__dict__ |= attributes

  def initial_observation(self):
    return self._first

  def step(self, action):
    del action
    self._turn += 1
    answer = self._answer(self._turn)
    if isinstance(answer, StepResult):
      return answer
    return StepResult(reward=1.0, episode_done=False, next_observation=answer)


class Watched:
  """A tokenizer that remembers the length of the longest text it read."""

  longest = 0

  def __init__(self, tokenizer):
    self._tokenizer = tokenizer

  def __getattr__(self, name):
    got = getattr(self._tokenizer, name)
    if name not in ("encode", "encode_continuation", "tokenize"):
      return got

    def reads(text, *args, **options):
      self.longest = max(self.longest, len(text))
      return got(text, *args, **options)

    return reads


@pytest.mark.parametrize("where", ["first", "later", "message"])
def test_a_flood_is_not_tokenized(where):
  flood = "3 " * 10**6
  if where == "message":
    flood = [{"role": "tool", "content": [{"type": "text", "text": flood}]}]
  first = flood if where == "first" else "3"
  tokenizer = Watched(toys_calls.tokenizer_of("qwen25"))
  make = lambda: Scripted(first, lambda turn: flood)
  (episode,) = fakes.run(make, tokenizer=tokenizer, max_tokens=64)
  assert episode.finish_reason == "observation" and episode.failure is None
  assert len(episode.turns) == (where != "first")
  assert tokenizer.longest < 2000
  assert len(str(episode.messages)) < 2000


def test_the_length_of_an_observation_counts_where_reasoning_is_dropped():
  tokenizer = toys_calls.tokenizer_of("qwen3")
  thought = "<think>\n" + "so we ask again ? " * 20 + "\n</think>\n\nseven"
  drawn = [*tokenizer.encode(thought), tokenizer.eos_ids()[0]]
  reasons = {}
  for words in (2, 30):
    make = lambda words=words: Scripted("so ?", lambda _: "ask again " * words)
    (episode,) = fakes.run(
      make,
      tokenizer=tokenizer,
      policy=fakes.FixedPolicy(drawn),
      max_turns=2,
      max_observation_tokens=40,
    )
    # The prompt becomes shorter than before: the template drops the reasoning.
    reasons[words] = episode.finish_reason
  assert reasons == {2: "turns", 30: "observation"}


def test_a_limit_of_seconds_ends_an_episode_that_never_ends():
  """A hostile environment: each answer comes in time, and there is no end of them."""
  made = []

  def make():
    def answer(turn):
      del turn
      time.sleep(0.05)
      return "3"

    made.append(Scripted("3", answer, final_reward=lambda: 0.5))
    return made[-1]

  limits = {"max_turns": 10**6, "max_tokens": 10**6}
  start = time.monotonic()
  episodes = fakes.run(make, count=3, max_seconds=0.4, timeout_s=20, **limits)
  assert time.monotonic() - start < 10
  for episode in episodes:
    assert episode.finish_reason == "seconds" and episode.failure is None
    # The rewards of its actions, and the last one that the environment gives.
    assert episode.reward == len(episode.turns) + 0.5
    assert 1 <= len(episode.turns) <= 9


def test_a_call_that_hangs_past_the_seconds_of_the_episode_is_a_failure():
  wakes = threading.Event()
  make = lambda: Scripted("3", lambda turn: wakes.wait(20) or "3")
  (episode,) = fakes.run(make, max_seconds=0.1, timeout_s=0.4)
  wakes.set()
  assert episode.finish_reason == "failed"
  assert episode.failure == "no answer within 0.4 s"


class Late(EnvGroup):
  """A group whose making takes longer than allowed."""

  def __init__(self, seconds):
    self._seconds, self.closed, self.cleaned = seconds, [], threading.Event()

  def make_envs(self):
    time.sleep(self._seconds)
    closes = lambda: self.closed.append(1)
    return [Scripted("3", lambda _: "3", close=closes) for _ in range(2)]

  async def cleanup(self):
    self.cleaned.set()


@pytest.mark.parametrize("seconds", [0.0, 0.8])
def test_environments_that_are_made_late_are_closed(seconds):
  group = Late(seconds)
  # The group has the time of two calls.
  episodes = fakes.run(lambda: group, count=2, timeout_s=0.2, max_turns=1)
  assert [e.finish_reason for e in episodes] == ["failed" if seconds else "turns"] * 2
  assert group.cleaned.wait(5) and len(group.closed) == 2


class Ends(fakes.FixedPolicy):
  """Fails at its second action, while the environments work on the first ones."""

  def poll(self):
    if len(self.draws) > 2:
      raise RuntimeError("the engine is gone")
    return super().poll()


def test_environments_of_a_batch_that_cannot_go_on_are_closed():
  slow, quick = Late(0.4), Late(0.0)  # one is still being made
  groups = iter([slow, quick])
  with pytest.raises(RuntimeError, match="the engine is gone"):
    fakes.run(lambda: next(groups), count=2, groups=2, policy=Ends(), timeout_s=5.0)
  for group in (slow, quick):
    # `cleanup` is the last call.
    assert group.cleaned.wait(5) and len(group.closed) == 2
