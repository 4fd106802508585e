"""Critics made of actors, and what roles must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models import calling, heads, lora_modules, whole_modules
from tunix.models.transformer.model import Transformer


class VocabularyMismatchError(ValueError):
  """Two roles number their tokens differently."""


def create_critic_model(
  actor: Transformer, seed: int = 0, *, share: bool = False
) -> Transformer:
  """A critic of an actor's architecture and weights: one value a position.

  With adapters on the actor the critic has them too and trains those and its head, on
  the same frozen weights.

  Args:
    actor: a language model of any of our families; unchanged.
    seed: of the head.
    share: hold the actor's own arrays instead of copies. A trainer copies what it
      trains, so sharing saves the memory of what stays frozen.

  Raises:
    TypeError: the actor is a model of somebody else's.
    ValueError: it gives scores already.
  """
  if not isinstance(actor, Transformer):
    raise TypeError(
      f"a critic cannot be made of {type(actor).__name__}, whose unembedding is not "
      "known: pass a critic of your own that gives [B, T, 1]"
    )
  critic = heads.with_scores(actor, 1, seed=seed)
  if lora_modules.adapted(critic):
    # All else is frozen, and a head that stays as it was drawn predicts nothing.
    whole_modules.mark(critic, ["score"])
  if share:
    return critic
  for _, node in nnx.iter_graph(critic):
    if isinstance(node, nnx.Variable):
      node.set_value(jax.tree.map(jnp.copy, node.get_value()))
  return critic


def check_roles(actor: nnx.Module, others: Mapping[Any, nnx.Module]) -> None:
  """Checks that the models of a run fit the actor, and are no part of it.

  Args:
    actor: the policy.
    others: models by role.

  Raises:
    VocabularyMismatchError: see `check_same_vocabulary`.
    ValueError: a model holds parameters of the actor's own, and would train along.
  """
  params = {
    id(node) for _, node in nnx.iter_graph(actor) if isinstance(node, nnx.Param)
  }
  for role, model in others.items():
    check_same_vocabulary(actor, model, role)
    if any(id(node) in params for _, node in nnx.iter_graph(model)):
      raise ValueError(
        f"the {getattr(role, 'value', role)} is the actor, or holds its parameters, "
        "and would change as the actor trains: pass a copy, nnx.clone(model)"
      )


def check_same_vocabulary(actor: Any, other: Any, role: Any) -> None:
  """Checks that a model of another role reads the actor's tokens.

  Models without `config.vocab_size`, as users may bring, are not checked.

  Args:
    actor, other: models.
    role: of the other, for the message: its name, or an enum's member.

  Raises:
    VocabularyMismatchError: their vocabularies are of different sizes.
  """
  ours, theirs = calling.vocab_size(actor), calling.vocab_size(other)
  if ours is None or theirs is None or ours == theirs:
    return
  raise VocabularyMismatchError(
    f"the {getattr(role, 'value', role)} has a vocabulary of {theirs} tokens, the "
    f"actor one of {ours}: token ids mean something else to it; take a model of the "
    "actor's family and tokenizer"
  )
