"""The training service: tenants, sessions, runs and futures, without HTTP.

A request is checked, written to disk and queued in the thread of the caller. One thread
computes the requests of all runs in turn (work/worker.py), each run's in the order of
their numbers. A future is the id of a request; `result` returns what was computed for
it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import secrets
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from tunix.generate.engine.driver import Driver
from tunix.generate.engine.replicas import Replicas
from tunix.models.transformer.model import Transformer
from tunix.tinker.errors import TinkerError
from tunix.tinker.learning.learner import AdapterSpec, Learner
from tunix.tinker.protocol.results import Result
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state import checkpoints, journal
from tunix.tinker.state.checkpoints import Checkpoints, Place
from tunix.tinker.state.records import Records, missing, now
from tunix.tinker.state.runs import Op, Run
from tunix.tinker.work import operations
from tunix.tinker.work.executor import Executor, adapters_of
from tunix.tinker.work.quotas import Quotas
from tunix.tinker.work.sampling import Sampler
from tunix.tinker.work.sampling_sessions import SamplingSessions
from tunix.tinker.work.training import TrainingRequests
from tunix.tinker.work.worker import Worker
from tunix.utils import folder_lock

LOCK = ("serving", "root (--tinker_root)")  # arguments of `utils.folder_lock`
_SEEDS = 2**31  # seeds that the service draws


def check_files(settings: TinkerSettings) -> None:
  """Reads the files of a service, before a program loads its model for minutes.

  Raises:
    RuntimeError: another process or service uses their folder.
    RecordError: a file is damaged.
  """
  root = settings.root
  if root is None or not root.exists():
    return
  with folder_lock.hold(root, *LOCK):
    Records(root, settings.max_sessions)
    Worker(root / "runs", settings).close_files()
    samples = journal.opened(root / "samples" / "requests")
    collections.deque(samples.records(), maxlen=0)
    samples.close()


class Service:
  """Trains and samples the adapters of many tenants.

  Args:
    model: the base model, without adapters. It is unchanged.
    settings: files and limits; None: the defaults.
    name: name of the base model in requests.
    driver: the started driver of an engine with the base model; None: requests for
      samples are refused.
    tokenizer_name: name of its tokenizer for clients; None: `name`.

  Raises:
    RuntimeError: another process or service uses the folder of the files.
    RecordError: a file is damaged.

  Attributes:
    settings, name, model, tokenizer_name: as given.
    training: the requests to models.
    sampling: the sampling sessions and their requests.
    store: the checkpoints; `place` checks access to a path.
  """

  def __init__(
    self,
    model: Transformer,
    settings: TinkerSettings | None = None,
    *,
    name: str = "base",
    driver: Driver | Replicas | None = None,
    tokenizer_name: str | None = None,
  ):
    self.tokenizer_name = name if tokenizer_name is None else tokenizer_name
    self.settings = settings = TinkerSettings() if settings is None else settings
    self.name, self.model = name, model
    self._held = contextlib.ExitStack()
    root = settings.root
    if root is None:
      root = pathlib.Path(self._held.enter_context(tempfile.TemporaryDirectory()))
    self._held.enter_context(folder_lock.hold(root, *LOCK))
    self._records = Records(root, settings.max_sessions)
    learner = Learner(
      model, alpha=settings.lora_alpha, batch_tokens=settings.batch_tokens
    )
    self.store = store = Checkpoints(root / "checkpoints", name)
    self._worker = Worker(root / "runs", settings)
    self._sampler: Sampler | None = None
    if driver is not None:
      load = functools.partial(adapters_of, learner, store)
      self._sampler = Sampler(
        driver,
        root / "samples",
        load,
        self._worker.ring,
        self._records.sampling_tenant,
        settings.max_starts,
      )
      self._records.in_use = self._sampler.sessions
    self._quotas = Quotas(
      settings,
      learner=learner,
      store=store,
      records=self._records,
      worker=self._worker,
      sampler=self._sampler,
    )
    self.sampling = SamplingSessions(
      self._records,
      name,
      sampler=self._sampler,
      engine=None if driver is None else driver.engine.config,
      check_path=lambda tenant, path: store.meta(self.place(tenant, path)),
      check_pending=self._quotas.check_pending,
      max_tokens=settings.max_request_tokens,
    )
    self.training = TrainingRequests(
      self._worker,
      self._quotas,
      self._records,
      base=name,
      vocab_size=model.config.vocab_size,
      limits=settings,
      check_path=self.place,
    )
    hand_over = self._sampler.hand_over if self._sampler else lambda *_: None
    executor = Executor(learner, store, settings.keep_samplers, hand_over)
    self._worker.start(executor)

  def stop(self) -> None:
    """Begins no request, and counts no start of those that run."""
    self._worker.stop()
    if self._sampler is not None:
      self._sampler.stop()

  def close(self) -> None:
    """Ends the threads. Requests that wait are computed after the next start."""
    self.stop()
    self._worker.close()
    if self._sampler is not None:
      self._sampler.close()
    self._worker.close_files()
    self._held.close()

  def listen(self, listener: Callable[[], None]) -> None:
    """Has a function called after each result, in any thread."""
    self._worker.listen(listener)

  # Sessions.

  def create_session(self, tenant: str, metadata: Mapping[str, Any]) -> str:
    """Returns the id of a new session."""
    return self._records.create_session(tenant, metadata)

  def session(self, tenant: str, id: str) -> dict[str, Any]:
    """Returns a session with the ids of its runs and samplers.

    Raises:
      NotFoundError: the tenant has no such session.
    """
    record = self._records.session(tenant, id)
    runs = [x.id for x in self._worker.runs(tenant) if x.id.startswith(f"{id}:")]
    return {**record, "runs": runs, "samplers": self._records.samplers_of(id)}

  def sessions(self, tenant: str) -> list[str]:
    """Returns the ids of a tenant's sessions."""
    return self._records.sessions(tenant)

  # Runs.

  def create_model(
    self,
    tenant: str,
    session: str,
    number: int,
    spec: AdapterSpec,
    *,
    base_model: str | None = None,
    seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
  ) -> tuple[str, str]:
    """Creates a model with a fresh adapter; returns the ids of future and model.

    Args:
      tenant: name of the tenant.
      session: id of its session.
      number: number of the model in the session. A repeated call returns the same ids.
      spec: shape of the adapter.
      base_model: name of the base; None: the service's.
      seed: seed of the adapter; None: the service draws one.
      metadata: JSON values of the user.

    Raises:
      NotFoundError: the tenant has no such session.
      QuotaError: the tenant's models would be too many or too large.
      TinkerError: another base model, or a rank above the limit.
    """
    op = Op(kind="create_model")
    return self._create(tenant, session, number, spec, base_model, seed, metadata, op)

  def create_from_checkpoint(
    self,
    tenant: str,
    session: str,
    number: int,
    path: str,
    *,
    optimizer: bool,
    base_model: str | None = None,
    metadata: Mapping[str, Any] | None = None,
  ) -> tuple[str, str]:
    """Creates a model from a checkpoint; see `create_model`."""
    place = self.place(tenant, path)
    spec = AdapterSpec(**self.store.meta(place)["spec"])
    op = operations.load(path, optimizer=optimizer)
    return self._create(tenant, session, number, spec, base_model, 0, metadata, op)

  def _create(
    self,
    tenant: str,
    session: str,
    number: int,
    spec: AdapterSpec,
    base_model: str | None,
    seed: int | None,
    metadata: Mapping[str, Any] | None,
    op: Op,
  ) -> tuple[str, str]:
    self.check_base(base_model)
    self._quotas.check_rank(spec.rank)
    self._records.session(tenant, session)
    with self._worker.changed:
      id = f"{session}:train:{int(number)}"
      if not self._worker.is_run(id):
        self._quotas.check_model(tenant, spec)
        info = {
          "id": id,
          "owner": tenant,
          "spec": dataclasses.asdict(spec),
          "seed": secrets.randbelow(_SEEDS) if seed is None else int(seed),
          "metadata": dict(metadata or {}),
          "time": now(),
        }
        self._worker.create(info)
      self._worker.accept(tenant, id, 0, op)
    return f"{id}:0", id

  def check_base(self, base_model: str | None) -> None:
    """Refuses another base model than the service's.

    Raises:
      TinkerError: the name is another one.
    """
    if base_model is not None and base_model != self.name:
      raise TinkerError(
        f"base_model is {base_model[:200]!r}; expected {self.name!r}, the only "
        "model of this service. Correct the name, or serve the other model"
      )

  def run(self, tenant: str, id: str) -> Run:
    """Returns a run of a tenant.

    Raises:
      NotFoundError: the tenant has no such run.
    """
    return self._worker.run(tenant, id)

  def runs(self, tenant: str) -> list[Run]:
    """Returns the runs of a tenant, the newest first."""
    mine = self._worker.runs(tenant)
    return sorted(mine, key=lambda x: x.info["time"], reverse=True)

  # Futures.

  def result(self, tenant: str, id: str) -> Result | None:
    """Returns the result of a request, or None if it is not computed yet.

    Raises:
      NotFoundError: the tenant has no such request.
      GoneError: the result was retrieved and then dropped.
    """
    owner, _, number = id.rpartition(":")
    if not (number.isascii() and number.isdigit() and len(number) < 20):
      raise missing("request", id)
    with self._worker.changed:
      if self._worker.is_run(owner):
        result = self.run(tenant, owner).result(int(number))
        if result is None:
          self.check_alive()
        return result
    return self.sampling.result(tenant, id)

  def wait(self, tenant: str, id: str, seconds: float | None = None) -> Result | None:
    """Waits for the result of a request, at most some seconds."""
    worker = self._worker
    with worker.changed:
      # The sampler rings with the same condition.
      worker.changed.wait_for(
        lambda: worker.stops or self.result(tenant, id) is not None, seconds
      )
    return self.result(tenant, id)

  def check_alive(self) -> None:
    """Checks that requests are computed; see `Worker.check_alive`."""
    self._worker.check_alive()

  # Checkpoints.

  def place(self, tenant: str, path: str) -> Place:
    """Returns the parts of a path of the tenant's.

    Raises:
      NotFoundError: the path's run is not the tenant's.
      TinkerError: the path has another form.
    """
    place = checkpoints.parse(path)
    self.run(tenant, place.run)
    return place

  def checkpoints(
    self, tenant: str, run: str | None = None
  ) -> list[tuple[Place, dict[str, Any]]]:
    """Returns the named checkpoints of one run of a tenant, or of all its runs."""
    runs = self.runs(tenant) if run is None else [self.run(tenant, run)]
    return self.store.named([x.id for x in runs])
