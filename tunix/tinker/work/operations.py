"""Requests to a run, made of checked arguments.

Each function raises TinkerError for wrong arguments. The service turns the error into
the result of the request, because later requests of the run wait for its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.tinker.errors import NotServedError, QuotaError, TinkerError
from tunix.tinker.learning import data, losses
from tunix.tinker.learning.learner import AdamParams
from tunix.tinker.protocol import fields
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state import checkpoints
from tunix.tinker.state.runs import Op


def gradient(
  rows: Sequence[data.Row],
  loss: str,
  config: Mapping[str, object] | None,
  *,
  backward: bool,
  vocab_size: int,
  limits: TinkerSettings,
) -> Op:
  """Returns a forward or forward-backward request; see `data.check_rows`."""
  _check_size("rows", len(rows), limits.max_rows)
  _check_size("tokens", sum(x.tokens.size for x in rows), limits.max_request_tokens)
  targets = [x.inputs.get("target_tokens", x.tokens) for x in rows]
  _check_size("targets", sum(x.size for x in targets), limits.max_request_tokens)
  checked = data.check_rows(
    rows, loss, vocab_size=vocab_size, max_tokens=limits.max_tokens
  )
  return Op(
    kind="forward_backward" if backward else "forward",
    args={"loss_fn": loss, "config": losses.configured(loss, config)},
    arrays=data.to_arrays(checked),
  )


def _check_size(what: str, count: int, most: int) -> None:
  if count > most:
    raise QuotaError(
      f"the request has {count} {what}; expected at most {most}. Send several requests"
    )


def check_optimizer(config: object) -> None:
  """Refuses other optimizers than AdamW.

  Raises:
    NotServedError: another optimizer.
  """
  kind = config.get("type") if isinstance(config, dict) else None
  if kind not in (None, "adamw"):
    reason = ""
    if kind == "dimuon":
      reason = ", because we know no published formula of it"
    raise NotServedError(
      f"the optimizer is {str(kind)[:80]!r}, which this service does not have{reason}; "
      "expected adamw. Use AdamParams"
    )


def update(params: object) -> Op:
  """Returns an AdamW update, given the fields of `AdamParams`."""
  check_optimizer(params)
  try:
    checked = AdamParams(**fields.table({"adam_params": params}, "adam_params"))
  except (TypeError, ValueError) as error:
    raise TinkerError(f"adam_params: {str(error)[:500]}") from error
  return Op(kind="optim_step", args=dataclasses.asdict(checked))


def save(
  name: str,
  *,
  overwrite: bool,
  ttl_seconds: int | None,
  metadata: Mapping[str, str] | None,
) -> Op:
  """Returns a checkpoint of adapter and optimizer."""
  args = {**_saved(name, ttl_seconds, metadata), "overwrite": bool(overwrite)}
  return Op(kind="save_weights", args=args)


def save_for_sampler(
  name: str,
  *,
  session: str | None,
  ttl_seconds: int | None,
  metadata: Mapping[str, str] | None,
) -> Op:
  """Returns a checkpoint for sampling.

  Args:
    name: its name.
    session: id of the only sampling session that uses it; None: it has a name for all.
    ttl_seconds, metadata: see `Service.save_weights`.
  """
  args = _saved(name, ttl_seconds, metadata)
  if session is not None:
    args |= {"is_ephemeral": True, "sampling_session_id": session}
  return Op(kind="save_weights_for_sampler", args=args)


def _saved(
  name: str, ttl_seconds: int | None, metadata: Mapping[str, str] | None
) -> dict[str, Any]:
  return {
    "name": checkpoints.check_name(name),
    "user_metadata": None if metadata is None else dict(metadata),
    # Not the time of its end: a request that is sent again must have equal bytes.
    "ttl_seconds": checkpoints.check_ttl(ttl_seconds),
  }


def load(path: str, *, optimizer: bool) -> Op:
  """Returns the load of a checkpoint."""
  return Op(kind="load_weights", args={"path": path, "optimizer": bool(optimizer)})


def refused(error: TinkerError) -> Op:
  """Returns a request whose result is an error."""
  return Op(kind="refused", args={"error": error.message})
