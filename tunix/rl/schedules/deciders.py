"""Deciders of a greedy engine: they choose what takes effect before a launch.

`Live` takes all that has arrived. `Replayed` takes what the journal of a run says.
"""

from __future__ import annotations

import time
from typing import Any

from tunix.rl.rollout.client import ClientLost, Draw, Group
from tunix.rl.schedules.decisions import (
  Decision,
  GroupDraws,
  GroupEnd,
  Inbox,
  Start,
  Switch,
)
from tunix.rl.schedules.journal import Journal, digest_of


class ReplayError(RuntimeError):
  """A run cannot be repeated: something answered otherwise than in the run."""


def named(group: Group, episode: int | None = None) -> str:
  """Returns the name of a group, or of one of its completions, for a message."""
  name = f"prompt {group[1]} of batch {group[0]}"
  return name if episode is None else f"completion {episode} of {name}"


def digest_of_draw(draw: Draw) -> str:
  """Returns a digest of an action before it is drawn: of what a model reads."""
  stops = [list(draw.stops), list(draw.stop_ids)]
  images = [digest.hex() for digest in draw.digests]
  read = [draw.prompt.tolist(), draw.max_tokens, stops]
  return digest_of([*read, images] if images else read)


class Live:
  """Takes all that has arrived, and notes it in the journal.

  Args:
    journal: None: the run has no folder, and cannot be resumed or replayed.
  """

  def __init__(self, journal: Journal | None):
    self._journal = journal

  def take(
    self, inbox: Inbox, launches: int, version: int | None
  ) -> tuple[list[Decision], bool]:
    if version is None and not inbox.weights:
      return [], False
    decisions: list[Decision] = []
    if inbox.weights:
      newest = inbox.weights[max(inbox.weights)]
      inbox.weights.clear()
      if version is None:
        self._add("start", newest.version.step, newest.version.stamp)
        return [Start(newest)], False  # it drops what was asked of a stream before it
      if newest.version.step != version:
        decisions.append(Switch(newest))
        self._add("switch", launches, newest.version.step)
    # Requests of older prompts start first.
    for request in sorted(inbox.draws, key=lambda request: request.client.group):
      if not request.client.is_abandoned:
        rows = [[x.episode, x.turn, digest_of_draw(x)] for x in request.draws]
        self._add("draw", launches, *request.client.group, rows)
        decisions.append(request)
    for end in inbox.ends:
      if self._journal is not None and not end.client.is_abandoned:
        group = end.client.group
        digest = digest_of(replayable(end.content))
        self._journal.end(launches, group, digest, end.offset)
      decisions.append(end)
    inbox.draws.clear()
    inbox.ends.clear()
    return decisions, True

  def _add(self, *record: object) -> None:
    if self._journal is not None:
      self._journal.add(*record)

  def lost(self, error: ClientLost) -> None:
    """A live run starts another stream."""

  def check(self, is_needed: bool) -> None:
    """Live decisions wait for nothing in particular."""


