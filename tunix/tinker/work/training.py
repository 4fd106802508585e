"""Requests to the models of tenants, which the worker computes in order.

A request with wrong data is accepted, and its future fails, because later numbers wait
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tunix.tinker.errors import TinkerError
from tunix.tinker.learning import data
from tunix.tinker.protocol import fields
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state.checkpoints import Place
from tunix.tinker.state.records import Records
from tunix.tinker.state.runs import Op
from tunix.tinker.work import operations
from tunix.tinker.work.quotas import Quotas
from tunix.tinker.work.worker import Worker


class TrainingRequests:
  """Makes the requests of training loops, and queues them.

  Args:
    worker: computes the requests.
    quotas: the limits of tenants.
    records: the sampling sessions.
    base: name of the base model.
    vocab_size: number of its ids.
    limits: numbers of rows and tokens of a request.
    check_path: raises TinkerError if a tenant may not use a path of a checkpoint.
  """

  def __init__(
    self,
    worker: Worker,
    quotas: Quotas,
    records: Records,
    *,
    base: str,
    vocab_size: int,
    limits: TinkerSettings,
    check_path: Callable[[str, str], object],
  ):
    self._worker, self._quotas, self._records = worker, quotas, records
    self._base, self._vocab_size, self._limits = base, vocab_size, limits
    self._check_path = check_path

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
        vocab_size=self._vocab_size,
        limits=self._limits,
      )

    return self.submit(tenant, model, number, make)

  def optim_step(self, tenant: str, model: str, number: int, params: object) -> str:
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
      self._check_room(tenant, model, number)
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
      self._check_room(tenant, model, number)
      session, chosen = None, name
      if chosen is None:
        chosen = f"session-{number:06d}"
        count = number if sampler_number is None else sampler_number
        path = str(Place(model, "sampler_weights", chosen))
        owner = model.partition(":")[0]
        session = self._records.create_sampler(tenant, owner, count, path, self._base)
      return operations.save_for_sampler(
        chosen, session=session, ttl_seconds=ttl_seconds, metadata=metadata
      )

    return self.submit(tenant, model, number, make)

  def load_weights(
    self, tenant: str, model: str, number: int, path: str, *, optimizer: bool
  ) -> str:
    """Queues the load of a checkpoint into a model of the same shape."""

    def make() -> Op:
      self._check_path(tenant, path)
      return operations.load(path, optimizer=optimizer)

    return self.submit(tenant, model, number, make)

  def unload_model(self, tenant: str, model: str) -> str:
    """Queues the end of a model after its requests so far; checkpoints stay.

    The request has no number, so a model that is unloaded twice is unloaded once.
    """
    with self._worker.changed:  # until it is accepted, or the number may be taken
      run = self._worker.run(tenant, model)
      if run.unload is not None:
        return f"{model}:{run.unload}"
      number = run.last + 1
      return self.submit(tenant, model, number, lambda: Op(kind="unload_model"))

  def _check_room(self, tenant: str, model: str, number: int) -> None:
    """Raises QuotaError if a new request has no room for its checkpoint."""
    with self._worker.changed:
      is_repeated = self._worker.run(tenant, model).is_known(number)
    if not is_repeated:
      self._quotas.check_checkpoints(tenant)

  def submit(self, tenant: str, model: str, number: int, make: Callable[[], Op]) -> str:
    """Queues a request.

    Args:
      tenant, model, number: see `forward_backward`.
      make: makes the request; a TinkerError becomes the result of the future.
    """
    number = fields.integer({"seq_id": number}, "seq_id", least=1)
    self._worker.run(tenant, model)
    try:
      op = make()
    except TinkerError as error:
      op = operations.refused(error)
    with self._worker.changed:
      self._worker.check_alive()
      if not self._worker.run(tenant, model).is_known(number):
        self._quotas.check_pending(tenant)
      self._worker.accept(tenant, model, number, op)
    return f"{model}:{number}"
