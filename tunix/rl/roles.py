"""The models of the roles of a cluster on their meshes, and the engine that samples."""

from __future__ import annotations

import importlib
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import quantization
from tunix.models.automodel import AutoModel
from tunix.rl.config import ClusterConfig, Role
from tunix.rl.rollout import vanilla_rollout
from tunix.rl.rollout.base_rollout import BaseRollout
from tunix.rl.weights import reshard
from tunix.utils import mesh as mesh_lib

ENGINES = {
  "vanilla": "tunix.rl.rollout.vanilla_rollout:VanillaRollout",
  "per_process": "tunix.rl.rollout.per_process_rollout:PerProcessRollout",
  "remote": "tunix.rl.rollout.remote_rollout:RemoteRollout",
  "padded": "tunix.rl.rollout.vanilla_rollout:PaddedRollout",
  "vllm": "tunix.rl.rollout.vllm_rollout:VllmRollout",
  "sglang_jax": "tunix.rl.rollout.sglang_jax_rollout:SglangJaxRollout",
}
PER_PROCESS, REMOTE = "per_process", "remote"


def mesh_of(config: ClusterConfig, role: Role) -> Mesh | None:
  """Returns the mesh of a role; None if its arrays stay where they are."""
  meshes = config.role_to_mesh or {}
  return meshes.get(role, meshes.get(Role.ACTOR))


def meshes(config: ClusterConfig, actor: nnx.Module | str) -> dict[str, Any]:
  """Maps each role to its mesh.

  Roles without a mesh are missing, and so are engines in each process or on other
  hosts, whose meshes are no part of the others'.
  """
  out: dict[str, Any] = {role.value: mesh_of(config, role) for role in Role}
  if config.rollout_engine in (PER_PROCESS, REMOTE):
    del out[Role.ROLLOUT.value]
  if isinstance(actor, nnx.Module) and out[Role.ACTOR.value] is None:
    out[Role.ACTOR.value] = mesh_lib.mesh_of(nnx.state(actor))
  return {role: mesh for role, mesh in out.items() if mesh is not None}


def placed(config: ClusterConfig, role: Role, model: nnx.Module | str | None) -> Any:
  """Returns the model of a role on its mesh; loads it if `model` is a name."""
  mesh = mesh_of(config, role)
  if model is None or isinstance(model, nnx.Module):
    moved = model is not None and mesh is not None
    return reshard.reshard_model_to_mesh(model, mesh) if moved else model
  scores = 1 if role in (Role.CRITIC, Role.REWARD) else None
  return AutoModel.from_pretrained(model, mesh=mesh, num_scores=scores)


def make_rollout(
  config: ClusterConfig, actor: nnx.Module, tokenizer: TokenizerAdapter
) -> BaseRollout:
  """Makes the engine that samples.

  Raises:
    ValueError: the name of the engine is unknown, there are several processes and the
      engine is not one of ours, or the weights cannot be stored in 8 bits.
  """
  engine: Any = config.rollout_engine
  names = (*vanilla_rollout.NAMES, REMOTE)
  if jax.process_count() > 1 and engine not in names:
    raise ValueError(
      f"rollout_engine is {engine!r}: with {jax.process_count()} processes expected "
      f"one of {', '.join(names)}"
    )
  if isinstance(engine, str):
    if engine not in ENGINES:
      raise ValueError(
        f"rollout_engine is {engine!r}: choose one of {', '.join(ENGINES)}, or give "
        "a subclass of BaseRollout"
      )
    module, name = ENGINES[engine].split(":")
    engine = getattr(importlib.import_module(module), name)
  # `mesh_of` of the arrays finds no mesh of one device, so that of the role is first.
  actor_mesh = mesh_of(config, Role.ACTOR) or mesh_lib.mesh_of(nnx.state(actor))
  model = engine.module_of(
    actor,
    actor_mesh and mesh_lib.auto(actor_mesh),
    (config.role_to_mesh or {}).get(Role.ROLLOUT),
    samples_behind=bool(config.training_config.staleness),
  )
  rollout = config.widest_rollout()
  if rollout.weights is not None:
    if not issubclass(engine, vanilla_rollout.VanillaRollout):
      raise ValueError(
        f"rollout_engine is {engine.__name__} and weights is {rollout.weights!r}, "
        'which needs our own engine: set rollout_engine to "vanilla", or leave weights '
        "out"
      )
    model = quantization.for_sampling(model, rollout.weights)
  return engine(model, tokenizer, rollout)


def rendered(tokenizer: TokenizerAdapter, prompt: object, as_user: bool) -> Any:
  """Returns a prompt as an engine takes it: messages as ids, other kinds unchanged.

  Args:
    tokenizer: its chat template renders messages.
    prompt: a text, ids, or messages.
    as_user: if True, a text is rendered as one user message.
  """
  if isinstance(prompt, str) and as_user:
    prompt = [{"role": "user", "content": prompt}]
  if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
    return tokenizer.apply_chat_template(
      list(prompt), add_generation_prompt=True, tokenize=True
    )
  return prompt
