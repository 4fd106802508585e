"""Sampling with trained adapters, through the engine."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import logging
import pathlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import (
  EngineDead,
  EngineRequest,
  RequestError,
  Ticket,
)
from tunix.tinker import journal, packed
from tunix.tinker.checkpoints import Place
from tunix.tinker.errors import NotFoundError, NotServedError, TinkerError
from tunix.tinker.loaded_adapters import LoadedAdapters
from tunix.tinker.results import Result, Results
from tunix.tinker.runs import Op
from tunix.utils import io, record_file
from tunix.utils.record_file import RecordFile

_LOG = logging.getLogger(__name__)
_WORKERS = 64  # requests that are in the engine's queue at the same time
_LARGE = 256 * 2**20  # bytes that the journal grows until it is written anew
_RESULT_BYTES = 2**30  # of results, beyond which the oldest ones are dropped
_KEPT_AT_START = 4096  # results of the process before, whose retrieval is not known
_KEPT_RESULTS = 1024  # retrieved results that can be retrieved again
_MOST_SAMPLES = 1024  # of one request
_MOST_TOPS = 128  # alternatives of a token
_INT32 = 2**31 - 1
_UNSERVED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")


def check(args: Mapping[str, Any], prompt: np.ndarray, most: int) -> dict[str, Any]:
  """Returns the arguments of a sampling request, with defaults.

  Args:
    args: fields of the request.
    prompt: ids of the prompt.
    most: most tokens of a prompt and its completion.

  Raises:
    NotServedError: a field that this service does not have.
    TinkerError: a value that is out of range.
  """
  for name in _UNSERVED:
    if args.get(name):
      raise NotServedError(
        f"{name} is {str(args[name])[:80]}, which this service does not have; expected "
        "no value. Leave it out"
      )
  if not 1 <= prompt.size < most:
    raise TinkerError(
      f"the prompt has {prompt.size} tokens; expected 1 to {most - 1}. Shorten it"
    )
  params = args.get("sampling_params") or {}
  if not isinstance(params, dict):
    raise TinkerError(f"sampling_params is {str(params)[:80]!r}; expected an object")
  room = most - prompt.size
  top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
  return {
    "num_samples": _whole(args, "num_samples", 1, 1, _MOST_SAMPLES),
    "max_tokens": _whole(params, "max_tokens", room, 1, most),
    "temperature": params.get("temperature", 1.0),
    "top_k": None if top_k in (-1, None) else top_k,
    "top_p": None if top_p in (1, None) else top_p,
    "seed": params.get("seed"),
    "prompt_logprobs": bool(args.get("prompt_logprobs")),
    "topk_prompt": _whole(args, "topk_prompt_logprobs", 0, 0, _MOST_TOPS),
    "topk_sample": _whole(args, "topk_sample_logprobs", 0, 0, _MOST_TOPS),
    "last_n": _whole(args, "prompt_logprobs_last_n", None, 1, max(prompt.size - 1, 1)),
    **_stops(params.get("stop")),
  }


def _stops(stop: Any) -> dict[str, Any]:
  """Returns `stop_ids` and `stop_strings` of a request: a text, texts, or ids."""
  values = [stop] if isinstance(stop, str) else stop
  if values is None or values == []:
    return {"stop_ids": None if values is None else (), "stop_strings": ()}
  if isinstance(values, list) and all(isinstance(x, str) for x in values):
    return {"stop_ids": None, "stop_strings": tuple(values)}
  if isinstance(values, list) and all(_is_whole(x, 0, _INT32) for x in values):
    return {"stop_ids": tuple(values), "stop_strings": ()}
  raise TinkerError(
    f"stop is {str(stop)[:80]!r}; expected a text, a list of texts or a list of ids"
  )


def _whole(
  args: Mapping[str, Any], name: str, default: int | None, least: int, most: int
) -> int | None:
  """Returns an integer of a request, or the default if it is missing.

  Raises:
    TinkerError: it is no integer in the range.
  """
  value = args.get(name)
  if value is None:
    return default
  if not _is_whole(value, least, most):
    raise TinkerError(
      f"{name} is {str(value)[:80]}; expected an integer from {least} to {most}. "
      "Correct it"
    )
  return value


def _is_whole(value: Any, least: int, most: int) -> bool:
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  return is_integer and least <= value <= most


class Sampler:
  """The sampling requests of a service.

  Args:
    driver: the started driver of an engine.
    folder: folder of the requests and results.
    load: returns the adapter of a checkpoint from disk.
    on_change: called after each result, in any thread.
  """

  def __init__(
    self,
    driver: Any,
    folder: pathlib.Path,
    load: Callable[[Place], dict[str, Any]],
    on_change: Callable[[], None],
  ):
    self._driver, self._on_change = driver, on_change
    self._adapters = LoadedAdapters(driver, load)
    self._lock = threading.Lock()
    self._results = Results[str](_RESULT_BYTES)
    self._retrieved: collections.deque[str] = collections.deque()
    self._open: dict[str, Op] = {}
    self._tickets: dict[str, Ticket] = {}
    self._closes = False
    folder.mkdir(parents=True, exist_ok=True)
    io.sweep(folder)
    self._file = folder / "requests"
    self._journal = self._reopened()
    self._workers = concurrent.futures.ThreadPoolExecutor(_WORKERS, "tinker sampler")
    for id, op in self._open.items():
      self._workers.submit(self._run, id, op)

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
      raise TinkerError(str(error)) from error
    with self._lock:
      if id in self._open or id in self._results:
        return
      self._journal.append(op.record(id=id), sync=True)
      self._open[id] = op
    self._workers.submit(self._run, id, op)

  def result(self, id: str) -> Result | None:
    """Returns a result, or None if it is not computed yet.

    Raises:
      NotFoundError: there is no such request, or its result was dropped.
    """
    with self._lock:
      if (found := self._results.get(id)) is not None:
        self._forget_after(id)
        return found
      if id in self._open:
        return None
    raise NotFoundError(
      f"there is no sampling request {id}; expected one that was sent. Send it again"
    )

  def pending(self, sessions: Collection[str]) -> int:
    """Returns the number of open requests of some sessions."""
    mine = set(sessions)
    with self._lock:
      return sum(id.partition(":")[0] in mine for id in self._open)

  def is_short(self) -> bool:
    """Returns True if a request waits for room in the bank of adapters."""
    with self._lock:
      return any(id not in self._tickets for id in self._open)

  def cancel(self, id: str) -> None:
    """Ends a request early, if it runs."""
    with self._lock:
      ticket = self._tickets.get(id)
    if ticket is not None:
      self._driver.engine.cancel(ticket)

  def close(self) -> None:
    """Ends the threads; open requests stay in the journal."""
    with self._lock:
      self._closes = True
      tickets = list(self._tickets.values())
    self._adapters.close()
    for ticket in tickets:
      self._driver.engine.cancel(ticket)
    self._workers.shutdown(wait=True, cancel_futures=True)
    self._journal.close()

  def _run(self, id: str, op: Op) -> None:
    try:
      result = self._sample(id, op)
    except EngineDead:  # the request is repeated after a restart
      return
    except (RequestError, TinkerError, TypeError, ValueError) as error:
      result = Result(error=str(error))
    except Exception as error:  # of the engine: it must reach the client
      _LOG.exception("the sampling request %s failed", id)
      text = f"the service failed: {type(error).__name__}: {error}"
      result = Result(error=text, category="server")
    with self._lock:
      if self._closes:  # likewise
        return
      self._journal.append(result.record(id=id))
      self._results[id] = result
      self._open.pop(id, None)
      self._tickets.pop(id, None)
      if self._journal.size - self._began > _LARGE:
        self._journal.close()
        self._journal = self._compacted()
    self._on_change()

  def _sample(self, id: str, op: Op) -> Result:
    path = op.args["path"]
    if path is not None:
      self._adapters.use(path)
    try:
      ticket = self._driver.engine.submit(_request(id, op, path), streams=False)
      with self._lock:
        self._tickets[id] = ticket
      return _result(op, ticket, Engine.collect(ticket))
    finally:
      if path is not None:
        self._adapters.release(path)

  def _forget_after(self, id: str) -> None:
    if id not in self._retrieved:
      self._retrieved.append(id)
    while len(self._retrieved) > _KEPT_RESULTS:
      self._results.pop(self._retrieved.popleft())

  def _reopened(self) -> RecordFile:
    """Reads the journal of the process before, and returns a new one."""
    log = journal.opened(self._file)
    for record in log.records():
      meta, arrays = packed.unpack(record)
      if meta["type"] == "op":
        self._open[meta["id"]] = Op(kind="sample", args=meta["args"], arrays=arrays)
        continue
      self._open.pop(meta["id"], None)
      self._results[meta["id"]] = Result.of(meta, arrays)
    log.close()
    for id in list(self._results)[: max(0, len(self._results) - _KEPT_AT_START)]:
      self._results.pop(id)
    return self._compacted()

  def _compacted(self) -> RecordFile:
    """Returns a new journal with the open requests and the results that are kept."""
    records = [op.record(id=id) for id, op in self._open.items()]
    records += [x.record(id=id) for id, x in self._results.items()]
    record_file.write(self._file, records)
    log = RecordFile(self._file)
    self._began = log.size
    return log


def _request(id: str, op: Op, adapter: str | None) -> EngineRequest:
  args = op.args
  seed = args["seed"]
  if seed is None:  # the same after a restart
    seed = int.from_bytes(hashlib.sha256(id.encode()).digest()[:4], "little") >> 1
  wants_prompt = args["prompt_logprobs"] or args["topk_prompt"] > 0
  return EngineRequest(
    prompt=op.arrays["prompt"],
    max_tokens=args["max_tokens"],
    num_samples=args["num_samples"],
    temperature=args["temperature"],
    top_k=args["top_k"],
    top_p=args["top_p"],
    seed=seed,
    stop_ids=args["stop_ids"],
    stop_strings=tuple(args["stop_strings"]),
    logprobs=True,
    top_logprobs=max(args["topk_sample"], args["topk_prompt"]),
    prompt_logprobs=wants_prompt,
    adapter=adapter,
    id=id,
  )


def _result(op: Op, ticket: Ticket, completions: list[Any]) -> Result:
  args, size = op.args, op.arrays["prompt"].size
  if any(x.finish_reason == "cancelled" for x in completions):
    return Result(error="the request was cancelled; expected no cancellation")
  arrays = {
    "lengths": np.array([x.tokens.size for x in completions], np.int32),
    "tokens": np.concatenate([x.tokens for x in completions]).astype(np.int32),
    "logprobs": np.concatenate([x.logprobs for x in completions]).astype(np.float32),
  }
  if k := args["topk_sample"]:
    tops = [x.top for x in completions]
    arrays["topk_ids"] = np.concatenate([t.ids[:, :k] for t in tops])
    arrays["topk_logprobs"] = np.concatenate([t.logprobs[:, :k] for t in tops])
  scores = ticket.prompt_scores
  if scores is not None:
    first = 1 if args["last_n"] is None else size - args["last_n"]
    if args["prompt_logprobs"]:
      logps = np.full(size, np.nan, np.float32)
      logps[first:] = scores.logprobs[first - 1 :]
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
