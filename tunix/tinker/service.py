"""The training service: tenants, sessions, runs and futures, without HTTP.

A request is checked, written to disk and queued in the thread of the caller. One thread
computes the requests of all runs in turn, each run's in the order of their numbers. A
future is the id of a request; `result` returns what was computed for it.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import secrets
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.models.transformer.model import Transformer
from tunix.tinker import checkpoints, data, operations, sampling
from tunix.tinker.checkpoints import Checkpoints, Place
from tunix.tinker.errors import (
  BusyError,
  NotServedError,
  QuotaError,
  ServiceFailedError,
  TinkerError,
)
from tunix.tinker.executor import Executor, adapters_of
from tunix.tinker.learner import AdapterSpec, Learner
from tunix.tinker.records import Records, missing, now
from tunix.tinker.runs import Op, Result, Run
from tunix.tinker.sampling import Sampler
from tunix.tinker.settings import TinkerSettings

_LOG = logging.getLogger(__name__)
_SEEDS = 2**31  # seeds that the service draws
_IDLE = 60.0  # seconds between two looks of an idle thread


class Service:
  """Trains and samples the adapters of many tenants.

  Args:
    model: the base model, without adapters. It is unchanged.
    settings: files and limits; None: the defaults.
    name: name of the base model in requests.
    driver: the started driver of an engine with the base model; None: requests for
      samples are refused.

    tokenizer_name: name of its tokenizer for clients; None: `name`.

  Attributes:
    settings, name, model, tokenizer_name: as given.
    max_context: most tokens of a prompt and its completion; None without an engine.
  """

  def __init__(
    self,
    model: Transformer,
    settings: TinkerSettings | None = None,
    *,
    name: str = "base",
    driver: Any = None,
    tokenizer_name: str | None = None,
  ):
    self.tokenizer_name = name if tokenizer_name is None else tokenizer_name
    self.settings = settings = TinkerSettings() if settings is None else settings
    self.name, self.model = name, model
    self._temporary = tempfile.TemporaryDirectory() if settings.root is None else None
    self._root = settings.root or pathlib.Path(self._temporary_name())
    self._records = Records(self._root)
    self._learner = Learner(
      model, alpha=settings.lora_alpha, batch_tokens=settings.batch_tokens
    )
    self._store = Checkpoints(self._root / "checkpoints", name)
    self._changed = threading.Condition()
    self._listeners: list[Callable[[], None]] = []
    self._stops, self._failure = False, None
    self._sampler: Sampler | None = None
    self.max_context: int | None = None
    if driver is not None:
      self.max_context = driver.engine.config.max_tokens
      self._sampler = Sampler(
        driver, self._root / "samples", self._adapters_of, self._ring
      )
    hand_over = self._sampler.hand_over if self._sampler else lambda *_: None
    self._executor = Executor(
      self._learner, self._store, settings.keep_samplers, hand_over
    )
    self._runs: dict[str, Run] = {}
    (self._root / "runs").mkdir(exist_ok=True)
    for folder in sorted((self._root / "runs").iterdir()):
      if (folder / "info.json").exists():  # else a kill came before it was written
        run = Run(folder, settings.keep_results)
        self._runs[run.id] = run
    self._thread = threading.Thread(target=self._work, name="tunix tinker", daemon=True)
    self._thread.start()

  def _temporary_name(self) -> str:
    assert self._temporary is not None
    return self._temporary.name

  def close(self) -> None:
    """Ends the threads. Requests that wait are computed after the next start."""
    with self._changed:
      self._stops = True
      self._changed.notify_all()
    self._thread.join()
    if self._sampler is not None:
      self._sampler.close()
    for run in self._runs.values():
      run.close()
    if self._temporary is not None:
      self._temporary.cleanup()

  def listen(self, listener: Callable[[], None]) -> None:
    """Has a function called after each result, in any thread."""
    self._listeners.append(listener)

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
    with self._changed:
      runs = [x for x in self._runs if x.startswith(f"{id}:")]
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
    spec = AdapterSpec(**self._store.meta(place)["spec"])
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
    if spec.rank > self.settings.max_rank:
      raise QuotaError(
        f"rank is {spec.rank}; expected at most {self.settings.max_rank}, the limit of "
        "this service. Choose a smaller rank"
      )
    self._records.session(tenant, session)
    with self._changed:
      id = f"{session}:train:{int(number)}"
      if id not in self._runs:
        self._check_quota(tenant, spec)
        info = {
          "id": id,
          "owner": tenant,
          "spec": dataclasses.asdict(spec),
          "seed": secrets.randbelow(_SEEDS) if seed is None else int(seed),
          "metadata": dict(metadata or {}),
          "time": now(),
        }
        folder = self._root / "runs" / urllib.parse.quote(id, safe="")
        self._runs[id] = Run.create(folder, info, self.settings.keep_results)
      self._runs[id].accept(0, op)
      self._changed.notify_all()
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

  def _check_quota(self, tenant: str, spec: AdapterSpec) -> None:
    mine = [x for x in self._runs.values() if x.owner == tenant and not x.is_unloaded]
    limits = self.settings
    if len(mine) >= limits.max_models:
      raise QuotaError(
        f"the tenant has {len(mine)} loaded models; expected fewer than the limit of "
        f"{limits.max_models}. Unload one (DELETE of the run, or unload_model)"
      )
    used = sum(self._learner.size_bytes(x.spec) for x in mine)
    wanted = self._learner.size_bytes(spec)
    if used + wanted > limits.max_bytes:
      raise QuotaError(
        f"an adapter of rank {spec.rank} takes {wanted:,} bytes in training, and the "
        f"tenant's models take {used:,}; expected at most {limits.max_bytes:,} "
        "together. Choose a smaller rank, or unload a model"
      )

  def run(self, tenant: str, id: str) -> Run:
    """Returns a run of a tenant.

    Raises:
      NotFoundError: the tenant has no such run.
    """
    with self._changed:
      return self._run(tenant, id)

  def runs(self, tenant: str) -> list[Run]:
    """Returns the runs of a tenant, the newest first."""
    with self._changed:
      mine = [x for x in self._runs.values() if x.owner == tenant]
    return sorted(mine, key=lambda x: x.info["time"], reverse=True)

  # Requests to a run.

  def forward_backward(
    self,
    tenant: str,
    model: str,
    number: int,
    read_rows: Callable[[], Sequence[data.Row]],
    loss: str,
    config: Mapping[str, object] | None = None,
    *,
    backward: bool = True,
  ) -> str:
    """Queues a loss and its gradient; returns the id of the future.

    The same rows, weights and number always give the same bits. A request with wrong
    data is accepted, and its future fails, because later numbers wait for it.

    Args:
      tenant: name of the tenant.
      model: id of the model.
      number: number of the request, from 1 on without gaps.
      read_rows: returns the data; a TinkerError becomes the result of the future.
      loss: name of the loss.
      config: its configuration.
      backward: compute the gradient, and add it to the model's.

    Raises:
      NotFoundError: the tenant has no such model.
      BusyError: too many requests of the tenant wait.
      ConflictError: another request had this number.
    """

    def make() -> Op:
      return operations.gradient(
        read_rows(),
        loss,
        config,
        backward=backward,
        vocab_size=self.model.config.vocab_size,
        max_tokens=self.settings.max_tokens,
      )

    return self.submit(tenant, model, number, make)

  def optim_step(
    self, tenant: str, model: str, number: int, params: Mapping[str, Any]
  ) -> str:
    """Queues an AdamW update with the gradients since the last one."""

    return self.submit(tenant, model, number, lambda: operations.update(params))

  def save_weights(
    self,
    tenant: str,
    model: str,
    number: int,
    name: str | None,
    *,
    overwrite: bool = False,
    ttl_seconds: int | None = None,
    metadata: Mapping[str, str] | None = None,
  ) -> str:
    """Queues a checkpoint of adapter and optimizer."""

    def make() -> Op:
      self._check_checkpoints(tenant)
      return operations.save(
        f"{number:06d}" if name is None else name,
        overwrite=overwrite,
        ttl_seconds=ttl_seconds,
        metadata=metadata,
      )

    return self.submit(tenant, model, number, make)

  def save_weights_for_sampler(
    self,
    tenant: str,
    model: str,
    number: int,
    name: str | None,
    *,
    sampler_number: int | None = None,
    ttl_seconds: int | None = None,
    metadata: Mapping[str, str] | None = None,
  ) -> str:
    """Queues a checkpoint for sampling.

    Args:
      tenant, model, number: see `forward_backward`.
      name: name of the checkpoint; None makes one for a single sampling session.
      sampler_number: number of that session.
      ttl_seconds: life of the checkpoint; None: no end.
      metadata: JSON values of the user.
    """

    def make() -> Op:
      self._check_checkpoints(tenant)
      session, chosen = None, name
      if chosen is None:
        chosen = f"session-{number:06d}"
        count = number if sampler_number is None else sampler_number
        path = str(Place(model, "sampler_weights", chosen))
        owner = model.partition(":")[0]
        session = self._records.create_sampler(tenant, owner, count, path, self.name)
      return operations.save_for_sampler(
        chosen, session=session, ttl_seconds=ttl_seconds, metadata=metadata
      )

    return self.submit(tenant, model, number, make)

  def load_weights(
    self, tenant: str, model: str, number: int, path: str, *, optimizer: bool
  ) -> str:
    """Queues the load of a checkpoint into a model of the same shape."""

    def make() -> Op:
      self.place(tenant, path)
      return operations.load(path, optimizer=optimizer)

    return self.submit(tenant, model, number, make)

  def unload_model(self, tenant: str, model: str) -> str:
    """Queues the end of a model after its requests so far; checkpoints stay."""
    with self._changed:
      run = self._run(tenant, model)
      number = run.last + 1
    return self.submit(tenant, model, number, lambda: Op(kind="unload_model"))

  def submit(self, tenant: str, model: str, number: int, make: Callable[[], Op]) -> str:
    """Queues a request.

    Args:
      tenant, model, number: see `forward_backward`.
      make: makes the request; a TinkerError becomes the result of the future.
    """
    number = int(number)
    if number < 1:
      raise TinkerError(f"seq_id is {number}; expected at least 1. Count from 1")
    with self._changed:
      run = self._run(tenant, model)
    try:
      op = make()
    except TinkerError as error:
      op = operations.refused(error)
    with self._changed:
      self.check_alive()
      if not run.is_known(number):
        self._check_pending(tenant)
      run.accept(number, op)
      self._changed.notify_all()
    return f"{model}:{number}"

  def _check_pending(self, tenant: str) -> None:
    waiting = sum(x.pending for x in self._runs.values() if x.owner == tenant)
    if self._sampler is not None:
      waiting += self._sampler.pending(self._records.sessions(tenant))
    if waiting >= self.settings.max_pending:
      raise BusyError(
        f"{waiting} requests of the tenant wait; expected fewer than the limit of "
        f"{self.settings.max_pending}. Send the request again later"
      )

  def _check_checkpoints(self, tenant: str) -> None:
    count = sum(1 for _ in self.checkpoints(tenant))
    if count >= self.settings.max_checkpoints:
      raise QuotaError(
        f"the tenant has {count} checkpoints; expected fewer than the limit of "
        f"{self.settings.max_checkpoints}. Delete some"
      )

  # Sampling.

  def create_sampling_session(
    self, tenant: str, session: str, number: int, path: str | None
  ) -> str:
    """Returns the id of a session that samples from a checkpoint, or from the base.

    Args:
      tenant: name of the tenant.
      session: id of its session.
      number: number of the sampling session in it.
      path: path of a checkpoint; None: the base model.

    Raises:
      NotFoundError: the tenant has no such session or checkpoint.
    """
    if path is not None:
      self._store.meta(self.place(tenant, path))
    return self._records.create_sampler(tenant, session, number, path, self.name)

  def sampler(self, tenant: str, id: str) -> dict[str, Any]:
    """Returns a sampling session.

    Raises:
      NotFoundError: the tenant has no such session.
    """
    return self._records.sampler(tenant, id)

  def sample(
    self,
    tenant: str,
    sampler: str,
    number: int,
    prompt: np.ndarray,
    args: Mapping[str, Any],
  ) -> str:
    """Queues completions of a prompt; returns the id of the future.

    Args:
      tenant: name of the tenant.
      sampler: id of the sampling session.
      number: number of the request in it.
      prompt: ids of the prompt, int [T].
      args: further fields of the protocol's request.

    Raises:
      NotFoundError: the tenant has no such session.
      NotServedError: there is no engine, or a field that this service does not have.
      BusyError: too many requests of the tenant wait.
      TinkerError: wrong data.
    """
    if self._sampler is None or self.max_context is None:
      raise NotServedError(
        "this service was made without an engine; expected one for samples. Give the "
        "service a driver"
      )
    record = self.sampler(tenant, sampler)
    prompt = np.asarray(prompt, np.int32)
    try:
      checked = sampling.check(args, prompt, self.max_context)
    except (TypeError, ValueError, AttributeError) as error:
      raise TinkerError(f"a field has another type: {error}. Correct it") from error
    with self._changed:
      self._check_pending(tenant)
    op = Op(
      kind="sample", args={**checked, "path": record["path"]}, arrays={"prompt": prompt}
    )
    id = f"{sampler}:{int(number)}"
    self._sampler.accept(id, op)
    return id

  def cancel(self, tenant: str, id: str) -> None:
    """Ends a sampling request early."""
    self.sampler(tenant, id.rpartition(":")[0])
    if self._sampler is not None:
      self._sampler.cancel(id)

  # Futures.

  def result(self, tenant: str, id: str) -> Result | None:
    """Returns the result of a request, or None if it is not computed yet.

    Raises:
      NotFoundError: the tenant has no such request.
      GoneError: the result was retrieved and then dropped.
    """
    owner, _, number = id.rpartition(":")
    if not number.isdigit():
      raise missing("request", id)
    with self._changed:
      if owner in self._runs:
        found = self._run(tenant, owner).result(int(number))
        if found is None:
          self.check_alive()
        return found
    self.sampler(tenant, owner)
    if self._sampler is None:
      raise missing("request", id)
    return self._sampler.result(id)

  def wait(self, tenant: str, id: str, seconds: float | None = None) -> Result | None:
    """Waits for the result of a request, at most some seconds."""
    with self._changed:
      # The sampler rings with the same condition.
      self._changed.wait_for(
        lambda: self._stops or self.result(tenant, id) is not None, seconds
      )
    return self.result(tenant, id)

  def check_alive(self) -> None:
    """Checks that requests are computed.

    Raises:
      ServiceFailedError: the thread has ended, for example because the disk is full.
    """
    if self._failure is not None:
      raise ServiceFailedError(
        f"the service failed: {self._failure}; expected a running thread. Correct the "
        "cause and restart the server, which continues all requests"
      ) from self._failure

  def is_short(self, id: str) -> bool:
    """Returns True if a sampling request waits for room in the engine."""
    return self._sampler is not None and ":sample:" in id and self._sampler.is_short()

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
    ids = (
      [x.id for x in self.runs(tenant)] if run is None else [self.run(tenant, run).id]
    )
    found = [x for id in ids for x in self._store.of_run(id)]
    return [(place, meta) for place, meta in found if not meta["is_ephemeral"]]

  @property
  def store(self) -> Checkpoints:
    """The checkpoints; `place` checks access to a path."""
    return self._store

  # The thread.

  def _work(self) -> None:
    try:
      self._compute()
    except BaseException as error:  # of the disk: waiting clients must hear of it
      _LOG.exception("the training service failed")
      self._failure = error
      self._ring()

  def _compute(self) -> None:
    """Computes requests until `close`; the runs take turns."""
    turn = 0
    while True:
      with self._changed:
        found = None
        while not self._stops:
          runs = list(self._runs.values())
          order = [runs[(turn + i) % len(runs)] for i in range(len(runs))]
          found = next(((x, x.next()) for x in order if x.next() is not None), None)
          if found is not None:
            turn = (runs.index(found[0]) + 1) % len(runs)
            break
          self._changed.wait(_IDLE)
        if self._stops or found is None or found[1] is None:
          return
        run, (number, op) = found[0], found[1]
        known = run.results.get(number)
      result, is_whole = self._executor.execute(run, op, known)
      with self._changed:
        run.finish(number, result)
        # Repeating these after a restart would be wrong: the checkpoint may be gone.
        if op.kind in ("load_weights", "unload_model") and result.error is None:
          run.write_state(self._executor.arrays_of(run))
          run.switch()
        if not is_whole:
          run.close()
          self._runs[run.id] = Run(run.folder, self.settings.keep_results)
      self._ring()
      if is_whole and run.is_due(self.settings.snapshot_steps):
        run.write_state(self._executor.arrays_of(run))
        with self._changed:
          run.switch()

  def _ring(self) -> None:
    with self._changed:
      self._changed.notify_all()
    for listener in self._listeners:
      listener()

  def _run(self, tenant: str, id: str) -> Run:
    run = self._runs.get(id)
    if run is None or run.owner != tenant:
      raise missing("model", id)
    return run

  def _adapters_of(self, place: Place) -> dict[str, Any]:
    return adapters_of(self._learner, self._store, place)
