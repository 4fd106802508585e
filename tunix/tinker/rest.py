"""The protocol's routes about runs, sessions and checkpoints.

Each route runs in a thread, and returns JSON values or an `Answer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tunix.serve.http.bodies import Answer, Call
from tunix.tinker.errors import NotServedError
from tunix.tinker.protocol import fields
from tunix.tinker.service import Service
from tunix.tinker.state import checkpoints
from tunix.tinker.state.checkpoints import Place
from tunix.tinker.state.runs import Run

T = TypeVar("T")
_MOST = 1000  # objects of one page of a list


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinkerCall(Call):
  """One HTTP request of a tenant.

  Attributes:
    tenant: name of the tenant.
    proto: a body of Protocol Buffers; None: the body is JSON.
    wants_proto: the client takes Protocol Buffers.
  """

  # No default, unlike its base's: every call here has a tenant.
  tenant: str  # pyright: ignore[reportGeneralTypeIssues]
  proto: bytes | None = None
  wants_proto: bool = False


def _health(call: TinkerCall, service: Service) -> dict[str, Any]:
  service.check_alive()
  return {"status": "ok"}


def _telemetry(call: TinkerCall, service: Service) -> dict[str, Any]:
  return {"status": "accepted"}  # and dropped


def _info(call: TinkerCall, service: Service) -> dict[str, Any]:
  run = service.run(call.tenant, fields.text(call.body, "model_id"))
  return {
    "type": "get_info",
    "model_id": run.id,
    "model_name": service.name,
    "is_lora": True,
    "lora_rank": run.spec.rank,
    "model_data": {
      "arch": type(service.model.config).__name__,
      "model_name": service.name,
      "tokenizer_id": service.tokenizer_name,
    },
  }


def _weights_info(call: TinkerCall, service: Service) -> dict[str, Any]:
  place = service.place(call.tenant, fields.text(call.body, "tinker_path"))
  spec = service.store.meta(place)["spec"]
  return {
    "base_model": service.name,
    "is_lora": True,
    "lora_rank": spec["rank"],
    "train_unembed": False,
    "train_mlp": spec["train_mlp"],
    "train_attn": spec["train_attn"],
  }


def _page(call: TinkerCall, items: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
  """Returns the part of a list that the query asks for, and the cursor."""
  numbers = {}
  for name, default in (("limit", 20), ("offset", 0)):
    value = call.query.get(name, str(default))
    is_number = value.isascii() and value.isdigit() and len(value) < 20
    field = {name: int(value) if is_number else value}
    numbers[name] = fields.integer(field, name)
  limit, offset = min(numbers["limit"], _MOST), numbers["offset"]
  cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
  return items[offset : offset + limit], cursor


def _runs(call: TinkerCall, service: Service) -> dict[str, Any]:
  runs, cursor = _page(call, service.runs(call.tenant))
  return {
    "training_runs": [_run_card(service, call.tenant, run) for run in runs],
    "cursor": cursor,
  }


def _run(call: TinkerCall, service: Service) -> dict[str, Any]:
  run = service.run(call.tenant, call.query["run"])
  return _run_card(service, call.tenant, run)


def _run_card(service: Service, tenant: str, run: Run) -> dict[str, Any]:
  last: dict[str, Any] = {}
  for place, meta in service.checkpoints(tenant, run.id):
    last[place.kind] = _checkpoint_card(place, meta)
  return {
    "training_run_id": run.id,
    "base_model": service.name,
    "model_owner": run.owner,
    "is_lora": True,
    "corrupted": False,
    "lora_rank": run.spec.rank,
    "last_request_time": run.info["time"],
    "last_checkpoint": last.get("weights"),
    "last_sampler_checkpoint": last.get("sampler_weights"),
    "user_metadata": run.info["metadata"] or None,
  }


def _checkpoint_card(place: Place, meta: Mapping[str, Any]) -> dict[str, Any]:
  return {
    "checkpoint_id": place.id,
    "checkpoint_type": checkpoints.KINDS[place.kind],
    "time": meta["time"],
    "tinker_path": str(place),
    "size_bytes": meta["size_bytes"],
    "public": False,
    "user_metadata": meta["user_metadata"],
    "expires_at": meta["expires_at"],
  }


def _run_checkpoints(call: TinkerCall, service: Service) -> dict[str, Any]:
  entries = service.checkpoints(call.tenant, call.query["run"])
  return {"checkpoints": [_checkpoint_card(*x) for x in entries]}


def _all_checkpoints(call: TinkerCall, service: Service) -> dict[str, Any]:
  entries, cursor = _page(call, service.checkpoints(call.tenant))
  return {"checkpoints": [_checkpoint_card(*x) for x in entries], "cursor": cursor}


def _place(call: TinkerCall, service: Service) -> Place:
  path = f"tinker://{call.query['run']}/{call.query['checkpoint']}"
  return service.place(call.tenant, path)


def _delete(call: TinkerCall, service: Service) -> Answer:
  service.store.delete(_place(call, service))
  return Answer(content={})


def _archive(call: TinkerCall, service: Service) -> Answer:
  place = _place(call, service)
  name = f"{place.run}-{place.name}".replace(":", "-")
  return Answer(
    content=service.store.archive(place),
    media_type="application/gzip",
    headers={"Content-Disposition": f'attachment; filename="{name}.tar.gz"'},
  )


def _set_ttl(call: TinkerCall, service: Service) -> Answer:
  service.store.set_expiry(_place(call, service), call.body.get("ttl_seconds"))
  return Answer(content={})


def _sessions(call: TinkerCall, service: Service) -> dict[str, Any]:
  return {"sessions": list(_page(call, service.sessions(call.tenant))[0])}


def _session(call: TinkerCall, service: Service) -> dict[str, Any]:
  record = service.session(call.tenant, call.query["session"])
  return {
    "training_run_ids": record["runs"],
    "sampler_ids": record["samplers"],
    "user_metadata": record["metadata"].get("user_metadata"),
    "display_name": record["metadata"].get("display_name"),
  }


def _finish_session(call: TinkerCall, service: Service) -> dict[str, Any]:
  service.session(call.tenant, call.query["session"])
  return {}


def _sampler(call: TinkerCall, service: Service) -> dict[str, Any]:
  record = service.sampling.record(call.tenant, call.query["sampler"])
  return {
    "sampler_id": record["id"],
    "base_model": record["base_model"],
    "model_path": record["path"],
  }


def _not_served(what: str, instead: str) -> Callable[[TinkerCall, Service], Any]:
  """Returns a route that refuses a part of the protocol by name."""

  def refuse(call: TinkerCall, service: Service) -> Any:
    raise NotServedError(f"this service does not have {what}; {instead}")

  return refuse


_PUBLISH = _not_served(
  "public checkpoints",
  "expected checkpoints of the tenant's own. Download the archive and share it",
)
_BILLING = _not_served("bills", "expected none. Read /metrics for tokens and times")
_SIGN_IN = _not_served(
  "accounts", "expected the API key of a tenant in TINKER_API_KEY. Set it"
)
_EXTERNAL = _not_served(
  "external weights", "expected save_weights_for_sampler. Download its archive"
)
_PROJECTS = _not_served(
  "projects", "expected one owner for each object. Leave the project out"
)
_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"

_REFUSED: dict[tuple[str, str], Callable[[TinkerCall, Service], Any]] = {
  ("GET", "audit"): _not_served("an audit", "expected none. Read the server's log"),
  ("GET", "auth/apikey/me"): _SIGN_IN,
  ("POST", "auth/token"): _SIGN_IN,
  ("GET", "billing/usage/events"): _BILLING,
  ("GET", "billing/usage/checkpoints/current"): _BILLING,
  ("POST", "copy_weights"): _PROJECTS,
  ("POST", "create_custom_loss"): _not_served(
    "losses of its own for a tenant",
    "expected a function of Python. Call forward_backward_custom",
  ),
  ("GET", f"{_CHECKPOINT}/external_weights_urls"): _EXTERNAL,
  ("POST", f"{_CHECKPOINT}/publish"): _PUBLISH,
  ("DELETE", f"{_CHECKPOINT}/publish"): _PUBLISH,
  ("POST", "join_sampling_session"): _not_served(
    "shared sampling sessions", "expected one client for each. Create another session"
  ),
  ("POST", "retrieve_futures"): _not_served(
    "lists of futures", "expected retrieve_future. Ask for each one"
  ),
  ("POST", "save_weights_external"): _EXTERNAL,
  ("PUT", "sessions/{session}/project"): _PROJECTS,
  ("GET", "sessions/{session}/trace_export"): _not_served(
    "traces of sessions", "expected none. Read the server's log"
  ),
  ("POST", "sessions/search"): _not_served(
    "a search of sessions", "expected GET sessions. List them"
  ),
}
ROUTES: dict[tuple[str, str], Callable[[TinkerCall, Service], Any]] = {
  ("GET", "healthz"): _health,
  ("POST", "telemetry"): _telemetry,
  ("POST", "get_info"): _info,
  ("POST", "weights_info"): _weights_info,
  ("GET", "checkpoints"): _all_checkpoints,
  ("GET", f"{_CHECKPOINT}/archive"): _archive,
  ("PUT", f"{_CHECKPOINT}/ttl"): _set_ttl,
  ("DELETE", _CHECKPOINT): _delete,
  ("GET", "training_runs/{run}/checkpoints"): _run_checkpoints,
  ("GET", "training_runs/{run}"): _run,
  ("GET", "training_runs"): _runs,
  ("GET", "sessions/{session}"): _session,
  ("GET", "sessions"): _sessions,
  ("POST", "sessions/{session}/finish"): _finish_session,
  ("GET", "samplers/{sampler}"): _sampler,
} | _REFUSED
