"""A stream on hosts that only sample: the actions of a greedy run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.generate.external.http import Refused
from tunix.generate.tokens import Completion
from tunix.rl.rollout import host as host_lib, wire
from tunix.rl.rollout.client import ClientLost, Draw
from tunix.rl.rollout.remote_host import RemoteHost, together
from tunix.rl.weights.placement import Weights


class RemoteStream:
  """Draws on hosts while their weights change; see `Stream`.

  Host n draws prompts n, n + N, ... of each of the batches. A launch is one on each
  host that has an open action.

  Args:
    hosts: the N hosts. Another run, or another stream, ends this one on them.
    opening: arguments of `RolloutHost.stream`.
  """

  def __init__(self, hosts: Sequence[RemoteHost], opening: Mapping[str, Any]):
    self._hosts, self._opening = hosts, opening
    self._open = [0] * len(hosts)  # actions of each host
    self._new: list[list[Draw]] = [[] for _ in hosts]  # of which the host has none yet
    self._is_started = False
    self.launches = 0
    self.vocab_size: int | None = hosts[0].vocab_size

  @property
  def open(self) -> int:
    return sum(self._open)

  def submit(self, draws: Sequence[Draw]) -> None:
    for draw in draws:
      assert draw.group is not None
      number = draw.group[1] % len(self._hosts)
      self._new[number].append(draw)
      self._open[number] += 1

  def poll(self) -> list[Completion]:
    """Runs one launch.

    Raises:
      ClientLost: a host was started again, or another run has used it meanwhile.
      RemoteError: see `RemoteHost.run`.
    """
    self.launches += 1
    works = [
      functools.partial(self._hosts[n].run, None, functools.partial(self._polled, n))
      for n, count in enumerate(self._open)
      if count
    ]
    return [drawn for done in together(works) for drawn in done]

  def load(self, weights: Weights) -> None:
    version = weights.version
    body = {"stamp": version.stamp, "version": version.step}
    call = (
      ("switch", body) if self._is_started else ("stream", {**body, **self._opening})
    )

    def work(host):
      return functools.partial(_called, host, *call)

    together([functools.partial(x.run, weights, work(x)) for x in self._hosts])
    self._is_started = True

  def cancel(self) -> None:
    """Leaves the engines to the next stream or run, which ends them on the hosts."""
    self._open = [0] * len(self._hosts)

  def _polled(self, number: int) -> list[Completion]:
    sent = [wire.draw_to_json(draw) for draw in self._new[number]]
    arguments = {"draws": sent, "launch": self.launches}
    done = wire.actions_from_json(_called(self._hosts[number], "poll", arguments))
    self._new[number] = []
    self._open[number] -= len(done)
    return done


def _called(host: RemoteHost, method: str, arguments: Mapping[str, Any]) -> Any:
  """Calls a method of a host's stream.

  Raises:
    ClientLost: the host has no stream any more.
  """
  try:
    return host.call(method, **arguments)
  except Refused as error:
    if error.code != host_lib.NOT_BEGUN:
      raise
    raise ClientLost(f"the host {host.url} was lost") from error