class Replayed:
  """Takes what a journal says, in its order and before the same launches.

  Args:
    journal: the journal of the run that is repeated.
    timeout_s: seconds that one decision may take to become possible, while the learner
      waits for it.
  """

  def __init__(self, journal: Journal, timeout_s: float):
    self._journal, self._timeout_s = journal, timeout_s
    self._records = journal.decisions[1:]
    self._at = 0
    self._since: float | None = None
    self._draws: dict[tuple[Group, int, int], tuple[GroupDraws, Draw]] = {}

  def take(
    self, inbox: Inbox, launches: int, version: int | None
  ) -> tuple[list[Decision], bool]:
    for request in inbox.draws:
      for draw in () if request.client.is_abandoned else request.draws:
        key = request.client.group, draw.episode, draw.turn
        self._draws[key] = request, draw
    inbox.draws.clear()
    if self._at == len(self._records):
      return [], True  # groups that had not ended are drawn for nobody
    record = self._records[self._at]
    if record[0] != "start" and record[1] > launches:
      return [], True
    if record[0] == "start":
      decision = self._start(record, inbox)
    elif record[0] == "switch":
      decision = self._switch(record, inbox)
    elif record[0] == "draw":
      decision = self._draw(record, inbox)
    else:
      decision = self._end(record, inbox)
    if decision is None:
      self._since = time.monotonic() if self._since is None else self._since
      return [], False
    self._at, self._since = self._at + 1, None
    return [decision], False

  def _start(self, record: Any, inbox: Inbox) -> Decision | None:
    weights = inbox.weights.get(record[1])
    if weights is None:
      return None
    self._draws.clear()
    return Start(weights)

  def _switch(self, record: Any, inbox: Inbox) -> Decision | None:
    weights = inbox.weights.get(record[2])
    if weights is None:
      return None
    # A later start may have the same weights; older ones are not used again.
    for step in [step for step in inbox.weights if step < record[2]]:
      del inbox.weights[step]
    return Switch(weights)

  def _draw(self, record: Any, inbox: Inbox) -> Decision | None:
    _, _, batch, prompt, rows = record
    group, draws, client = (batch, prompt), [], None
    for episode, turn, digest in rows:
      pair = self._draws.get((group, episode, turn))
      if pair is None:
        self._check_not_ended(group, episode, turn, inbox)
        return None
      request, draw = pair
      if digest_of_draw(draw) != digest:
        raise ReplayError(
          f"the environment of {named(group, episode)} answered otherwise than in the "
          f"run: action {turn} has another prompt, or other limits. If the environment "
          "draws random numbers or reads a clock, give it a seed"
        )
      client = request.client
      draws.append(draw)
    for episode, turn, _ in rows:
      del self._draws[group, episode, turn]
    assert client is not None
    return GroupDraws(client, tuple(draws))

  def _check_not_ended(
    self, group: Group, episode: int, turn: int, inbox: Inbox
  ) -> None:
    mine = [x for x in inbox.ends if x.client.group == group]
    if any(not end.client.is_abandoned for end in mine):
      raise ReplayError(
        f"the environment of {named(group, episode)} ended the episode before action "
        f"{turn}, which the run has"
      )

  def _end(self, record: Any, inbox: Inbox) -> Decision | None:
    _, _, batch, prompt, digest, _ = record
    for i, end in enumerate(inbox.ends):
      if end.client.group == (batch, prompt) and not end.client.is_abandoned:
        if digest_of(replayable(end.content)) != digest:
          raise ReplayError(difference(self._journal, end))
        return inbox.ends.pop(i)
    return None

  def lost(self, error: ClientLost) -> None:
    """Ends the replay.

    Raises:
      ReplayError: always.
    """
    raise ReplayError(
      f"{error}, and a replay must take each decision before the same launch: start it "
      "again from the beginning"
    ) from error

  def check(self, is_needed: bool) -> None:
    """Ends a wait for something that does not come; see `Decider.check`.

    Raises:
      ReplayError: the next decision of the run has not become possible in time.
    """
    if not is_needed:
      self._since = None
    if self._since is None or time.monotonic() - self._since < self._timeout_s:
      return
    record = self._records[self._at]
    if record[0] in ("start", "switch"):
      missing = f"weights {record[1 if record[0] == 'start' else 2]}"
    elif record[0] == "end":
      missing = f"the rewards of {named((record[2], record[3]))}"
    else:
      episode, turn, _ = record[4][0]
      where = named((record[2], record[3]), episode)
      missing = f"action {turn} of {where}, whose environment has not asked for it"
    raise ReplayError(
      f"the run goes on with {missing}, and this has not come within "
      f"{self._timeout_s:g} s (rollout_timeout_s): an environment answered otherwise, "
      "or hangs"
    )


def replayable(content: object) -> Any:
  """Returns the stored content of a group without the logs of environments."""
  if isinstance(content, dict):
    return {k: replayable(x) for k, x in content.items() if k != "logs"}
  return [replayable(x) for x in content] if isinstance(content, list) else content


def difference(journal: Journal, end: GroupEnd) -> str:
  """Returns the message for a group that ended otherwise than in its run."""
  group = end.client.group
  before = replayable(journal.content(group))
  now = replayable(end.content)
  for name in ("completion_ids", "rollout_logps"):
    if before[name] != now[name]:
      return (
        f"the engine drew other tokens for {named(group)} ({name} differ): replay with "
        "the same model, software and devices"
      )
  for i, pair in enumerate(zip(before["episodes"], now["episodes"])):
    if pair[0] != pair[1]:
      keys = [k for k in pair[0] if pair[0][k] != pair[1].get(k)]
      return (
        f"the environment of {named(group, i)} answered otherwise than in the run "
        f"({', '.join(keys)} differ). If it draws random numbers or reads a clock, "
        "give it a seed"
      )
  keys = [k for k in before if before[k] != now.get(k)]
  return (
    f"a reward function answered otherwise than in the run for {named(group)} "
    f"({', '.join(keys)} differ)"
  )
