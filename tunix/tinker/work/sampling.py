"""Sampling with trained adapters, through the engine."""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.replicas import Replicas
from tunix.generate.engine.request import (
  EngineDead,
  EngineRequest,
  RequestError,
  Ticket,
)
from tunix.generate.tokens import Completion
from tunix.tinker.errors import BusyError, NotFoundError, TinkerError
from tunix.tinker.protocol.results import (
  Result,
  Results,
  start_record,
  stopped_too_often,
)
from tunix.tinker.state import journal
from tunix.tinker.state.checkpoints import Place
from tunix.tinker.state.runs import Op
from tunix.tinker.state.turns import Room
from tunix.tinker.work.loaded_adapters import LoadedAdapters
from tunix.utils import array_codec, io
from tunix.utils.record_file import RecordFile

_LOG = logging.getLogger(__name__)
_PART = 16  # completions of a request that take a turn together
_ROOM = 4  # completions in the engine's queue and slots, for each slot
_LARGE = 256 * 2**20  # bytes that the journal grows until it is written anew
_RESULT_BYTES = 2**30  # of results, beyond which the oldest ones are dropped
_KEPT_AT_START = 4096  # results of the process before, whose retrieval is not known
_KEPT_RESULTS = 1024  # retrieved results that can be retrieved again
_CANCELLED = "the request was cancelled; expected no cancellation"


class _Cancelled(TinkerError):
  """A request ended early: the client asked for it, or a part of it failed."""


