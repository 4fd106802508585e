"""Critics made from actors, and checks that the models of the roles match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.generate.padded import requests
from tunix.models import calling, heads
from tunix.models.adapters import lora_modules, whole_modules
from tunix.models.transformer.model import Transformer
from tunix.utils import checks


class VocabularyMismatchError(ValueError):
  """Two roles have different vocabularies."""


def create_critic_model(
  actor: Transformer, seed: int = 0, *, share: bool = False
) -> Transformer:
  """Makes a critic with the actor's architecture and weights, and one value per token.

  If the actor has adapters, the critic has them too. It then trains the adapters and
  its head, on the same frozen weights.

  Args:
    actor: a language model of one of our families; unchanged.
    seed: seed of the new head.
    share: if True, the critic holds the actor's arrays instead of copies. A trainer
      copies the arrays that it trains, so sharing saves the memory of frozen weights.

  Raises:
    TypeError: the actor is not a `Transformer`.
    ValueError: the actor has a head for scores already.
  """
  if not isinstance(actor, Transformer):
    raise TypeError(
      f"a critic cannot be made from {checks.type_of(actor)}, whose unembedding is "
      "unknown: pass another critic, whose output is [B, T, 1]"
    )
  critic = heads.with_scores(actor, 1, seed=seed)
  if lora_modules.adapted(critic):
    # All other weights are frozen. The new head is random, so it must be trained.
    whole_modules.mark(critic, ["score"])
  if share:
    return critic
  for _, node in nnx.iter_graph(critic):
    if isinstance(node, nnx.Variable):
      node.set_value(jax.tree.map(jnp.copy, node.get_value()))
  return critic


def check_roles(
  actor: nnx.Module, others: Mapping[Any, nnx.Module], eos_tokens: Sequence[int] = ()
) -> None:
  """Checks that the other models match the actor and share no parameters with it.

  Args:
    actor: the policy.
    others: models by role.
    eos_tokens: ids that end a completion of the actor.

  Raises:
    VocabularyMismatchError: see `check_same_vocabulary`.
    ValueError: an id is outside the actor's vocabulary, or a model holds parameters of
      the actor, and training would change it too.
  """
  requests.check_ids(eos_tokens, "eos_tokens", calling.vocab_size(actor))
  params = {
    id(node) for _, node in nnx.iter_graph(actor) if isinstance(node, nnx.Param)
  }
  for role, model in others.items():
    check_same_vocabulary(actor, model, role)
    if any(id(node) in params for _, node in nnx.iter_graph(model)):
      raise ValueError(
        f"the {getattr(role, 'value', role)} is the actor, or holds its parameters, "
        "and would change when the actor trains: pass a copy, nnx.clone(model)"
      )


def check_same_vocabulary(actor: nnx.Module, other: nnx.Module, role: Any) -> None:
  """Checks that a model has as many tokens in its vocabulary as the actor.

  Models without `config.vocab_size`, which users may pass, are not checked.

  Args:
    actor, other: models.
    role: name or enum member of the other model's role, for the message.

  Raises:
    VocabularyMismatchError: the sizes of the vocabularies differ.
  """
  actor_size, size = calling.vocab_size(actor), calling.vocab_size(other)
  if actor_size is None or size is None or actor_size == size:
    return
  raise VocabularyMismatchError(
    f"the {getattr(role, 'value', role)} has a vocabulary of {size} tokens, the actor "
    f"one of {actor_size}, so their token ids differ: use a model with the actor's "
    "tokenizer"
  )
