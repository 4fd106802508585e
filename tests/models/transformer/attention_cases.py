"""Random attention inputs, for tests that compare two ways of computing them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tunix.models.transformer.attention import paths as attention_paths
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Case:
  """Arrays and options of one call; `weights` are the output's cotangents."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  weights: jax.Array
  visible: Visibility
  options: dict


def runs(rng, rows, length, first):
  """Ids that stay the same for a few tokens and count up from `first`."""
  return first + np.cumsum(rng.random((rows, length)) < 0.2, axis=1).astype(np.int32)


def case(kind: str, seed: int, *, length=None, head_dim=8, rows=2, **options) -> Case:
  """A case with what `kind` names: segments, groups, mask, cache, in any mix."""
  rng = np.random.default_rng(seed)
  length = length or int(rng.integers(1, 40))
  slots, start = length, 0
  if "cache" in kind:
    slots, start = length + int(rng.integers(1, 20)), int(rng.integers(0, 3))
    slots += start
  kv = int(rng.integers(1, 3))
  heads = kv * int(rng.integers(1, 4))
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  index = jnp.arange(length, dtype=jnp.int32) + start
  mask = segments = groups = None
  if "mask" in kind:
    mask = rng.random((rows, length, slots)) < 0.4
    mask[0, :1] = False  # nothing to look at
    mask[-1, :, slots // 2 :] = False
  if "segments" in kind:
    segments = runs(rng, rows, length, 0)
  if "groups" in kind:
    groups = runs(rng, rows, length, 1) * (rng.random((rows, length)) < 0.7)
    groups = groups.astype(np.int32)
  visible = Visibility(index, mask, segments, groups, aligned="cache" not in kind)
  return Case(
    draw(rows, length, heads, head_dim),
    draw(rows, slots, kv, head_dim),
    draw(rows, slots, kv, head_dim),
    draw(rows, length, heads, head_dim),
    visible,
    {"scale": head_dim**-0.5, "softcap": None, "window": None, **options},
  )


def sighted(case: Case) -> jax.Array:
  """bool [B, T, 1, 1], queries that may look somewhere."""
  dense = case.visible.dense(case.key.shape[1], case.options["window"])
  return jnp.any(dense, axis=-1)[..., None, None]


def plain(case: Case):
  """Output and gradients of the plain path."""
  rules = ShardingRules()
  run = functools.partial(attention_paths.plain, rules=rules)
  return value_and_grads(case, run)


def value_and_grads(case: Case, run):
  """(output, gradients by query, key, value), blind queries left out of both."""
  seen = sighted(case)

  def out(query, key, value):
    got = run(query, key, value, case.visible, **case.options)
    return jnp.where(seen, got, 0.0)

  def both(*arrays):
    got, pull = jax.vjp(out, *arrays)
    return got, pull(case.weights.astype(got.dtype))

  return jax.jit(both)(case.query, case.key, case.value)


def assert_equal(got, want, atol=1e-5):
  """Compares what `value_and_grads` gave."""
  for name, a, b in zip(("out", "query", "key", "value"), flat(got), flat(want)):
    scale = max(1.0, float(jnp.abs(b).max()))
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a / scale, b / scale, atol=atol, err_msg=name)


def flat(result):
  return [result[0], *result[1]]
