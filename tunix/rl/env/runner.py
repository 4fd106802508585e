"""Runs the episodes of a batch: many environments over one client.

    make_envs -> initial_observation -> draw -> step -> draw -> ... -> group rewards

Calls of environments run in threads (calls.py). The client draws actions in the
caller's thread (rollout/client.py). Each episode is in one of three places: an
environment works on it, it waits for an action, or it has ended. The loop below moves
episodes on, and every wait in it has a bound.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from tunix.data import image_parts
from tunix.data.images import ImageReader
from tunix.generate.sizes import text_size
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion
from tunix.rl.env import env as env_lib
from tunix.rl.env.calls import Calls, Id
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.conversation import Conversation
from tunix.rl.env.env import EnvError
from tunix.rl.env.episode import Episode, Turn
from tunix.rl.env.group_calls import awaited, cleaned_up, close_made, made
from tunix.rl.env.live import Group, Live, MakeGroup
from tunix.rl.rollout.client import Draw, SamplingClient
from tunix.sandbox.child import START_TIMEOUT_S
from tunix.sandbox.errors import describe, message_of

_GRACE_S = 5.0  # seconds after the deadline in which a process is killed
_CLOSE_S = 10.0  # seconds in which environments of a failed batch are closed
_WAIT_S = 0.2  # seconds of one wait for environments, while nothing is drawn
_MOST_FAILURE = 1000  # characters of a failure that are kept


class Runner:
  """Runs batches of episodes.

  Args:
    tokenizer: tokenizer of the policy.
    config: limits.
    max_prompt_length: most tokens of the first prompt of an episode.
    max_action_tokens: most tokens of an action.
    reader: reads the images of observations, see `EpisodeConfig.max_image_tokens`.
    forbidden: token ids that are never drawn.

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
    reader: ImageReader | None = None,
    forbidden: tuple[int, ...] = (),
  ):
    self._tokenizer, self._config = tokenizer, config
    self._reader, self._forbidden = reader, forbidden
    self._max_prompt, self._max_action = max_prompt_length, max_action_tokens
    self.waited_s = 0.0

  def run(
    self, makers: Sequence[MakeGroup], group_size: int, client: SamplingClient
  ) -> list[Episode]:
    """Runs one group of episodes for each maker.

    Args:
      makers: functions that return an `EnvGroup`.
      group_size: episodes of a group.
      client: draws the actions.

    Returns: the episodes, group by group. An episode whose environment failed has a
      `failure`.
    """
    calls = Calls(self._config.workers, self._config.timeout_s)
    return _Batch(self, makers, group_size, client, calls).run()

  def room(self, live: Live) -> int:
    """Returns the number of tokens that the next action may have."""
    after = len(live.prompt.ids) - min(live.row_prompt, self._max_prompt)
    return min(self._max_action, self._config.max_tokens - after)


