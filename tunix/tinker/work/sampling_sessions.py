"""Sampling sessions: who samples, from which checkpoint, and the requests of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.tinker.errors import NotServedError, TinkerError
from tunix.tinker.protocol import sampling_values
from tunix.tinker.protocol.results import Result
from tunix.tinker.state.records import Records, missing
from tunix.tinker.state.runs import Op
from tunix.tinker.work.sampling import Sampler


class SamplingSessions:
  """The sampling sessions of all tenants.

  Args:
    records: their records.
    base: name of the base model.
    sampler: computes the requests; None: requests are refused.
    engine: sizes of its engine; None without one.
    check_path: raises NotFoundError if a tenant has no checkpoint with a path.
    check_pending: raises BusyError if too many requests of a tenant wait.
    max_tokens: see `TinkerSettings.max_request_tokens`.

  Attributes:
    engine: sizes of the engine; None without one.
  """

  def __init__(
    self,
    records: Records,
    base: str,
    *,
    sampler: Sampler | None,
    engine: EngineConfig | None,
    check_path: Callable[[str, str], object],
    check_pending: Callable[[str], None],
    max_tokens: int,
  ):
    self._records, self._base, self._sampler = records, base, sampler
    self.engine, self._max_tokens = engine, max_tokens
    self._check_path, self._check_pending = check_path, check_pending

  def create(self, tenant: str, session: str, number: int, path: str | None) -> str:
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
      self._check_path(tenant, path)
    return self._records.create_sampler(tenant, session, number, path, self._base)

  def record(self, tenant: str, id: str) -> dict[str, Any]:
    """Returns a sampling session.

    Raises:
      NotFoundError: the tenant has no such session.
    """
    return self._records.sampler(tenant, id)

  def sample(
    self,
    tenant: str,
    session: str,
    number: int,
    prompt: np.ndarray,
    args: Mapping[str, Any],
  ) -> str:
    """Queues completions of a prompt; returns the id of the future.

    Args:
      tenant: name of the tenant.
      session: id of the sampling session.
      number: number of the request in it.
      prompt: ids of the prompt, int [T].
      args: further fields of the protocol's request.

    Raises:
      NotFoundError: the tenant has no such session.
      NotServedError: there is no engine, or a field that this service does not have.
      BusyError: too many requests of the tenant wait.
      TinkerError: wrong data.
    """
    if self._sampler is None or self.engine is None:
      raise NotServedError(
        "this service was made without an engine; expected one for samples. Give the "
        "service a driver"
      )
    record = self.record(tenant, session)
    prompt = np.asarray(prompt, np.int32)
    try:
      checked = sampling_values.check(args, prompt, self.engine, self._max_tokens)
    except (TypeError, ValueError, AttributeError) as error:
      raise TinkerError(f"a field has another type: {error}. Correct it") from error
    self._check_pending(tenant)
    args = {**checked, "path": record["path"]}
    id = f"{session}:{int(number)}"
    self._sampler.accept(id, Op(kind="sample", args=args, arrays={"prompt": prompt}))
    return id

  def cancel(self, tenant: str, id: str) -> None:
    """Ends a sampling request early."""
    self.record(tenant, id.rpartition(":")[0])
    if self._sampler is not None:
      self._sampler.cancel(id)

  def result(self, tenant: str, id: str) -> Result | None:
    """Returns the result of a request; see `Service.result`."""
    self.record(tenant, id.rpartition(":")[0])
    if self._sampler is None:
      raise missing("request", id)
    return self._sampler.result(id)

  def is_short(self, id: str) -> bool:
    """Returns True if a sampling request waits for room in the engine."""
    return self._sampler is not None and ":sample:" in id and self._sampler.is_short()