class Sampler:
  """The sampling requests of a service.

  Args:
    driver: the started driver of an engine.
    folder: folder of the requests and results.
    load: returns the adapter of a checkpoint from disk.
    on_change: called after each result, in any thread.
    owner_of: returns the tenant of a request, given its id.
    max_starts: see `TinkerSettings`.
  """

  def __init__(
    self,
    driver: Driver | Replicas,
    folder: pathlib.Path,
    load: Callable[[Place], dict[str, Any]],
    on_change: Callable[[], None],
    owner_of: Callable[[str], str],
    max_starts: int,
  ):
    self._driver, self._on_change, self._owner_of = driver, on_change, owner_of
    self._max_starts = max_starts
    self._room = Room(_ROOM * driver.engine.config.slots)
    self._adapters = LoadedAdapters(driver, load)
    self._lock = threading.Lock()
    self._results = Results[str](_RESULT_BYTES)
    self._retrieved: collections.deque[str] = collections.deque()
    self._open: dict[str, Op] = {}
    self._starts: dict[str, int] = {}  # of open requests, in this process and before
    self._tickets: dict[str, list[Ticket]] = {}  # of open requests that began
    self._parts: dict[str, list[Future[Any]]] = {}  # of open requests
    self._cancelled: set[str] = set()
    self._closes = False
    folder.mkdir(parents=True, exist_ok=True)
    io.sweep(folder)
    self._file = folder / "requests"
    self._journal = self._reopened()
    for id, op in list(self._open.items()):
      if self._starts.get(id, 0) < max_starts:
        self._queue(id, op)
      else:
        self._end(id, stopped_too_often(max_starts))

  def hand_over(self, place: Place, adapters: dict[str, Any]) -> None:
    """Keeps a new adapter in memory for the first request that uses it."""
    self._adapters.hand_over(place, adapters)

  def accept(self, id: str, op: Op) -> None:
    """Writes a request to the journal and starts it, if it is not known yet.

    Args:
      id: its id.
      op: arguments of `check`, the path of the checkpoint or None, and the prompt.

    Raises:
      TinkerError: the engine can never run the request.
    """
    try:
      _request(id, op, None)
    except (TypeError, ValueError) as error:
      raise TinkerError(str(error)[:500]) from error
    with self._lock:
      if self._closes:
        raise BusyError("the service ends: send the request again")
      if id in self._open or id in self._results:
        return
      self._journal.append(op.record(id=id), sync=True)
      self._open[id] = op
    self._queue(id, op)

  def result(self, id: str) -> Result | None:
    """Returns a result, or None if it is not computed yet.

    Raises:
      NotFoundError: there is no such request, or its result was dropped.
    """
    with self._lock:
      if (result := self._results.get(id)) is not None:
        self._forget_after(id)
        return result
      if id in self._open:
        return None
    raise NotFoundError(
      f"there is no sampling request {id}; expected one that was sent. Send it again"
    )

  def pending(self, tenant: str) -> int:
    """Returns the number of open requests of a tenant."""
    with self._lock:
      return sum(self._owner_of(id) == tenant for id in self._open)

  def sessions(self) -> set[str]:
    """Returns the ids of the sampling sessions with open requests."""
    with self._lock:
      return {id.rpartition(":")[0] for id in self._open}

  def is_short(self) -> bool:
    """Returns True if a request waits for its turn, or for room for its adapter."""
    with self._lock:
      return any(not self._tickets.get(id) for id in self._open)

  def cancel(self, id: str) -> None:
    """Ends a request early, if it is open."""
    with self._lock:
      if id in self._open:
        self._cancelled.add(id)
      tickets = list(self._tickets.get(id, ()))
      parts = list(self._parts.get(id, ()))
    for part in parts:
      part.cancel()  # those that wait for a turn
    self._room.start_next()
    for ticket in tickets:
      self._driver.engine.cancel(ticket)

  def stop(self) -> None:
    """Begins no request, and ends those that run; they stay in the journal."""
    with self._lock:
      if self._closes:
        return
      self._closes = True
      for id in self._tickets:  # a stop is not counted as a start
        self._starts[id] -= 1
        self._note(start_record(self._starts[id], id=id))
      tickets = [x for own in self._tickets.values() for x in own]
    self._room.stop()
    self._adapters.close()
    for ticket in tickets:
      self._driver.engine.cancel(ticket)

  def close(self) -> None:
    """Waits for the end of the threads."""
    self.stop()
    self._room.close()
    self._journal.close()

  def _queue(self, id: str, op: Op) -> None:
    """Has threads compute a request, in parts that take turns of its tenant."""
    tenant, count, most = self._owner_of(id), op.args["num_samples"], self._room.most
    with self._lock:
      # The last start is made alone, so that only a request that ends the process is
      # counted once more.
      is_last = self._starts.get(id, 0) >= max(1, self._max_starts - 1)
    size = min(_PART, most)
    parts: list[Future[Any]] = []
    for first in range(0, count, size):
      own = min(size, count - first)
      tokens = op.arrays["prompt"].size + own * op.args["max_tokens"]
      call = functools.partial(self._sample, id, op, first, own)
      parts.append(self._room.submit(tenant, most if is_last else own, tokens, call))
    with self._lock:
      self._parts[id] = parts
      is_cancelled = id in self._cancelled
    if is_cancelled:  # before the parts were known
      self.cancel(id)
    waiting = iter(range(len(parts) - 1))

    def ends(_: Future[Any]) -> None:
      with self._lock:
        is_whole = next(waiting, None) is None
      if is_whole:
        self._run(id, op, parts)

    for part in parts:
      part.add_done_callback(ends)

  def _run(self, id: str, op: Op, parts: list[Future[Any]]) -> None:
    """Records the result of a request whose parts have ended."""
    try:
      ended = [part for part in parts if not part.cancelled()]
      errors = [x for part in ended if (x := part.exception()) is not None]
      for error in sorted(errors, key=lambda x: isinstance(x, _Cancelled)):
        raise error
      if len(ended) < len(parts):
        raise _Cancelled(_CANCELLED)
      answers = [part.result() for part in parts]
      result = _result(op, answers[0][0], [x for _, own in answers for x in own])
    except EngineDead:
      return  # the request is repeated after a restart
    except (RequestError, TinkerError, TypeError, ValueError) as error:
      result = Result(error=str(error))
    except Exception as error:  # of the engine: it must reach the client
      _LOG.exception("the sampling request %s failed", id)
      text = f"the service failed: {type(error).__name__}: {error}"
      result = Result(error=text, category="server")
    self._end(id, result)

  def _end(self, id: str, result: Result) -> None:
    with self._lock:
      if self._closes:  # the request is repeated after a restart
        return
      self._results[id] = result
      for of_open in (self._open, self._tickets, self._starts, self._parts):
        of_open.pop(id, None)
      self._cancelled.discard(id)
      if not self._note(result.record(id=id)):
        # A short record may have room. The request has ended, so no start counts.
        self._note(start_record(0, id=id))
    self._on_change()

  def _note(self, record: bytes) -> bool:
    """Writes a record that may be lost; returns False if it cannot be written."""
    is_written = False
    try:
      self._journal.append(record)
      is_written = True
      if self._journal.size - self._began > _LARGE:
        self._compact(self._journal)
    except OSError as error:
      _LOG.warning("the journal of samples cannot be written: %s", error)
    return is_written

  def _sample(
    self, id: str, op: Op, first: int, count: int
  ) -> tuple[Ticket, list[Completion]]:
    """Computes a part of a request: completions from the number `first` on."""
    self._begin(id)
    try:
      return self._completed(id, _request(id, op, op.args["path"], first, count))
    except EngineDead:
      raise
    except Exception:
      self.cancel(id)  # its other parts
      raise

  def _completed(
    self, id: str, request: EngineRequest
  ) -> tuple[Ticket, list[Completion]]:
    path = request.adapter
    if path is not None:
      self._adapters.use(path)
    try:
      ticket = self._driver.engine.submit(request, streams=False)
      with self._lock:
        self._tickets[id].append(ticket)
        is_cancelled = self._closes or id in self._cancelled
      if is_cancelled:  # before the ticket was known
        self._driver.engine.cancel(ticket)
      return ticket, Engine.collect(ticket)
    finally:
      if path is not None:
        self._adapters.release(path)

  def _begin(self, id: str) -> None:
    """Counts the start of a request, once in a process.

    Raises:
      EngineDead: the service ends.
      TinkerError: the request was cancelled, or another part of it failed.
    """
    with self._lock:
      if self._closes:
        raise EngineDead(f"{id}: the service ends")
      if id in self._cancelled:
        raise _Cancelled(_CANCELLED)
      if id not in self._tickets:
        self._tickets[id] = []
        self._starts[id] = self._starts.get(id, 0) + 1
        self._note(start_record(self._starts[id], id=id))

  def _forget_after(self, id: str) -> None:
    if id not in self._retrieved:
      self._retrieved.append(id)
    while len(self._retrieved) > _KEPT_RESULTS:
      self._results.pop(self._retrieved.popleft())

  def _reopened(self) -> RecordFile:
    """Reads the journal of the process before, and returns a new one."""
    log = journal.opened(self._file)
    for record in log.records():
      meta, arrays = array_codec.from_bytes(record)
      if meta["type"] == "op":
        self._open[meta["id"]] = Op(kind="sample", args=meta["args"], arrays=arrays)
        continue
      if meta["type"] == "start":
        self._starts[meta["id"]] = meta["count"]
        continue
      self._open.pop(meta["id"], None)
      self._starts.pop(meta["id"], None)
      self._results[meta["id"]] = Result.of(meta, arrays)
    for id in list(self._results)[: max(0, len(self._results) - _KEPT_AT_START)]:
      self._results.pop(id)
    self._compact(log)
    return log

  def _compact(self, log: RecordFile) -> None:
    """Rewrites a journal with the open requests and the results that are kept."""
    records = [op.record(id=id) for id, op in self._open.items()]
    records += [start_record(n, id=id) for id, n in self._starts.items()]
    records += [x.record(id=id) for id, x in self._results.items()]
    log.rewrite(records)
    self._began = log.size


