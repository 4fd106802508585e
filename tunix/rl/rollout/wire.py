"""Actions and seeds as JSON, between a run and the hosts that sample for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix.generate.tokens import Completion
from tunix.rl.rollout.client import Draw
from tunix.utils import array_codec, attributes


def draw_to_json(draw: Draw) -> dict[str, Any]:
  """Returns an action that is to be drawn as JSON."""
  return _encoded(attributes.of_fields(draw) | {"key": seed_to_json(draw.key)})


def draw_from_json(saved: dict[str, Any]) -> Draw:
  """Returns the action of `draw_to_json`, whose arrays are decoded."""
  group, key = saved.get("group"), seed_from_json(saved.get("key"))
  more = {"group": None if group is None else tuple(group), "key": key}
  return Draw(**saved | more)


def actions_to_json(actions: Sequence[Completion]) -> list[dict[str, Any]]:
  """Returns drawn actions as JSON, without their prompts and texts."""

  def own(x):
    return {"episode": x.number, "finish_reason": x.finish_reason}

  return array_codec.to_json([own(x) | x.saved() for x in actions])


def actions_from_json(
  saved: list[dict[str, Any]], version: int | None = None
) -> list[Completion]:
  """Returns the actions of `actions_to_json`.

  Args:
    saved: the JSON.
    version: version of the weights that drew them; None: they have versions.
  """
  rows = array_codec.from_json(saved)
  for row in rows if version is not None else ():
    row["versions"] = np.full(len(row["ids"]), version, np.int32)
  return [
    Completion.of_saved(row, number=row["episode"], finish_reason=row["finish_reason"])
    for row in rows
  ]


def _encoded(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns fields as JSON; those that are None are missing."""
  return array_codec.to_json({k: x for k, x in fields.items() if x is not None})


def seed_to_json(seed: jax.Array | int | None) -> Any:
  """Returns a seed (an int, a jax.random key, or None) as JSON."""
  if not isinstance(seed, jax.Array):
    return seed
  words = np.asarray(jax.random.key_data(seed)).tolist()
  return {"impl": str(jax.random.key_impl(seed)), "words": words}


def seed_from_json(saved: object) -> Any:
  """Returns the seed of `seed_to_json`."""
  if not isinstance(saved, dict):
    return saved
  words = jnp.asarray(saved["words"], jnp.uint32)
  return jax.random.wrap_key_data(words, impl=saved["impl"])
