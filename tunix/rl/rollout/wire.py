"""Actions and seeds as JSON, between a run and the hosts that sample for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix.rl.rollout.client import Draw, Drawn
from tunix.utils import array_codec


def draw_to_json(draw: Draw) -> dict[str, Any]:
  """Returns an action that is to be drawn as JSON."""
  fields = {f.name: getattr(draw, f.name) for f in dataclasses.fields(draw)}
  return _encoded(fields | {"key": seed_to_json(draw.key)})


def draw_from_json(saved: dict[str, Any]) -> Draw:
  """Returns the action of `draw_to_json`, whose arrays are decoded."""
  group, key = saved.get("group"), seed_from_json(saved.get("key"))
  more = {"group": None if group is None else tuple(group), "key": key}
  return Draw(**saved | more)


def drawn_to_json(drawn: Drawn) -> dict[str, Any]:
  """Returns a drawn action as JSON."""
  return _encoded(drawn._asdict())


def drawn_from_json(saved: dict[str, Any]) -> Drawn:
  """Returns the action of `drawn_to_json`, whose arrays are decoded."""
  fields: dict[str, Any] = {"versions": None, **saved}
  return Drawn(**fields)


def _encoded(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns fields as JSON; those that are None are missing."""
  return array_codec.to_json({k: x for k, x in fields.items() if x is not None})


def seed_to_json(seed: Any) -> Any:
  """Returns a seed (an int, a jax.random key, or None) as JSON."""
  if not isinstance(seed, jax.Array):
    return seed
  words = np.asarray(jax.random.key_data(seed)).tolist()
  return {"impl": str(jax.random.key_impl(seed)), "words": words}


def seed_from_json(saved: Any) -> Any:
  """Returns the seed of `seed_to_json`."""
  if not isinstance(saved, dict):
    return saved
  words = jnp.asarray(saved["words"], jnp.uint32)
  return jax.random.wrap_key_data(words, impl=saved["impl"])
