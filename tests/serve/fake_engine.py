"""An engine and a driver with the interface of the real ones, and no model.

A script says which tokens a completion has; without one they follow from the prompt.
"""

import dataclasses
import threading
from typing import Any

import numpy as np

from tests import toys_text
from tunix.generate import outputs
from tunix.generate.engine.request import EngineDead, RequestError, Ticket
from tunix.generate.padded.completions import settled
from tunix.generate.tokens import Delta, Tokens

VOCAB = 514


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  slots: int = 8
  max_tokens: int = 256
  max_top_logprobs: int = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
  waiting: int = 0
  running: int = 0
  pages_total: int = 64
  pages_free: int = 64
  generated_tokens: int = 0


class Row:
  """One completion."""

  def __init__(self, ticket: Ticket, sample: int, tokens: list[int], streams: bool):
    self.ticket, self.sample, self.tokens = ticket, sample, tokens
    self.streams, self.given, self.sent = streams, 0, 0


def logprob(token: int) -> float:
  """The log-probability of a token, wherever it stands."""
  return -0.01 * (token + 1)


def scores(tokens: Any) -> np.ndarray:
  return np.array([logprob(int(t)) for t in tokens], np.float32)


def top_of(tokens: Any, count: int) -> dict[str, np.ndarray]:
  """The token itself is the most likely one if it is even, else the second."""
  ids = np.array([[t - t % 2 + k for k in range(count)] for t in tokens], np.int32)
  ids = ids.reshape(len(ids), count)
  if not count:
    return {}
  return {"top_ids": ids, "top_logps": np.float32(-0.01) * np.float32(ids + 1)}


