"""The thread of a greedy run: between two launches it takes what has arrived.

Threads of groups ask for actions and hand in ended groups, the learner offers weights.
All of this goes into one inbox, which only the engine's thread empties. A decider (see
deciders.py) chooses what of it takes effect before the next launch. What follows from
these decisions and from the seed is a function of them: a stream computes the same
bytes for the same sequence of actions, weights and launches.

An engine on another host may be lost. A new one then starts, and what has not ended
begins again, as after a kill of the run.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable

from jax.sharding import Mesh

from tunix.rl.rollout.client import ClientLost, Stream
from tunix.rl.schedules.decisions import (
  Decider,
  Decision,
  GroupClient,
  GroupDraws,
  GroupEnd,
  Inbox,
  Start,
  Switch,
)
from tunix.rl.weights.placement import Weights
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)

_MOST_LOSSES = 10  # of streams, without a prompt that ends between them
_LOOK_S = 0.2  # between two looks of the thread at what has changed


# This thread is not a `Driver`. A `Driver` runs each call when it arrives, and may step
# while callers write. Here a decider takes the whole inbox under one lock together with
# the number of launches, because a replay must repeat exactly this pair. A stream may
# also be on other hosts, where no `Engine` can be stepped, and a lost one is replaced.
# The threads would share `start` and `stop` only, and even these end differently.
class EngineLoop:
  """Polls a stream in a thread of its own.

  Args:
    make_stream: makes a stream; called in the thread.
    decider: see the module.
    changed: notified after each decision; guards the inbox and what `on_end` writes.
    on_end: called with each ended group, in the thread, while `changed` is held.
    on_start: called after a second or later `Start`, in the thread.
    is_needed: returns True while the learner waits for completions.
    vocab_size: number of ids of the model; None: unknown.
    mesh: mesh of the thread; None: that of the caller of `start`.

  Attributes:
    changed: as given.
    failure: the exception that ended the thread.
    moved: time of the last decision.
    vocab_size: as given.
  """

  def __init__(
    self,
    make_stream: Callable[[], Stream],
    decider: Decider,
    changed: threading.Condition,
    *,
    on_end: Callable[[GroupEnd], None],
    on_start: Callable[[], None],
    is_needed: Callable[[], bool],
    vocab_size: int | None,
    mesh: Mesh | None = None,
  ):
    self._mesh = mesh
    self._make_stream, self._decider = make_stream, decider
    self._on_end, self._on_start, self.vocab_size = on_end, on_start, vocab_size
    self.changed, self._is_needed = changed, is_needed
    self.failure: BaseException | None = None
    self.moved = time.monotonic()
    self._inbox = Inbox()
    self._stream: Stream | None = None
    self._weights: Weights | None = None  # those of the stream; None: it has to start
    self._losses, self._idle_s = 0, 0.0
    self._numbers = itertools.count()
    # The client and the episode of each open action.
    self._drawing: dict[int, tuple[GroupClient, int]] = {}
    self._parked, self._is_working, self._stops = 0, False, False
    self._thread: threading.Thread | None = None

  # Other threads.

  @property
  def is_running(self) -> bool:
    """True until the thread has ended or is told to end."""
    return not self._stops and self.failure is None

  def start(self) -> None:
    """Starts the thread."""
    mesh = mesh_lib.current_mesh() if self._mesh is None else self._mesh
    self._thread = threading.Thread(
      target=self._run,
      args=(mesh,),
      name="tunix-greedy",
      daemon=True,
    )
    self._thread.start()

  def put(self, item: GroupDraws | GroupEnd) -> None:
    """Takes what a group asks for, or its end."""
    with self.changed:
      if isinstance(item, GroupDraws):
        self._inbox.draws.append(item)
      else:
        self._inbox.ends.append(item)
      self.changed.notify_all()

  def offer(self, weights: Weights) -> None:
    """Takes the newest weights."""
    with self.changed:
      self._inbox.weights[weights.version.step] = weights
      self.changed.notify_all()

  def fail(self, error: BaseException) -> None:
    """Ends the thread with the error of a group, if it has none yet."""
    with self.changed:
      self.failure = self.failure or error
      self.changed.notify_all()

  def park(self, timeout_s: float) -> None:
    """Waits for the end of the present launch; none follows before `go_on`.

    Raises:
      TimeoutError: the launch has not ended in time.
    """
    with self.changed:
      self._parked += 1
      if not self.changed.wait_for(lambda: not self._is_working, timeout_s):
        self._parked -= 1
        raise TimeoutError(
          f"a launch of the engine has not ended within {timeout_s:g} s "
          "(rollout_timeout_s), and an evaluation waits for it: raise it"
        )

  def go_on(self) -> None:
    """Lets launches follow again after `park`."""
    with self.changed:
      self._parked -= 1
      self.moved = time.monotonic()
      self.changed.notify_all()

  def take_idle(self) -> float:
    """Returns the seconds since the last call in which nothing could be drawn."""
    with self.changed:
      idle, self._idle_s = self._idle_s, 0.0
    return idle

  def stop(self, timeout_s: float) -> bool:
    """Ends the thread after its launch; returns False if it has not ended in time."""
    with self.changed:
      self._stops = True
      self.changed.notify_all()
    if self._thread is None:
      return True
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  # The engine's thread.

  def _run(self, mesh: Mesh | None) -> None:
    try:
      with mesh_lib.use_mesh(mesh):
        while self._once():
          pass
    except BaseException as error:  # raised in the learner's thread
      self.fail(error)
    finally:
      self._is_working = False
      if self._stream is not None:
        self._stream.cancel()
      with self.changed:
        self.changed.notify_all()

  def _once(self) -> bool:
    with self.changed:
      if not self.is_running:
        return False
      if self._parked:
        self.changed.wait(_LOOK_S)
        return True
      launches = 0 if self._stream is None else self._stream.launches
      version = None if self._weights is None else self._weights.version.step
      decisions, may_step = self._decider.take(self._inbox, launches, version)
      if not decisions and not (may_step and self._is_busy):
        start = time.monotonic()
        self._decider.check(self._is_needed())
        self.changed.wait(_LOOK_S)
        self._idle_s += time.monotonic() - start
        return True
      self._is_working = True
    for decision in decisions:
      self._unless_lost(lambda decision=decision: self._apply(decision))
    if may_step and self._is_busy:
      self._unless_lost(self._launch)
    with self.changed:
      self._is_working = False
      self.moved = time.monotonic()
      self.changed.notify_all()
    return True

  @property
  def _is_busy(self) -> bool:
    return (
      self._weights is not None and self._stream is not None and self._stream.open > 0
    )

  def _unless_lost(self, work: Callable[[], None]) -> None:
    """Runs work of the stream; if it is lost, the next decision starts another one."""
    try:
      work()
    except ClientLost as error:
      self._losses += 1
      self._decider.lost(error)
      if self._losses == _MOST_LOSSES or self._weights is None:
        raise
      _log.warning("%s; what has not ended is sampled again", error)
      with self.changed:
        weights = self._weights
        self._inbox.weights.setdefault(weights.version.step, weights)
      self._weights = None

  def _apply(self, decision: Decision) -> None:
    if isinstance(decision, Start):
      self._begin(decision.weights)
    elif isinstance(decision, Switch):
      self._load(decision.weights)
    elif isinstance(decision, GroupEnd):
      if not decision.client.is_abandoned:
        self._losses = 0
        with self.changed:
          self._on_end(decision)
    elif not decision.client.is_abandoned:
      self._draw(decision)

  def _begin(self, weights: Weights) -> None:
    is_first = self._stream is None
    if self._stream is not None:
      self._stream.cancel()
    self._stream = self._make_stream()
    self._drawing.clear()
    self._load(weights)
    if not is_first:
      with self.changed:
        self._inbox.draws.clear()
        self._inbox.ends.clear()
        self._on_start()

  def _load(self, weights: Weights) -> None:
    assert self._stream is not None
    self._weights = weights
    self._stream.load(weights)

  def _draw(self, request: GroupDraws) -> None:
    assert self._stream is not None
    numbers = [next(self._numbers) for _ in request.draws]
    for number, draw in zip(numbers, request.draws):
      self._drawing[number] = request.client, draw.episode
    self._stream.submit(list(map(request.client.in_stream, request.draws, numbers)))

  def _launch(self) -> None:
    assert self._stream is not None
    for drawn in self._stream.poll():
      client, episode = self._drawing.pop(drawn.number)
      client.answer(dataclasses.replace(drawn, number=episode))
