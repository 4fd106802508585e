"""The protocol's routes of sessions, models, and what they compute.

Each route runs in a thread, and returns JSON values. A route that computes returns the
id of a future.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tunix.tinker.errors import TinkerError
from tunix.tinker.learning.learner import AdapterSpec
from tunix.tinker.protocol import fields, wire
from tunix.tinker.rest import TinkerCall
from tunix.tinker.service import Service
from tunix.tinker.work.operations import check_optimizer

Route = Callable[[TinkerCall, Service], Any]


def _future(id: str, model: str | None = None) -> dict[str, Any]:
  return {"request_id": id, **({} if model is None else {"model_id": model})}


def _client_config(call: TinkerCall, service: Service) -> dict[str, Any]:
  return {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": importlib.util.find_spec("zstandard") is not None,
    "sample_cancel_enabled": True,
  }


def _dynamic_config(call: TinkerCall, service: Service) -> dict[str, Any]:
  return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


def _capabilities(call: TinkerCall, service: Service) -> dict[str, Any]:
  most = service.settings.max_tokens
  engine = service.sampling.engine
  return {
    "supported_models": [
      {
        "model_name": service.name,
        "max_context_length": most if engine is None else min(most, engine.max_tokens),
        "trainable": True,
        "sampleable": engine is not None,
      }
    ]
  }


def _create_session(call: TinkerCall, service: Service) -> dict[str, Any]:
  metadata = {
    name: fields.small(call.body, name)
    for name in ("user_metadata", "display_name", "tags")
  }
  return {
    "type": "create_session",
    "session_id": service.create_session(call.tenant, metadata),
    # The SDK logs a warning, which Python prints. Its client sets train_unembed by
    # default, so a refusal would break every program.
    "warning_message": "this service adapts attention and feed-forward layers, and not "
    "the unembedding: train_unembed=True has no effect",
  }


def _heartbeat(call: TinkerCall, service: Service) -> dict[str, Any]:
  service.session(call.tenant, fields.text(call.body, "session_id"))
  return {"type": "session_heartbeat"}


def _create_model(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  check_optimizer(body.get("optimizer_config"))
  config = fields.table(body, "lora_config")
  try:
    spec = AdapterSpec(
      rank=fields.integer(config, "rank"),
      train_attn=fields.flag(config, "train_attn", True),
      train_mlp=fields.flag(config, "train_mlp", True),
    )
  except (TypeError, ValueError) as error:
    raise TinkerError(f"lora_config: {error}") from error
  id, model = service.create_model(
    call.tenant,
    fields.text(body, "session_id"),
    fields.integer(body, "model_seq_id"),
    spec,
    base_model=fields.text(body, "base_model"),
    seed=fields.whole(config, "seed", None, most=2**32 - 1),
    metadata=fields.metadata(body),
  )
  return _future(id, model)


def _forward(call: TinkerCall, service: Service) -> dict[str, Any]:
  return _gradient(call, service, backward=False)


def _forward_backward(call: TinkerCall, service: Service) -> dict[str, Any]:
  return _gradient(call, service, backward=True)


def _gradient(call: TinkerCall, service: Service, backward: bool) -> dict[str, Any]:
  request = (
    wire.gradient_from_json(call.body, backward)
    if call.proto is None
    else wire.gradient_from_proto(call.proto)
  )
  id = service.training.forward_backward(
    call.tenant,
    request.model,
    request.number,
    request.read_rows,
    request.loss,
    request.config,
    backward=request.backward,
  )
  return _future(id, request.model)


def _optim_step(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  model, number = fields.text(body, "model_id"), fields.integer(body, "seq_id")
  params = body.get("adam_params", body.get("optimizer_params"))  # of other optimizers
  id = service.training.optim_step(call.tenant, model, number, params)
  return _future(id, model)


def _save(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  model = fields.text(body, "model_id")
  id = service.training.save_weights(
    call.tenant,
    model,
    fields.integer(body, "seq_id"),
    fields.optional_text(body, "path"),
    overwrite=fields.flag(body, "overwrite", False),
    ttl_seconds=body.get("ttl_seconds"),
    metadata=fields.metadata(body),
  )
  return _future(id, model)


def _save_for_sampler(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  model = fields.text(body, "model_id")
  id = service.training.save_weights_for_sampler(
    call.tenant,
    model,
    fields.integer(body, "seq_id"),
    fields.optional_text(body, "path"),
    sampler_number=fields.whole(body, "sampling_session_seq_id", None),
    ttl_seconds=body.get("ttl_seconds"),
    metadata=fields.metadata(body),
  )
  return _future(id, model)


def _load(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  path, optimizer = fields.text(body, "path"), fields.flag(body, "optimizer", False)
  check_optimizer(body.get("optimizer_config"))
  if (model := fields.optional_text(body, "model_id")) is not None:
    number = fields.integer(body, "seq_id")
    id = service.training.load_weights(
      call.tenant, model, number, path, optimizer=optimizer
    )
    return _future(id, model)
  id, model = service.create_from_checkpoint(
    call.tenant,
    fields.text(body, "session_id"),
    fields.integer(body, "model_seq_id"),
    path,
    optimizer=optimizer,
    base_model=fields.optional_text(body, "base_model"),
    metadata=fields.metadata(body),
  )
  return _future(id, model)


def _unload(call: TinkerCall, service: Service) -> dict[str, Any]:
  model = fields.text(call.body, "model_id")
  return _future(service.training.unload_model(call.tenant, model), model)


def _create_sampling_session(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  service.check_base(fields.optional_text(body, "base_model"))
  id = service.sampling.create(
    call.tenant,
    fields.text(body, "session_id"),
    fields.integer(body, "sampling_session_seq_id"),
    fields.optional_text(body, "model_path"),
  )
  return {"type": "create_sampling_session", "sampling_session_id": id}


def _sample(call: TinkerCall, service: Service) -> dict[str, Any]:
  body = call.body
  prompt = wire.model_input(body.get("prompt"))
  id = service.sampling.sample(
    call.tenant,
    fields.text(body, "sampling_session_id"),
    fields.integer(body, "seq_id"),
    prompt,
    body,
  )
  count = fields.whole(body, "num_samples", 1)
  return {"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(count)]}


def _cancel(call: TinkerCall, service: Service) -> dict[str, Any]:
  service.sampling.cancel(call.tenant, fields.text(call.body, "request_id"))
  return {}


ROUTES: dict[tuple[str, str], Route] = {
  ("POST", "client/config"): _client_config,
  ("POST", "client/dynamic_config"): _dynamic_config,
  ("GET", "get_server_capabilities"): _capabilities,
  ("POST", "create_session"): _create_session,
  ("POST", "session_heartbeat"): _heartbeat,
  ("POST", "create_model"): _create_model,
  ("POST", "unload_model"): _unload,
  ("POST", "forward"): _forward,
  ("POST", "forward_backward"): _forward_backward,
  ("POST", "optim_step"): _optim_step,
  ("POST", "save_weights"): _save,
  ("POST", "save_weights_for_sampler"): _save_for_sampler,
  ("POST", "load_weights"): _load,
  ("POST", "create_sampling_session"): _create_sampling_session,
  ("POST", "asample"): _sample,
  ("POST", "cancel_future"): _cancel,
}