class FakeEngine:
  """See the module; `text` is the answer to every request, if it is given."""

  def __init__(self, tokenizer: Any = None, text: str | None = None, rounds: int = 3):
    self.tokenizer = tokenizer or toys_text.chat_tokenizer("qwen3")
    self.config, self.version = Config(), 7
    self.script = self._from_prompt if text is None else self._text(text)
    self.rounds, self.loaded = rounds, {}
    self.rows: list[Row] = []
    self.submitted: list[Any] = []
    self.cancelled: list[Ticket] = []
    self.broken: BaseException | None = None  # raised by the next step
    self.hold_at: int | None = None  # tokens after which no completion goes on
    self.failing: str | None = None  # message of a RequestError for the next delta
    self.dead: BaseException | None = None
    self.models: list[Any] = []
    self.lock = threading.Lock()
    self.drawn = 0

  @property
  def adapters(self) -> tuple[str, ...]:
    return tuple(self.loaded)

  def _from_prompt(self, request: Any, sample: int) -> list[int]:
    first = int(np.sum(request.prompt)) + sample + (request.seed or 0)
    return [40 + (first + 7 * i) % 400 for i in range(request.max_tokens)]

  def _text(self, text: str) -> Any:
    ids = [*self.tokenizer.encode(text), self.tokenizer.eos_id()]
    return lambda request, sample: ids

  def submit(self, request: Any, streams: bool = True) -> Ticket:
    if self.dead is not None:
      raise EngineDead(f"the engine does not run: {self.dead}")
    if any(not 0 <= token < VOCAB for token in request.prompt):
      raise ValueError(f"a prompt has an id outside 0 to {VOCAB - 1}")
    ticket = Ticket(request.id or f"request {len(self.submitted)}", request)
    with self.lock:
      self.submitted.append(request)
      for sample in range(request.num_samples):
        tokens = self.script(request, sample)[: request.max_tokens]
        self.rows.append(Row(ticket, sample, tokens, streams))
    return ticket

  def cancel(self, ticket: Ticket) -> None:
    with self.lock:
      self.cancelled.append(ticket)

  def step(self) -> bool:
    if self.broken is not None:
      raise self.broken
    with self.lock:
      for row in [r for r in self.rows if r.ticket in self.cancelled]:
        self._end(row, "cancelled")
      most = 2**30 if self.hold_at is None else self.hold_at
      rows = [row for row in self.rows if row.given < most]
    for row in rows:
      self._advance(row)
    return bool(rows)

  def _advance(self, row: Row) -> None:
    request = row.ticket.request
    if self.failing is not None:
      with self.lock:
        self.rows = [r for r in self.rows if r.ticket is not row.ticket]
      row.ticket.put(RequestError(self.failing))
      return
    if request.prompt_logprobs and row.ticket.prompt_scores is None:
      rest, most = request.prompt[1:], request.top_logprobs
      row.ticket.prompt_scores = Tokens(
        ids=rest, logps=scores(rest), **top_of(rest, most)
      )
    new = row.tokens[row.given : row.given + self.rounds]
    row.given += len(new)
    reason = "length" if row.given >= len(row.tokens) else None
    stop_ids = request.stop_ids
    ends = self.tokenizer.eos_ids() if stop_ids is None else stop_ids
    if new and new[-1] in ends:
      reason = "eos"
    body = np.array(row.tokens[: row.given], np.int32)
    decoded = self.tokenizer.decode(outputs.text_tokens(body, reason))
    if any(stop in decoded for stop in request.stop_strings):
      reason = "stop"
    text = outputs.text_of(self.tokenizer.decode, body, reason, request.stop_strings)
    if reason is None:
      text = settled(text, request.stop_strings) if row.streams else ""
    tokens = np.array(new, np.int32)
    delta = Delta(
      sample=row.sample,
      text=text[row.sent :],
      ids=tokens,
      logps=scores(new) if request.logprobs else None,
      sampling_logps=scores(new) if request.logprobs else None,
      **top_of(new, request.top_logprobs),
      versions=np.full(len(new), self.version, np.int32),
      finish_reason=reason,
    )
    row.sent = max(row.sent, len(text))
    self.drawn += len(new)
    if reason is not None:
      with self.lock:
        self.rows = [r for r in self.rows if r is not row]
    row.ticket.put(delta)

  def _end(self, row: Row, reason: str) -> None:
    self.rows = [r for r in self.rows if r is not row]
    none = np.zeros(0, np.int32)
    row.ticket.put(Delta(sample=row.sample, versions=none, finish_reason=reason))

  def die(self, error: BaseException) -> None:
    with self.lock:
      self.dead, rows = error, self.rows
      self.rows = []
    for ticket in {row.ticket for row in rows}:
      ticket.put(EngineDead(f"the engine failed: {error}"))

  def load_adapter(self, name: str, folder: Any) -> None:
    if not (folder / "adapter_config.json").is_file():
      raise FileNotFoundError(f"{folder}/adapter_config.json is missing")
    self.loaded[name] = folder

  def unload_adapter(self, name: str) -> None:
    del self.loaded[name]

  def update_weights(self, model=None, version=None, mode="recompute") -> None:
    self.models.append((model, mode))
    self.version = self.version + 1 if version is None else version

  def stats(self) -> Stats:
    return Stats(running=len(self.rows), generated_tokens=self.drawn)


class FakeDriver:
  """Steps the engine in a thread, until it is paused, stopped or dead."""

  def __init__(self, engine: FakeEngine):
    self.engine, self.failure = engine, None
    self.is_paused, self.degraded = False, None
    self._stops, self._turn = threading.Event(), threading.Condition()
    self._thread = threading.Thread(target=self._run, daemon=True)

  @property
  def alive(self) -> bool:
    return self._thread.is_alive()

  def start(self) -> "FakeDriver":
    self._thread.start()
    return self

  def stop(self, timeout: float) -> None:
    self._stops.set()
    self._thread.join(timeout)

  def _run(self) -> None:
    while not self._stops.is_set():
      with self._turn:
        if self.is_paused:
          self._turn.wait(0.005)
          continue
        try:
          worked = self.engine.step()
        except Exception as error:  # as in the real driver
          self.failure = error
          self.engine.die(error)
          return
      if not worked:
        self._stops.wait(0.002)

  def call(self, function: Any, timeout: float) -> Any:
    if not self._turn.acquire(timeout=timeout):
      raise TimeoutError("the engine is busy")
    try:
      return function(self.engine)
    finally:
      self._turn.release()

  def pause(self, mode: str) -> None:
    while mode == "wait" and self.engine.rows:
      self._stops.wait(0.002)
    with self._turn:
      self.is_paused = True
      if mode == "abort":
        for row in list(self.engine.rows):
          self.engine._end(row, "cancelled")

  def resume(self) -> None:
    with self._turn:
      self.is_paused = False