class _Batch:
  """One call of `Runner.run`."""

  def __init__(
    self,
    runner: Runner,
    makers: Sequence[MakeGroup],
    group_size: int,
    client: SamplingClient,
    calls: Calls,
  ):
    self._runner, self._config = runner, runner._config
    self._size, self._client, self._calls = group_size, client, calls
    self._groups = [Group(number, make) for number, make in enumerate(makers)]
    self._lives: list[Live] = []
    for group in self._groups:
      group.lives = [
        Live(group.number * group_size + i, group, Episode()) for i in range(group_size)
      ]
      self._lives += group.lives
    self._ready: list[Live] = []
    self._after = {
      "make": self._after_make,
      "envs": self._after_envs,
      "first": self._after_first,
      "step": self._after_step,
      "final": self._after_final,
      "group": self._after_group,
      "cleanup": self._done,
      "close": self._done,
    }

  def run(self) -> list[Episode]:
    self._runner.waited_s = 0.0
    for group in self._groups:
      group.open = self._size
      # This call makes all environments of the group, and starts their processes.
      each = START_TIMEOUT_S if self._config.isolation == "process" else 0.0
      extra = (self._size - 1) * self._config.timeout_s + self._size * each
      id = ("make", group.number)
      self._calls.start(id, made, group.make, extra_s=extra, discard=close_made)
    try:
      self._run()
    except BaseException:  # the client failed with its engine, or was interrupted
      self._close_all()
      raise
    return [live.episode for live in self._lives]

  def _run(self) -> None:
    while self._calls.open or self._client.open or self._ready:
      self._draw()
      for drawn in self._client.poll() if self._client.open else ():
        self._guarded("act", drawn.number, self._act, drawn)
      waits = not self._client.open  # then `_draw` holds ready ones back for open calls
      if waits and not self._ready and self._calls.all_wait:
        self._calls.fail_waiting(
          "it waits for another episode of its group, and none of them can go on"
        )
      start = time.monotonic()
      answers = self._calls.take(_WAIT_S if waits else 0.0)
      if waits:
        self._runner.waited_s += time.monotonic() - start
      for (kind, number), result in answers:
        self._guarded(kind, number, self._after[kind], result)

  def _close_all(self) -> None:
    """Closes the environments of a batch that is not completed, in bounded time."""
    self._calls.give_up(except_for=("close", "cleanup"))
    for group in self._groups:
      self._finish(group)
    until = time.monotonic() + min(self._config.timeout_s, _CLOSE_S)
    while self._calls.open and time.monotonic() < until:
      for (kind, number), result in self._calls.take(_WAIT_S):
        if kind in ("make", "envs") and not isinstance(result, EnvError):
          late = result if kind == "make" else (None, result)
          self._calls.start(("close", number), close_made, late)

  def _guarded(
    self, kind: str, number: int, handle: Callable[[int, Any], None], result: object
  ) -> None:
    """Handles an answer; a wrong answer ends its episode or all of its group."""
    try:
      if isinstance(result, EnvError):
        raise result
      handle(number, result)
    # Answers hold objects of the user, and every use of them may raise.
    except (Exception, SystemExit) as error:
      is_ours = isinstance(error, EnvError)
      failure = message_of(error) if is_ours else describe(error)
      self._fail(kind, number, failure[:_MOST_FAILURE])

  def _fail(self, kind: str, number: int, failure: str) -> None:
    if kind in ("close", "cleanup"):
      return  # the episodes are complete
    is_one = kind in ("act", "first", "step", "final")
    lives = [self._lives[number]] if is_one else self._groups[number].lives
    for live in lives:
      if kind == "group":
        live.episode.finish_reason = "failed"
        live.episode.failure = f"compute_group_rewards: {failure}"
      elif not live.is_over:
        self._end(live, "failed", failure)
    if kind == "group":
      self._finish(self._groups[number])

  def _draw(self) -> None:
    """Submits the episodes that wait for an action; in order "turns" all at once."""
    is_early = self._config.order == "turns" and (
      self._calls.working or self._client.open
    )
    if not self._ready or is_early:
      return
    ready, self._ready = sorted(self._ready, key=lambda live: live.number), []
    self._client.submit([self._draw_of(live) for live in ready])

  def _draw_of(self, live: Live) -> Draw:
    texts, ids = live.stops
    assert live.conversation is not None
    return Draw(
      episode=live.number,
      turn=len(live.episode.turns),
      prompt=live.prompt.ids,
      max_tokens=self._runner.room(live),
      stops=texts,
      stop_ids=ids,
      images=live.conversation.images,
      forbidden=self._runner._forbidden,
    )

  def _act(self, number: int, drawn: Completion) -> None:
    """Hands an action to the environment."""
    live = self._lives[number]
    assert live.conversation is not None
    live.drawn = drawn
    action = live.conversation.act(drawn.ids, drawn.finish_reason)
    tokens = dataclasses.replace(drawn, prompt=live.prompt.ids)
    images = live.conversation.images
    live.episode.turns.append(Turn(tokens=tokens, action=action, images=images))
    # A copy: an environment may change what it gets, and the turn is trained.
    self._call(("step", live.number), env_lib.take, live.env, action.copied())

  def _is_out_of_time(self, live: Live) -> bool:
    most = self._config.max_seconds
    return most is not None and time.monotonic() - live.started >= most

  def _call(self, id: Id, method: Callable[..., Any], *args: object) -> None:
    """Calls an environment. Its process, if it has one, has the same deadline."""
    own = _GRACE_S if self._config.isolation == "process" else 0.0
    self._calls.start(id, method, *args, extra_s=own)

  # Handlers of the answers, one for each kind of call.

  def _after_make(self, number: int, result: Any) -> None:
    group = self._groups[number]
    group.builder, envs = result
    if hasattr(envs, "__await__"):
      self._calls.start(("envs", number), awaited, envs)
    else:
      self._after_envs(number, envs)

  def _after_envs(self, number: int, envs: Any) -> None:
    group = self._groups[number]
    self._check_count(envs)
    for live, env in zip(group.lives, envs):
      live.env = env
      group.envs.append(env)
      self._guarded("first", live.number, self._begin, env)

  def _begin(self, number: int, env: Any) -> None:
    self._lives[number].started = time.monotonic()
    self._call(("first", number), env.initial_observation)

  def _check_count(self, envs: object) -> None:
    """Raises EnvError unless `make_envs` gave an environment for each completion."""
    if isinstance(envs, list | tuple) and len(envs) == self._size:
      return
    have = f"{len(envs)}" if isinstance(envs, list | tuple) else type(envs).__name__
    raise EnvError(
      f"make_envs gave {have}; expected a list of {self._size} environments, one for "
      "each completion of a prompt (algorithm.num_generations, and in evaluations "
      "algorithm.eval_num_generations)"
    )

  def _after_first(self, number: int, result: Any) -> None:
    live = self._lives[number]
    tools = getattr(live.env, "tool_schemas", None) or ()
    runner, config = self._runner, self._config
    live.conversation = Conversation(
      *(runner._tokenizer, tools, config.history),
      *(runner._reader, config.max_image_tokens),
    )
    if hasattr(result, "reward") and not hasattr(result, "next_observation"):
      # tinker-cookbook's InitialObservationOverflow: no prompt, and a reward.
      live.episode.group_reward = env_lib.finite(result.reward)
      self._end(live, "observation")
    else:
      pair = isinstance(result, tuple) and len(result) == 2
      self._observe(live, *(result if pair else (result, None)))

  def _after_step(self, number: int, result: object) -> None:
    live, step = self._lives[number], env_lib.step_result(result)
    turns = live.episode.turns
    turns[-1] = dataclasses.replace(
      turns[-1],
      reward=step.reward,
      metrics=step.metrics,
      logs=step.logs,
      episode_done=step.episode_done,
    )
    if step.episode_done:
      self._end(live, "done")
    elif len(turns) == self._config.max_turns:
      self._stop(live, "turns")
    elif self._is_out_of_time(live):
      self._stop(live, "seconds")
    else:
      self._observe(live, step.next_observation, step.next_stop_condition)

  def _stop(self, live: Live, reason: str) -> None:
    """Ends an episode by a limit; the environment may still give a reward."""
    final = getattr(live.env, "final_reward", None)
    if final is None or not live.episode.turns:
      self._end(live, reason)
    else:
      live.stopped_by = reason
      self._call(("final", live.number), final)

  def _after_final(self, number: int, result: object) -> None:
    live = self._lives[number]
    turns, reward = live.episode.turns, env_lib.finite(result)
    turns[-1] = dataclasses.replace(turns[-1], reward=turns[-1].reward + reward)
    self._end(live, live.stopped_by)

  def _observe(self, live: Live, observation: object, stop: Any) -> None:
    """Makes the prompt of the next action."""
    assert live.conversation is not None
    is_first, most = not live.episode.turns, self._config.max_observation_tokens
    limit = self._config.max_tokens if most is None else most
    if is_first:
      limit = self._runner._max_prompt
    if not text_size.may_fit(image_parts.outline(observation), limit):
      self._stop(live, "observation")  # too long to be worth tokenizing
      return
    prompt = live.conversation.observe(observation)
    live.stops = env_lib.stops_of(stop)
    env_lib.check_ids([*prompt, *live.stops[1]], self._client.vocab_size)
    drawn = () if live.drawn is None else live.drawn.ids
    if not live.prompt.follow(drawn, prompt):
      live.row_prompt = len(prompt)
    too_long = live.conversation.image_tokens > self._config.max_image_tokens
    too_long |= (
      len(prompt) > limit
      if is_first
      else (most is not None and live.conversation.observed > most)
    )
    if too_long:
      self._stop(live, "observation")
    elif self._runner.room(live) < 1:
      self._stop(live, "tokens")
    else:
      self._ready.append(live)

  def _end(self, live: Live, reason: str, failure: str | None = None) -> None:
    episode, group = live.episode, live.group
    live.is_over = True
    episode.finish_reason, episode.failure = reason, failure
    episode.environment = live.env
    if live.conversation is not None:
      episode.messages = live.conversation.messages
    group.open -= 1
    if group.open:
      return
    reward = getattr(group.builder, "compute_group_rewards", None)
    if reward is None or len(group.envs) != self._size:
      self._finish(group)
    else:
      self._calls.start(("group", group.number), reward, group.episodes, group.envs)

  def _after_group(self, number: int, result: Any) -> None:
    group = self._groups[number]
    pairs = list(zip(group.episodes, result, strict=True))
    rewards = [env_lib.finite(reward) for _, (reward, _) in pairs]
    for reward, (episode, (_, metrics)) in zip(rewards, pairs):
      episode.group_reward += reward
      episode.metrics |= env_lib.numbers_of(metrics)
    self._finish(group)

  def _finish(self, group: Group) -> None:
    """Closes the environments of a group, whose rewards are complete."""
    for live in group.lives:
      close = getattr(live.env, "close", None)
      if close is not None:
        self._calls.start(("close", live.number), close)
      live.env = None
    if group.builder is not None:
      self._calls.start(("cleanup", group.number), cleaned_up, group.builder)
    group.builder, group.envs = None, []

  def _done(self, number: int, result: object) -> None:
    """Handles the end of a `close` or `cleanup`, which has no result."""
    del number, result
