"""Limits of a tenant, which are checked before a request is accepted."""

from __future__ import annotations

from tunix.tinker.errors import BusyError, QuotaError
from tunix.tinker.learning.learner import AdapterSpec, Learner
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state.checkpoints import Checkpoints
from tunix.tinker.state.records import Records
from tunix.tinker.work.sampling import Sampler
from tunix.tinker.work.worker import Worker
from tunix.utils import terminal


class Quotas:
  """Compares what a tenant has with the limits of the settings.

  Args:
    settings: the limits.
    learner: it knows the size of an adapter.
    store: the checkpoints.
    records: the sessions.
    worker: the runs.
    sampler: the requests for samples; None: there are none.
  """

  def __init__(
    self,
    settings: TinkerSettings,
    *,
    learner: Learner,
    store: Checkpoints,
    records: Records,
    worker: Worker,
    sampler: Sampler | None,
  ):
    self._limits, self._learner, self._store = settings, learner, store
    self._records, self._worker, self._sampler = records, worker, sampler

  def check_rank(self, rank: int) -> None:
    """Raises QuotaError if a rank is above the limit."""
    if rank > self._limits.max_rank:
      raise QuotaError(
        f"rank is {rank}; expected at most {self._limits.max_rank}, the limit of this "
        "service. Choose a smaller rank"
      )

  def check_model(self, tenant: str, spec: AdapterSpec) -> None:
    """Raises QuotaError if the tenant has no room for one more model."""
    limits, runs = self._limits, self._worker.runs(tenant)
    if len(runs) >= limits.max_runs:
      raise QuotaError(
        f"the tenant has {len(runs)} models, with those that were unloaded; expected "
        f"fewer than the limit of {limits.max_runs}. Ask for a service with another "
        "root or a higher max_runs"
      )
    mine = [x for x in runs if not x.is_unloaded]
    if len(mine) >= limits.max_models:
      raise QuotaError(
        f"the tenant has {len(mine)} loaded models; expected fewer than the limit of "
        f"{limits.max_models}. Unload one with unload_model"
      )
    used = sum(self._learner.size_bytes(x.spec) for x in mine)
    size = self._learner.size_bytes(spec)
    if used + size > limits.max_bytes:
      raise QuotaError(
        f"an adapter of rank {spec.rank} takes {size:,} bytes in training, and the "
        f"tenant's models take {used:,}; expected at most {limits.max_bytes:,} "
        "together. Choose a smaller rank, or unload a model"
      )

  def check_pending(self, tenant: str) -> None:
    """Raises BusyError if as many requests of the tenant wait as may, or large ones."""
    runs = self._worker.runs(tenant)
    used = sum(x.pending_bytes for x in runs)
    if used >= self._limits.max_pending_bytes:
      raise BusyError(
        f"the tenant's waiting requests have {used:,} bytes; expected fewer than the "
        f"limit of {self._limits.max_pending_bytes:,}. Send the request again later"
      )
    waiting = sum(x.pending for x in runs)
    if self._sampler is not None:
      waiting += self._sampler.pending(tenant)
    if waiting >= self._limits.max_pending:
      raise BusyError(
        f"the tenant has {terminal.counted(waiting, 'waiting request')}; expected "
        f"fewer than the limit of {self._limits.max_pending}. Send the request again "
        "later"
      )

  def check_checkpoints(self, tenant: str) -> None:
    """Raises QuotaError if the tenant has no room for one more checkpoint."""
    count = len(self._store.named([x.id for x in self._worker.runs(tenant)]))
    if count >= self._limits.max_checkpoints:
      raise QuotaError(
        f"the tenant has {count} checkpoints; expected fewer than the limit of "
        f"{self._limits.max_checkpoints}. Delete some"
      )