def _request(
  id: str, op: Op, adapter: str | None, first: int = 0, count: int | None = None
) -> EngineRequest:
  """Returns a request with completions from `first` on; None: with all of them."""
  args = op.args
  # A journal of before has no values of newer rules.
  rules = {key: args[key] for key in EngineRequest.keywords().values() if key in args}
  if rules["seed"] is None:  # the same after a restart
    digest = hashlib.sha256(id.encode()).digest()
    rules["seed"] = int.from_bytes(digest[:4], "little") >> 1
  wants_prompt = first == 0 and (args["prompt_logprobs"] or args["topk_prompt"] > 0)
  return EngineRequest(
    prompt=op.arrays["prompt"],
    max_tokens=args["max_tokens"],
    num_samples=args["num_samples"] if count is None else count,
    first_row=first,
    **rules,
    logprobs=True,
    top_logprobs=max(args["topk_sample"], args["topk_prompt"] if wants_prompt else 0),
    prompt_logprobs=wants_prompt,
    adapter=adapter,
    id=id,
  )


def _result(op: Op, ticket: Ticket, completions: list[Completion]) -> Result:
  args, size = op.args, op.arrays["prompt"].size
  if any(x.finish_reason == "cancelled" for x in completions):
    return Result(error=_CANCELLED)
  column = lambda name: np.concatenate([getattr(x, name) for x in completions])
  arrays = {
    "lengths": np.array([x.ids.size for x in completions], np.int32),
    "tokens": column("ids").astype(np.int32),
    "logprobs": column("logps").astype(np.float32),
  }
  if k := args["topk_sample"]:
    arrays["topk_ids"] = column("top_ids")[:, :k]
    arrays["topk_logprobs"] = column("top_logps")[:, :k]
  scores = ticket.prompt_scores
  if scores is not None and scores.logps is not None:
    first = 1 if args["last_n"] is None else size - args["last_n"]
    if args["prompt_logprobs"]:
      logps = np.full(size, np.nan, np.float32)
      logps[first:] = scores.logps[first - 1 :]
      arrays["prompt_logprobs"] = logps
    if (k := args["topk_prompt"]) and scores.top is not None:
      ids = np.zeros((size, k), np.int32)
      values = np.full((size, k), -99999.0, np.float32)  # the client's "no value"
      ids[first:] = scores.top.ids[first - 1 :, :k]
      values[first:] = scores.top.logprobs[first - 1 :, :k]
      arrays["topk_prompt_ids"], arrays["topk_prompt_logprobs"] = ids, values
  ends = ["length" if x.finish_reason == "length" else "stop" for x in completions]
  return Result(
    values={"stop_reasons": ends, "cached_tokens": ticket.cached_tokens}, arrays=arrays
  )
