"""Runs the episodes of a batch: many environments over one policy.

    make_envs -> initial_observation -> draw -> step -> draw -> ... -> group rewards

Calls of environments run in threads (calls.py), actions are drawn in the caller's
thread (policy.py). Each episode is in one of three places: an environment works on it,
it waits for an action, or it has ended. The loop below moves episodes on, and every
wait in it has a bound.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.env import env as env_lib
from tunix.rl.env.calls import Calls, Id
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.conversation import Conversation
from tunix.rl.env.env import EnvError
from tunix.rl.env.episode import Episode, Turn
from tunix.rl.env.policy import Draw, Drawn, Policy
from tunix.rl.reward_pool import START_TIMEOUT_S

MakeGroup = Callable[[], Any]  # returns an EnvGroup
_GRACE_S = 5.0  # in which a process that misses its deadline is killed
_WAIT_S = 0.2  # of one look at the environments, while nothing is drawn


@dataclasses.dataclass(eq=False)
class _Group:
  """A group of episodes while it runs."""

  number: int
  make: MakeGroup
  lives: list[_Live] = dataclasses.field(default_factory=list)
  builder: Any = None
  envs: list[Any] = dataclasses.field(default_factory=list)
  open: int = 0

  @property
  def episodes(self) -> list[Episode]:
    return [live.episode for live in self.lives]


@dataclasses.dataclass(eq=False)
class _Live:
  """An episode while it runs."""

  number: int
  group: _Group
  episode: Episode
  env: Any = None
  conversation: Conversation | None = None
  row_prompt: int = 0  # tokens of the first prompt of the row
  prompt: list[int] = dataclasses.field(default_factory=list)
  stops: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
  drawn: Drawn | None = None


class Runner:
  """Runs batches of episodes.

  Args:
    tokenizer: tokenizer of the policy.
    config: limits.
    max_prompt_length: most tokens of the first prompt of an episode.
    max_action_tokens: most tokens of an action.

  Attributes:
    waited_s: seconds of the last batch in which nothing was drawn, because all episodes
      waited for environments.
  """

  def __init__(
    self,
    tokenizer: TokenizerAdapter,
    config: EpisodeConfig,
    *,
    max_prompt_length: int,
    max_action_tokens: int,
  ):
    self._tokenizer, self._config = tokenizer, config
    self._max_prompt, self._max_action = max_prompt_length, max_action_tokens
    self.waited_s = 0.0

  def run(
    self, makers: Sequence[MakeGroup], group_size: int, policy: Policy
  ) -> list[Episode]:
    """Runs one group of episodes for each maker.

    Args:
      makers: functions that return an `EnvGroup`.
      group_size: episodes of a group.
      policy: draws the actions.

    Returns: the episodes, group by group. Those whose environment failed have a
      `failure`.
    """
    calls = Calls(self._config.workers, self._config.timeout_s)
    try:
      return _Batch(self, makers, group_size, policy, calls).run()
    finally:
      calls.close()

  def room(self, live: _Live) -> int:
    """Returns the number of tokens that the next action may have."""
    after = len(live.prompt) - min(live.row_prompt, self._max_prompt)
    return min(self._max_action, self._config.max_tokens - after)


class _Batch:
  """One call of `Runner.run`."""

  def __init__(
    self,
    runner: Runner,
    makers: Sequence[MakeGroup],
    group_size: int,
    policy: Policy,
    calls: Calls,
  ):
    self._runner, self._config = runner, runner._config
    self._size, self._policy, self._calls = group_size, policy, calls
    self._groups = [_Group(number, make) for number, make in enumerate(makers)]
    self._lives: list[_Live] = []
    for group in self._groups:
      group.lives = [
        _Live(group.number * group_size + i, group, Episode())
        for i in range(group_size)
      ]
      self._lives += group.lives
    self._ready: list[_Live] = []
    self._after = {
      "make": self._after_make,
      "envs": self._after_envs,
      "first": self._after_first,
      "step": self._after_step,
      "group": self._after_group,
      "cleanup": self._after_cleanup,
      "close": self._after_close,
    }

  def run(self) -> list[Episode]:
    self._runner.waited_s = 0.0
    for group in self._groups:
      group.open = self._size
      # Processes of environments start in this call.
      starts = START_TIMEOUT_S if self._config.isolation == "process" else 0.0
      id = ("make", group.number)
      self._calls.start(id, _made, group.make, extra_s=starts)
    while self._calls.open or self._policy.open or self._ready:
      self._draw()
      for drawn in self._policy.poll() if self._policy.open else ():
        self._act(self._lives[drawn.episode], drawn)
      waits = not self._policy.open  # `_draw` left the ready ones for calls at work
      if waits and not self._ready and self._calls.all_wait:
        self._calls.fail_waiting(
          "it waits for another episode of its group, and none of them can go on"
        )
      start = time.monotonic()
      answers = self._calls.take(_WAIT_S if waits else 0.0)
      if waits:
        self._runner.waited_s += time.monotonic() - start
      for (kind, number), result in answers:
        self._after[kind](number, result)
    return [live.episode for live in self._lives]

  def _draw(self) -> None:
    """Submits the episodes that wait for an action; in "turns" all at once."""
    is_early = self._config.order == "turns" and (
      self._calls.working or self._policy.open
    )
    if not self._ready or is_early:
      return
    ready, self._ready = sorted(self._ready, key=lambda live: live.number), []
    self._policy.submit([self._draw_of(live) for live in ready])

  def _draw_of(self, live: _Live) -> Draw:
    texts, ids = live.stops
    return Draw(
      episode=live.number,
      turn=len(live.episode.turns),
      prompt=np.array(live.prompt, np.int32),
      max_tokens=self._runner.room(live),
      stops=texts,
      stop_ids=ids,
    )

  def _act(self, live: _Live, drawn: Drawn) -> None:
    """Hands an action to the environment."""
    assert live.conversation is not None
    live.drawn = drawn
    action = live.conversation.act(drawn.ids, drawn.finish_reason)
    turn = Turn(
      prompt=np.array(live.prompt, np.int32),
      action=action,
      logps=drawn.logps,
      versions=drawn.versions,
    )
    live.episode.turns.append(turn)
    self._call(("step", live.number), live.env.step, action)

  def _call(self, id: Id, method: Callable[..., Any], *args: Any) -> None:
    """Calls an environment. Its process, if it has one, has the same deadline."""
    own = _GRACE_S if self._config.isolation == "process" else 0.0
    self._calls.start(id, method, *args, extra_s=own)

  # What becomes of the answer of each kind of call.

  def _after_make(self, number: int, result: Any) -> None:
    group = self._groups[number]
    if isinstance(result, EnvError):
      for live in group.lives:
        self._end(live, "failed", str(result))
      return
    group.builder, envs = result
    if hasattr(envs, "__await__"):
      self._calls.start(("envs", number), _awaited, envs)
      return
    self._after_envs(number, envs)

  def _after_envs(self, number: int, envs: Any) -> None:
    group = self._groups[number]
    failure = self._misfit(envs)
    if failure is not None:
      for live in group.lives:
        self._end(live, "failed", failure)
      return
    for live, env in zip(group.lives, envs):
      live.env = env
      group.envs.append(env)
      tools = getattr(env, "tool_schemas", ())
      live.conversation = Conversation(
        self._runner._tokenizer, tools, self._config.history
      )
      self._call(("first", live.number), env.initial_observation)

  def _misfit(self, envs: Any) -> str | None:
    """Describes what is wrong with the result of `make_envs`, or returns None."""
    if isinstance(envs, EnvError):
      return str(envs)
    if isinstance(envs, list | tuple) and len(envs) == self._size:
      return None
    have = f"{len(envs)}" if isinstance(envs, list | tuple) else type(envs).__name__
    return (
      f"make_envs gave {have}; expected a list of {self._size} environments, one for "
      "each completion of a prompt (algorithm.num_generations)"
    )

  def _after_first(self, number: int, result: Any) -> None:
    live = self._lives[number]
    if isinstance(result, EnvError):
      self._end(live, "failed", str(result))
    elif hasattr(result, "reward") and not hasattr(result, "next_observation"):
      # tinker-cookbook's InitialObservationOverflow: no prompt, and a reward.
      live.episode.group_reward = float(result.reward)
      self._end(live, "observation")
    else:
      pair = isinstance(result, tuple) and len(result) == 2
      self._observe(live, *(result if pair else (result, None)))

  def _after_step(self, number: int, result: Any) -> None:
    live = self._lives[number]
    try:
      if isinstance(result, EnvError):
        raise result
      step = env_lib.step_result(result)
    except EnvError as error:
      self._end(live, "failed", str(error))
      return
    turns = live.episode.turns
    turns[-1] = dataclasses.replace(
      turns[-1], reward=step.reward, metrics=step.metrics, logs=step.logs
    )
    if step.episode_done:
      self._end(live, "done")
    elif len(turns) == self._config.max_turns:
      self._end(live, "turns")
    else:
      self._observe(live, step.next_observation, step.next_stop_condition)

  def _observe(self, live: _Live, observation: Any, stop: Any) -> None:
    """Makes the prompt of the next action."""
    assert live.conversation is not None
    known = [*live.prompt, *([] if live.drawn is None else live.drawn.ids.tolist())]
    try:
      live.prompt = live.conversation.observe(observation)
      live.stops = env_lib.stops_of(stop)
    except EnvError as error:
      self._end(live, "failed", str(error))
      return
    is_first = not live.episode.turns
    if is_first or live.prompt[: len(known)] != known:
      live.row_prompt = len(live.prompt)
    most = self._config.max_observation_tokens
    added = len(live.prompt) - len(known)
    too_long = not is_first and most is not None and added > most
    if too_long or (is_first and len(live.prompt) > self._runner._max_prompt):
      self._end(live, "observation")
    elif self._runner.room(live) < 1:
      self._end(live, "tokens")
    else:
      self._ready.append(live)

  def _end(self, live: _Live, reason: str, failure: str | None = None) -> None:
    episode, group = live.episode, live.group
    episode.finish_reason, episode.failure = reason, failure
    episode.environment = live.env
    if live.conversation is not None:
      episode.messages = live.conversation.messages
    close = getattr(live.env, "close", None)
    if close is not None:
      self._calls.start(("close", live.number), close)
    live.env = None
    group.open -= 1
    if not group.open and group.builder is not None:
      reward = getattr(group.builder, "compute_group_rewards", None)
      if reward is None or len(group.envs) != self._size:
        self._calls.start(("cleanup", group.number), _cleanup, group.builder)
      else:
        self._calls.start(("group", group.number), reward, group.episodes, group.envs)

  def _after_group(self, number: int, result: Any) -> None:
    group = self._groups[number]
    episodes = group.episodes
    try:
      if isinstance(result, EnvError):
        raise result
      for episode, (reward, metrics) in zip(episodes, result, strict=True):
        episode.group_reward += float(reward)
        episode.metrics |= env_lib.numbers_of(metrics)
    except (EnvError, TypeError, ValueError) as error:
      for episode in episodes:
        episode.finish_reason = "failed"
        episode.failure = f"compute_group_rewards: {error}"
    self._calls.start(("cleanup", number), _cleanup, group.builder)

  def _after_close(self, number: int, result: Any) -> None:
    if isinstance(result, EnvError):
      self._lives[number].episode.metrics["close_failed"] = 1.0

  def _after_cleanup(self, number: int, result: Any) -> None:
    group = self._groups[number]
    if isinstance(result, EnvError):
      for episode in group.episodes:
        episode.metrics["cleanup_failed"] = 1.0
    group.builder, group.envs = None, []


def _made(make: MakeGroup) -> tuple[Any, Any]:
  builder = make()
  return builder, builder.make_envs()


def _cleanup(builder: Any) -> Any:
  cleanup = getattr(builder, "cleanup", None)
  return None if cleanup is None else cleanup()


async def _awaited(value: Any) -> Any:
  return await value
