"""A host that samples for a run: the run calls it, and sends new weights to it."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tunix.generate.external.http import Client, Refused
from tunix.generate.external.rows import EngineError
from tunix.rl.rollout import host as host_lib
from tunix.rl.weights.placement import Weights
from tunix.utils import checks, terminal

_log = logging.getLogger(__name__)
T = TypeVar("T")

# A host holds a request for at most 10 s, and longer calls are asked for again. So a
# host that is gone is noticed within this time, however long it draws.
_TIMEOUT_S = 60.0
# A server takes bodies of 16 MiB by default, each within 30 s.
_PART_BYTES = 8 << 20
# A host that fails in the same work again and again, and is started again each time,
# would otherwise keep the run forever.
_MOST_LOSSES = 10
_LOOK_S = 1.0  # between two attempts to reach a host


class RemoteError(RuntimeError):
  """A call failed on a host, or another run has taken the host."""


class RemoteHost:
  """One host of a run. One thread at a time uses it.

  Args:
    url: its address, such as "http://10.0.0.2:8700".
    key: its API key; None: it has none.
    timeout_s: longest time of one call.
    lost_s: time in which a host that gives no answer may come back.
    form: `host.form_of` the run's policy, which the host must have too.

  Raises:
    TypeError, ValueError: the address is malformed, or a time is no positive number.

  Attributes:
    is_open: True while the host works on a batch of episodes of this run.
    vocab_size: number of ids of its model; None: unknown.
  """

  def __init__(
    self,
    url: str,
    key: str | None,
    timeout_s: float,
    lost_s: float,
    form: Mapping[str, str],
  ):
    checks.number("timeout_s", timeout_s, checks.POSITIVE)
    checks.number("lost_s", lost_s, checks.POSITIVE)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    self._client = Client(url, _TIMEOUT_S, headers)
    self._timeout_s, self._lost_s, self._form = timeout_s, lost_s, dict(form)
    # Work of a run that was interrupted may still wait for the host.
    self._one_at_a_time = threading.Lock()
    self._owner = uuid.uuid4().hex
    self._life: str | None = None  # of the host, in which this run has taken it
    self._stamp = ""
    self.is_open, self.vocab_size = False, None

  @property
  def url(self) -> str:
    """Address of the host."""
    return self._client.url

  def run(self, weights: Weights | None, work: Callable[[], T]) -> T:
    """Runs work that calls the host, which draws with some weights then.

    If the host is lost, the work runs again when it is back. What it draws depends on
    nothing else, so the result is the same. Work of a stream raises ClientLost instead.

    Args:
      weights: sent first if the host has others; None: the host keeps its own.
      work: function that makes calls.

    Raises:
      RemoteError: a call failed, another run has taken the host, the host did not come
        back in time, or it was lost ten times in this work.
    """
    with self._one_at_a_time:
      return self._run(weights, work)

  def _run(self, weights: Weights | None, work: Callable[[], T]) -> T:
    lost_at, losses = None, 0
    while True:
      try:
        self._prepare(weights)
        lost_at = None
        return work()
      except Refused as error:
        # Its process has begun anew between two calls, and `_prepare` will see it.
        if error.code not in host_lib.CODES:
          raise RemoteError(str(error)) from error
        problem: Exception = error
      except EngineError as error:
        problem = error
      self._stamp, self.is_open, now = "", False, time.monotonic()
      if lost_at is None:
        lost_at, losses = now, losses + 1
        text = terminal.one_line(str(problem))
        _log.warning("waiting for a host that samples: %s", text)
      if now - lost_at > self._lost_s:
        raise RemoteError(
          f"{self.url} did not come back within {self._lost_s:g} s (lost_s): {problem}"
        ) from problem
      if losses == _MOST_LOSSES:
        raise RemoteError(
          f"{self.url} was lost {losses} times in the same work; its log has the "
          f"reason. The last one: {problem}"
        ) from problem
      time.sleep(_LOOK_S)

  def call(self, method: str, **arguments: object) -> Any:
    """Calls a method of `RolloutHost`, and waits for its end.

    Raises:
      EngineError: the host gives no answer.
      Refused: the call does not fit the state of the host.
      RemoteError: the call failed, or took longer than `timeout_s`.
    """
    body = {"method": method, "arguments": {"owner": self._owner, **arguments}}
    return self._result(method, self._client.ask("POST", "/rollouts/call", body))

  def _result(self, method: str, answer: dict[str, Any]) -> Any:
    """Waits for the end of a call whose first answer is given; see `call`."""
    end = time.monotonic() + self._timeout_s
    while not answer["is_done"]:
      if time.monotonic() > end:
        raise RemoteError(
          f"{method} at {self.url} has no result after {self._timeout_s:g} s "
          "(timeout_s): draw fewer or shorter completions at once, or raise timeout_s"
        )
      answer = self._client.ask("POST", "/rollouts/answer", {"call": answer["call"]})
    if "error" in answer:
      raise RemoteError(f"{method} failed at {self.url}: {answer['error']}")
    return answer["value"]

  def _prepare(self, weights: Weights | None) -> None:
    """Takes the host, and sends weights if it has others."""
    stamp = self._stamp if weights is None else weights.version.stamp
    if self._life is not None and stamp and self._stamp == stamp:
      return
    try:
      state = self.call("take", life=self._life)
    except Refused as error:
      if error.code != host_lib.OTHER_OWNER:
        raise
      raise RemoteError(f"{error}. Start a host for each run") from error
    self._check_form(state["form"])
    self._life, self.vocab_size = state["life"], state["vocab_size"]
    if weights is not None and state["stamp"] != stamp:
      self._send(weights)
    self._stamp = state["stamp"] if weights is None else stamp

  def _check_form(self, form: Mapping[str, str]) -> None:
    """Compares what the weights do not show, such as the scale of adapters."""
    for name in sorted(self._form.keys() | form.keys()):
      mine, its = self._form.get(name), form.get(name)
      if mine != its:
        raise RemoteError(
          f"the run's {name} is {mine}, and that of the host {self.url} is {its}: "
          "start the host with the configuration of the run"
        )

  def _send(self, weights: Weights) -> None:
    """Sends weights, one part of a parameter at a time."""
    arrays = weights.arrays
    forms = {path: (str(x.dtype), list(x.shape)) for path, x in arrays.items()}
    self.call("begin", arrays=forms)
    for path, x in arrays.items():
      # bfloat16 has no buffer of its own.
      plain: Any = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
      data = memoryview(plain)
      for start in range(0, len(data), _PART_BYTES):
        query = {"owner": self._owner, "path": path, "start": start}
        place = f"/rollouts/part?{urllib.parse.urlencode(query)}"
        part = data[start : start + _PART_BYTES]
        self._result("part", self._client.send(place, part))
    self.call("end", stamp=weights.version.stamp)


def together(works: Sequence[Callable[[], T]]) -> list[T]:
  """Runs works at the same time; returns or raises when all have ended."""
  begun = [_begun(work) for work in works]
  concurrent.futures.wait(begun)
  return [future.result() for future in begun]


def _begun(work: Callable[[], T]) -> concurrent.futures.Future[T]:
  """Runs work in a thread, which does not keep a process that ends.

  The threads of an executor would: Python waits for them, and so for the host.
  """
  future: concurrent.futures.Future[T] = concurrent.futures.Future()

  def run() -> None:
    try:
      future.set_result(work())
    except BaseException as error:  # raised again by `Future.result`
      future.set_exception(error)

  threading.Thread(target=run, name="tunix-hosts", daemon=True).start()
  return future
