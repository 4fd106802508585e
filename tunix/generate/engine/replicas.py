"""Several engines with the same weights, each on its own devices, behind one driver.

A replica is an engine with its driver's thread. `Replicas` has the interface of one
`Driver`, and `Replicas.engine` that of one `Engine`, as far as a server uses them:
requests go to one replica, calls to all of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from tunix.generate.engine import adapter_sources, prefix_routing
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver, PauseMode
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.placed import PlacedEngine
from tunix.generate.engine.prefix_routing import PrefixIndex
from tunix.generate.engine.request import EngineDead, EngineRequest, Ticket
from tunix.generate.engine.stats import EngineStats
from tunix.utils import mesh as mesh_lib

T = TypeVar("T")

# Pages of a prompt that are compared. The thread that submits hashes them, and prompts
# that agree in this number of pages belong to the same replica anyway.
_MOST_PAGES = 1024
_SPARE = 1.0  # seconds for threads to return after their own time limit


def groups(replicas: int, tp: int, devices: Sequence[Any] | None = None) -> list[Mesh]:
  """Returns one mesh for each replica, over its own devices.

  Args:
    replicas: number of replicas.
    tp: number of devices of a replica, over which its weights and heads are split.
    devices: the devices to use; None: those of this process.

  Raises:
    ValueError: there are too few devices, or a number is below 1.
  """
  devices = list(jax.local_devices()) if devices is None else list(devices)
  if replicas < 1 or tp < 1:
    raise ValueError(f"replicas is {replicas} and tp {tp}, expected at least 1 each")
  if replicas * tp > len(devices):
    raise ValueError(
      f"{replicas} replicas of {tp} devices need {replicas * tp} devices, and this "
      f"process has {len(devices)}: lower replicas or tp"
    )
  return [
    mesh_lib.create_mesh({"tp": tp}, devices[n * tp : (n + 1) * tp])
    for n in range(replicas)
  ]


class Replicas:
  """The drivers of several engines, with the interface of one `Driver`.

  A replica that fails answers its requests with `EngineDead`, and the others go on.

  Args:
    drivers: one driver for each replica, over engines of equal configuration.

  Attributes:
    drivers: the drivers.
    engine: submits requests to the replicas, see `Router`.
  """

  def __init__(self, drivers: Sequence[Driver]):
    if not drivers:
      raise ValueError("drivers is empty, expected at least one replica")
    self.drivers = tuple(drivers)
    self.engine = Router(self.drivers)

  @classmethod
  def of_model(
    cls,
    model: Any,
    tokenizer: Any,
    config: EngineConfig,
    meshes: Sequence[Mesh],
    draft_model: Any = None,
  ) -> Replicas:
    """Makes one replica on each mesh.

    Args:
      model: the model, on any devices.
      tokenizer, config: see `Engine`. The sizes are those of each replica.
      meshes: the meshes, see `groups`.
      draft_model: see `Engine`; on any devices.
    """
    engines = [PlacedEngine(model, tokenizer, config, x, draft_model) for x in meshes]
    return cls([Driver(engine, mesh=mesh) for engine, mesh in zip(engines, meshes)])

  @property
  def alive(self) -> bool:
    """True while the thread of at least one replica runs."""
    return any(driver.alive for driver in self.drivers)

  @property
  def failure(self) -> BaseException | None:
    """The exception that ended a replica, once all of them failed; else None."""
    failures = [driver.failure for driver in self.drivers]
    return failures[0] if all(failures) else None

  @property
  def degraded(self) -> str | None:
    """Names the replicas that get no requests; None if all of them serve."""
    return self.engine.degraded

  @property
  def is_paused(self) -> bool:
    """True while a replica that runs is paused."""
    return any(driver.is_paused for driver in self.drivers if driver.alive)

  def start(self) -> None:
    """Starts the thread of each replica."""
    for driver in self.drivers:
      driver.start()

  def stop(self, timeout: float) -> None:
    """Ends all threads, and the requests that are still open.

    Args:
      timeout: seconds to wait for all threads together.

    Raises:
      TimeoutError: a launch did not end in time.
    """
    self._on_each(self.drivers, lambda driver, left: driver.stop(left), timeout)

  def call(self, function: Callable[[Engine], T], timeout: float) -> T:
    """Runs `function(engine)` on every replica that runs, each between two launches.

    Args:
      function: what to run; it must do the same on each replica.
      timeout: seconds to wait for all replicas together.

    Returns:
      The result of the first replica that runs.

    Raises:
      TimeoutError, EngineDead: as `Driver.call`.
      Exception: the error of the first replica that raised one. The others may have
        run the function. A replica whose weights or adapters then differ gets no
        requests until a later call brings it to the state of the others.
    """

    def run(driver, left):
      return driver.call(function, left)

    return self._on_each(self._running(), run, timeout)[0]

  def pause(self, mode: PauseMode = "keep", timeout: float = 600.0) -> None:
    """Pauses all replicas; see `Driver.pause`. If one cannot be paused, none is."""
    running = self._running()
    try:
      self._on_each(running, lambda driver, left: driver.pause(mode, left), timeout)
    except BaseException:
      for driver in running:
        with contextlib.suppress(EngineDead):
          driver.resume()
      raise

  def resume(self) -> None:
    """Goes on after `pause`."""
    for driver in self._running():
      with contextlib.suppress(EngineDead):  # it failed meanwhile; the others go on
        driver.resume()

  # Before `start`, in the thread of the caller.

  def load_adapter(self, name: str, source: adapter_sources.Source) -> None:
    """Loads an adapter on each replica; after `start` only through `call`."""
    for engine in self._engines():
      engine.load_adapter(name, source)

  def warm_up(self, **options: Any) -> None:
    """Compiles the programs of each replica; see `Engine.warm_up`."""
    for engine in self._engines():
      engine.warm_up(**options)

  def _engines(self) -> Iterator[Engine]:
    for driver in self.drivers:
      with mesh_lib.use_mesh(driver.mesh):
        yield driver.engine

  def _running(self) -> tuple[Driver, ...]:
    running = tuple(driver for driver in self.drivers if driver.alive)
    if not running:
      raise EngineDead(f"no replica runs: {self.failure or 'start them first'}")
    return running

  @staticmethod
  def _on_each(
    drivers: Sequence[Driver], function: Callable[[Driver, float], T], timeout: float
  ) -> list[T]:
    """Runs a function on the drivers at the same time; raises the first error."""
    end = time.monotonic() + timeout

    def left():
      return max(0.0, end - time.monotonic())

    outcomes = [concurrent.futures.Future() for _ in drivers]

    def work(driver: Driver, outcome: concurrent.futures.Future) -> None:
      try:
        outcome.set_result(function(driver, left()))
      except BaseException as error:  # it is raised again where the result is read
        outcome.set_exception(error)

    for pair in zip(drivers, outcomes):
      # A daemon, because a driver that hangs must not keep the process alive.
      threading.Thread(target=work, args=pair, daemon=True).start()
    concurrent.futures.wait(outcomes, left() + _SPARE)
    late = sum(not outcome.done() for outcome in outcomes)
    if late:
      raise TimeoutError(f"{late} of {len(drivers)} replicas took over {timeout:g} s")
    return [outcome.result() for outcome in outcomes]


class Router:
  """Submits requests to replicas, with the interface of one `Engine`.

  A request goes to the replica that received the longest prefix of its prompt, and
  among equals to the one with the least load. A replica without a free slot is passed
  over while another one has a free slot.

  Args:
    drivers: the drivers of the replicas.

  Attributes:
    config: sizes of each replica.
    tokenizer: the adapter.
    vocab_size: V, the number of ids of the model.
  """

  def __init__(self, drivers: Sequence[Driver]):
    self._drivers = drivers
    first = drivers[0].engine
    self.config, self.tokenizer = first.config, first.tokenizer
    self.vocab_size = first.vocab_size
    # As many digests as the replicas have pages: more are in no cache.
    self._index = PrefixIndex(self.config.pages * len(drivers))
    self._lock = threading.Lock()
    self._members: weakref.WeakKeyDictionary[Ticket, int] = weakref.WeakKeyDictionary()

  @property
  def version(self) -> int:
    """Number of the weights that serve requests."""
    return self._drivers[self._serving()[0]].engine.version

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names of the adapters that serve requests."""
    return self._drivers[self._serving()[0]].engine.adapters

  def submit(self, request: EngineRequest, streams: bool = True) -> Ticket:
    """Puts a request into the queue of one replica; see `Engine.submit`.

    Raises:
      ValueError: the request can never run.
      EngineDead: no replica runs.
    """
    refused: set[int] = set()
    while True:
      member, digests = self._choose(request, refused)
      try:
        ticket = self._drivers[member].engine.submit(request, streams)
      except EngineDead:  # since it was chosen; nothing of the request has run
        refused.add(member)
        continue
      with self._lock:
        self._members[ticket] = member
        self._index.record(digests, member)
      return ticket

  def cancel(self, ticket: Ticket) -> None:
    """Ends a request; see `Engine.cancel`."""
    with self._lock:
      member = self._members.get(ticket)
    if member is not None:
      self._drivers[member].engine.cancel(ticket)

  def stats(self) -> EngineStats:
    """Returns the sums of all replicas."""
    parts = [dataclasses.asdict(driver.engine.stats()) for driver in self._drivers]
    return EngineStats(**{name: sum(p[name] for p in parts) for name in parts[0]})

  @property
  def degraded(self) -> str | None:
    """See `Replicas.degraded`."""
    serving, total = self._serving(), len(self._drivers)
    problems = []
    for number, driver in enumerate(self._drivers):
      if number in serving and driver.alive:
        continue
      problem = "other weights or adapters than the rest"
      if not driver.alive:
        problem = str(driver.failure or "the thread does not run")
      problems.append(f"replica {number} of {total}: {problem}")
    return "; ".join(problems) or None

  def _choose(
    self, request: EngineRequest, refused: set[int]
  ) -> tuple[int, list[prefix_routing.Digest]]:
    """Returns a replica, and the digests of the request's prompt."""
    able = [m for m in self._serving() if m not in refused and self._drivers[m].alive]
    if not able:
      failures = [driver.failure for driver in self._drivers if driver.failure]
      raise EngineDead(f"no replica runs: {failures[0] if failures else 'all stopped'}")
    loads = {}
    for member in able:
      stats = self._drivers[member].engine.stats()
      loads[member] = stats.waiting + stats.running
    least, slots = min(loads.values()), self.config.slots
    most = slots - 1 if least < slots else least + slots - 1
    digests = self._digests(request)
    with self._lock:
      lengths = self._index.lengths(digests, able)
    return prefix_routing.choose(lengths, loads, most), digests

  def _digests(self, request: EngineRequest) -> list[prefix_routing.Digest]:
    """Returns the digests of the pages that a replica can share."""
    if request.prompt_logprobs or not self.config.prefix_cache:
      return []  # all of the prompt is prefilled anywhere
    size, data = self.config.page_tokens, request.prompt.tobytes()
    count = min((len(request.prompt) - 1) // size, _MOST_PAGES)
    width = size * request.prompt.itemsize
    blocks = (data[n * width : (n + 1) * width] for n in range(count))
    root = repr((self.version, request.adapter)).encode()
    return prefix_routing.chained(root, blocks)

  def _serving(self) -> list[int]:
    """Returns the replicas of the state that most of those that run have.

    After a call that failed on some replicas, they differ in weights or adapters.
    """
    alive = [n for n, driver in enumerate(self._drivers) if driver.failure is None]
    states = [_state(self._drivers[n].engine) for n in alive]
    if not states:
      return [0]  # its engine still names a version
    # Among equals `max` takes the first.
    most = max(states, key=states.count)
    return [n for n, state in zip(alive, states) if state == most]


def _state(engine: Engine) -> tuple[int, frozenset[str]]:
  return engine.version, frozenset(engine.adapters)
