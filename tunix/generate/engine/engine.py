"""The engine: continuous batching over a paged key-value cache.

A fixed number of completions run at the same time, each in a slot. One `step` is a
launch: a few rounds on the device (device/launch.py). Before the launch, the scheduler
fills free slots and pages (scheduling/scheduler.py); after it, the host hands out the
drawn tokens. The engine runs the weights and the decoder of the trainer.

The tokens of a completion depend on its request only: not on other requests, slots,
the order of arrival, the size of a launch, preemption, shared pages or drafts. Their
log-probs can differ in the last bits, as sums are rounded differently.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence as Seq
from typing import Any, Literal, TypeVar

import jax
from flax import nnx

from tunix.generate.decoders import images as images_lib, layout
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.engine import adapter_sources
from tunix.generate.engine.cache import row_keeper, slot_state
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.mtp import MTPLayer
from tunix.generate.engine.request import EngineDead, EngineRequest, Ticket
from tunix.generate.engine.run import (
  arrival,
  batch,
  draft_model as draft_lib,
  recorded,
  results,
)
from tunix.generate.engine.run.device import Device
from tunix.generate.engine.run.launches import Launches
from tunix.generate.engine.scheduling import layer_groups, pages as pages_lib
from tunix.generate.engine.scheduling.draft_policy import DraftPolicy
from tunix.generate.engine.scheduling.open_requests import OpenRequests
from tunix.generate.engine.scheduling.scheduler import Scheduler
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.engine.stats import EngineStats
from tunix.generate.tokenizer_adapter import adapted
from tunix.generate.tokens import Completion
from tunix.models.transformer.model import Transformer
from tunix.perf import programs

UpdateMode = Literal["keep", "recompute", "drain"]
T = TypeVar("T")


class Engine:
  """Completes requests by a model in this process.

  `submit` and `cancel` may be called in any thread. All other methods must be called in
  the thread that steps the engine (`Driver` has such a thread).

  Args:
    model: a `Transformer`; other modules are for the padded `Sampler`.
    tokenizer: any object that TokenizerAdapter wraps.
    config: sizes of the engine.
    gather_weights: layout of sharded weights, see `Sampler`.
    draft_model: a small `Transformer` with the same vocabulary, on the same mesh, or
      the model's own layer for further tokens (`tunix.generate.engine.mtp`). It needs
      `EngineConfig.draft_tokens`. `model` checks every draft, so drafts never change
      the tokens of a completion. None: drafts come from prompt lookup only.

  Attributes:
    tokenizer: the adapter.
    config: the sizes.
    version: number of the weights, see `update_weights`.

  Raises:
    TypeError: one of the models is not a `Transformer`.
    ValueError: the draft model, the drafts or a setting does not fit the model.
  """

  def __init__(
    self,
    model: nnx.Module,
    tokenizer: object,
    config: EngineConfig | None = None,
    gather_weights: GatherWeights = None,
    draft_model: Any = None,
  ):
    if not isinstance(model, Transformer):
      raise TypeError(
        f"model is {type(model).__name__}, expected a tunix Transformer: the engine "
        "writes the pages of its cache. Use the padded sampler for other modules "
        "(engine='padded')"
      )
    self.tokenizer = adapted(tokenizer)
    self.config = EngineConfig() if config is None else config
    if model.config.batch_invariant and self.config.attention not in ("auto", "rows"):
      raise ValueError(
        f"EngineConfig.attention is {self.config.attention!r} and the model is "
        "batch_invariant; expected 'auto' or 'rows'. Change attention, or set "
        "batch_invariant to False"
      )
    layout.check_model(model, gather_weights)
    self.version = 0
    self._model = model
    sizes = slot_state.scheduler_config(self.config, model)
    self._device = Device(model, self.config, gather_weights, draft_model)
    windows = layer_groups.windows_of(model.config, sizes)
    self._scheduler = Scheduler(sizes, windows)
    ratio = None if draft_model is None else draft_lib.size_ratio(draft_model, model)
    is_alone = jax.process_count() == 1
    always = isinstance(draft_model, MTPLayer)
    drafts = self.config.draft_tokens
    self._drafts = DraftPolicy(drafts, is_alone, ratio, always_model=always)
    self._launches = Launches(
      self.config,
      self._device,
      self._scheduler,
      self._drafts,
      self.vocab_size,
      self._end,
    )
    self._orders = itertools.count()
    self._requests = OpenRequests()
    # Called after each submission. It wakes a driver that waits for requests.
    self.on_submit: Callable[[], None] = lambda: None

  # Requests.

  def submit(self, request: EngineRequest, streams: bool = True) -> Ticket:
    """Puts a request into the queue.

    Args:
      request: the request.
      streams: return text while a completion grows; if False, all text at its end.

    Raises:
      ValueError: the request can never run. It has too many tokens, ids outside the
        vocabulary, an unknown adapter, or images that do not fit the prompt or the
        engine.
      EngineDead: the engine failed.
    """
    self._requests.check_alive()
    number = next(self._orders)
    name = f"request {number}" if request.id is None else request.id
    if request.images is not None:
      request = self._with_images(request)
    ticket = Ticket(name, request)
    adapter = 0
    if request.adapter is not None:
      adapter = self._device.adapters.index(request.adapter)
    sequences = self._sequences(ticket, adapter, streams)
    self._requests.add(ticket, sequences)
    self.on_submit()
    return ticket

  def _with_images(self, request: EngineRequest) -> EngineRequest:
    """Returns a request with images whose soft token is forbidden."""
    if self._device.draft is not None:
      raise ValueError(
        "the prompt has images and the engine a draft model, which cannot read them; "
        "expected at most one. Leave the draft model out (prompt lookup drafts too)"
      )
    soft = images_lib.soft_token(self._model)
    if soft >= self.vocab_size:
      return request
    bias = {**request.logit_bias, soft: -math.inf}
    return dataclasses.replace(request, logit_bias=bias)

  def _sequences(self, ticket: Ticket, adapter: int, streams: bool) -> list[Sequence]:
    return arrival.sequences_of(
      ticket,
      self._model,
      self.tokenizer,
      self.config,
      self._orders,
      adapter,
      streams,
    )

  def cancel(self, ticket: Ticket) -> None:
    """Ends a request at the next launch; its open completions end as "cancelled"."""
    self._requests.cancel(ticket)

  def cancel_all(self) -> None:
    """Ends all open requests now."""
    self._requests.cancel()
    self._take_arrivals()

  def hold_back(self, is_held: bool) -> None:
    """Holds waiting completions back, or lets them start; started ones continue.

    Args:
      is_held: if True, no waiting completion starts.
    """
    self._scheduler.waiting.hold_back(is_held)

  @property
  def has_work(self) -> bool:
    """True if a completion runs or may start.

    While waiting completions are held back, only started ones count. A started
    completion counts even if it waits again because it was preempted.
    """
    return self._scheduler.is_busy

  def run(self, requests: Seq[EngineRequest]) -> list[list[Completion]]:
    """Completes requests in this thread; one list of completions for each.

    Requests with the largest `max_tokens` start first. A long completion that starts
    last would run alone at the end, with the other slots empty.

    Inside `programs.recording`, programs are recorded and not run (run/recorded.py).
    The engine is then closed, because a plan makes an engine for each of its calls, of
    the size that the call needs.
    """
    if programs.is_recording():
      widths = row_keeper.widths(self.config)
      sequences = self._launch_without_work(
        requests, widths if programs.records_all_sizes() else None
      )
      self.close()
      return list(map(recorded.completions, sequences))
    return batch.run(self, requests)

  def _launch_without_work(
    self, requests: Seq[EngineRequest], widths: Seq[int] | None
  ) -> list[Sequence]:
    """Calls the programs of requests (run/recorded.py); returns their completions."""
    tickets = [Ticket("a plan", request) for request in requests]
    sequences = [next(iter(self._sequences(x, 0, False))) for x in tickets]
    recorded.launch(
      *(self._device, self.config, sequences, self._drafts.sources), widths
    )
    return sequences

  def is_open(self, ticket: Ticket) -> bool:
    """Returns True until all completions of a request have ended."""
    return ticket in self._requests

  @staticmethod
  def collect(ticket: Ticket, timeout: float | None = None) -> list[Completion]:
    """Waits for all completions of a request.

    Args:
      ticket: the request.
      timeout: seconds to wait for each delta, see `Ticket.get`.
    """
    return results.collected(ticket, timeout)

  # Launches.

  def step(self) -> bool:
    """Runs one launch; returns False if there was nothing to do.

    Raises:
      EngineDead: the launch failed; every open request has received the error.
    """
    self._requests.check_alive()
    return self._or_die(self._take_and_step)

  def _take_and_step(self) -> bool:
    self._take_arrivals()
    return self._step()

  def _or_die(self, function: Callable[[], T]) -> T:
    """Calls a function that launches; if it fails, all open requests fail too."""
    try:
      return function()
    except BaseException as error:  # also an interrupt, which loses the cache too
      self._die(error)
      if not isinstance(error, Exception):
        raise
      raise EngineDead(f"the engine failed: {error}") from error

  def _step(self) -> bool:
    return self._launches.run(self.version)

  def _end(self, s: Sequence, reason: str) -> None:
    self._scheduler.remove(s)
    s.finish_reason = reason
    if s.failure is not None:
      s.ticket.put(s.failure)
      self._requests.cancel(s.ticket)  # its other completions
    self._requests.end(s)

  def _take_arrivals(self) -> None:
    arrived, ending = self._requests.take()
    for s in arrived:
      s.digests = [pages_lib.root_digest(self.version, s.adapter)]
      self._launches.counts["prompt_tokens"] += len(s.request.prompt)
      self._scheduler.waiting.add(s)
    for s in ending:
      self._scheduler.remove(s)
      results.cancelled(s)
      self._requests.end(s)

  @property
  def vocab_size(self) -> int:
    """V, the number of ids of the model."""
    return self._model.config.vocab_size

  def warm_up(
    self,
    *,
    constraints: bool = False,
    all_widths: bool = False,
    on_part: Callable[[int, int], None] = lambda number, count: None,
  ) -> None:
    """Compiles the programs of plain requests, greedy and sampled, with log-probs.

    These are the programs without drafts and those of each source of drafts. Other
    programs compile at their first use: filters, biases, lists of likely tokens, and
    scores of prompts. Where attention reads rows (CPUs by default), plain completions
    then run in the widest rows until a thread has compiled the programs of their width.
    With a draft model or several processes, they wait instead.

    Args:
      constraints: compile also the programs of constrained requests.
      all_widths: compile the programs of plain requests for every width of rows now.
        It has an effect only where attention reads rows.
      on_part: called before each part with its number (from 1) and the number of parts.
    """
    parts = batch.warm_up_parts(
      self.config, self.vocab_size, self._drafts.sources, constraints
    )
    count = len(parts) + 1
    self._device.widths.note()
    for number, (source, requests) in enumerate(parts, 1):
      on_part(number, count)
      if source is None:
        self.sleep()  # frees the wide rows: a fresh engine starts with narrow ones
      self._drafts.use_only(source)
      self.run(requests)
      if source == "model":
        # Compiles also the program that computes missing keys of the draft model.
        self._device.warm_up_moves()
    self._drafts.use_only(None)
    on_part(count, count)
    widths = row_keeper.widths(self.config)
    request = batch.plain_request(self.config, 0)
    self._launch_without_work([request], widths if all_widths else widths[-1:])
    self._drafts.reset()
    self._launches.reset_counts()
    self.sleep()
    self._device.compile_widths(widths[0])

  # Weights and cache.

  def update_weights(
    self,
    model: Any = None,
    version: int | None = None,
    mode: UpdateMode = "recompute",
  ) -> None:
    """Takes new weights between two launches, and forgets all cached prefixes.

    Args:
      model: the model with the new weights. None: the caller has written the new
        weights into the present model.
      version: number of the weights; None: the next one.
      mode: treatment of running completions. "recompute": they keep their tokens, and
        their keys and values are computed again. "keep": they continue with the keys
        and values of the old weights. "drain": they end before the weights change, and
        no waiting completion starts until then.

    Raises:
      ValueError: the mode is unknown, or the model has another configuration.
    """
    if mode not in ("keep", "recompute", "drain"):
      raise ValueError(f"mode is {mode!r}, expected keep, recompute or drain")
    model = self._model if model is None else model
    if model.config != self._model.config:
      raise ValueError(
        "model has another configuration than the engine, expected the same: make a "
        "new engine"
      )
    if mode == "drain":
      self._or_die(self._drain)
    self.version = self.version + 1 if version is None else version
    self._model = model
    self._device.set_model(model)
    self._scheduler.forget(self.version, recompute=mode == "recompute")

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names of the loaded adapters."""
    return self._device.adapters.names

  def load_adapter(self, name: str, source: adapter_sources.Source) -> None:
    """Loads an adapter for requests with its name; see `AdapterBank.load`."""
    self._device.adapters.load(name, source)

  def unload_adapter(self, name: str) -> None:
    """Unloads an adapter.

    Raises:
      ValueError: no adapter of this name is loaded, or an open request uses it.
    """
    number = self._device.adapters.index(name)
    used = self._requests.users_of(number)
    if used:
      raise ValueError(
        f"adapter {name!r} is used by {used[0]}, expected no open request: wait for "
        "it, or cancel it"
      )
    self._device.adapters.unload(name)

  def sleep(self) -> None:
    """Frees the cache; `step` makes a new one and recomputes running completions."""
    self._scheduler.forget(self.version, recompute=True)
    self._device.release()

  def wake(self) -> None:
    """Does nothing, because the next `step` makes the cache again."""

  def close(self) -> None:
    """Frees the memory on the device; open requests receive EngineDead."""
    if self.is_alive:
      self._die(EngineDead("the engine was closed"))

  def _drain(self) -> None:
    was_held = self._scheduler.waiting.is_held
    self.hold_back(True)
    while self.has_work:
      self._step()
    self.hold_back(was_held)

  # State.

  @property
  def is_alive(self) -> bool:
    """False after `close`, or after a launch failed or was interrupted."""
    return self._requests.failure is None

  @property
  def has_arrivals(self) -> bool:
    """True if requests or cancellations arrived since the last launch."""
    return self._requests.has_news

  @property
  def is_busy(self) -> bool:
    """True while a request is open."""
    return len(self._requests) > 0

  def stats(self) -> EngineStats:
    """Returns counts and state."""
    scheduler, pools = self._scheduler, self._scheduler.pages.pools
    return EngineStats(
      waiting=len(scheduler.waiting) + self._requests.arrivals,
      running=sum(s is not None for s in scheduler.running),
      pages_total=sum(pool.size for pool in pools),
      pages_free=sum(pool.available for pool in pools),
      pages_cached=sum(pool.kept for pool in pools),
      preemptions=scheduler.preemptions,
      prefix_hit_tokens=scheduler.hit_tokens,
      **self._launches.counts,
    )

  def audit(self) -> None:
    """Checks that no page is lost; raises AssertionError."""
    self._scheduler.pages.audit(self._scheduler.active())

  def _die(self, error: BaseException) -> None:
    self._requests.fail(error)
    self._device.close()
