"""Attention sinks in every path, and the paths that refuse them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.transformer import attention_cases as cases
from tunix.models.transformer.attention import (
  blockwise,
  fused,
  paths as attention_paths,
)
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.paged import attention as paged


def with_sinks(case):
  """A sink per query head, from negligible to larger than all scores."""
  return jnp.linspace(-3.0, 4.0, case.query.shape[2])


def value_and_grads(case, run, sinks):
  """The output, and the gradients of queries, keys, values and sinks."""

  def loss(query, key, value, sinks):
    out = run(query, key, value, case.visible, **case.options, sinks=sinks)
    return jnp.sum(jnp.where(cases.sighted(case), out, 0) * case.weights), out

  arrays = case.query, case.key, case.value, sinks
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays)


def as_one_more_key(query, key, value, visible, *, scale, softcap, window, sinks):
  """The definition: one more column of scores, whose value is 0."""
  groups = query.shape[2] // key.shape[2]
  key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
  scores = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  mask = visible.dense(key.shape[1], window)[:, None]
  scores = jnp.where(mask, scores, -1e30)
  column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
  weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1))[..., :-1]
  return jnp.einsum("bnts,bsnh->btnh", weights, value)


def assert_same(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1, float(jnp.abs(b).max())))


splash = functools.partial(fused.splash, rules=ShardingRules(), interpret=True)
BLOCKS = functools.partial(blockwise.attend, query_block=7, key_block=5)
PLAIN = functools.partial(attention_paths.plain, rules=ShardingRules())


@pytest.mark.parametrize(
  "run, kind, options",
  [
    (PLAIN, "segments", {"window": 6}),
    (PLAIN, "cache mask", {"softcap": 2.0}),
    (BLOCKS, "segments", {"window": 6}),
    (BLOCKS, "cache mask", {"softcap": 2.0}),
    (splash, "segments", {"window": 70, "length": 130, "head_dim": 128}),
  ],
  ids=["plain", "plain_cache", "blocks", "blocks_cache", "splash"],
)
def test_outputs_and_gradients(run, kind, options):
  case = cases.case(kind, 3, **({"length": 24} | options))
  sinks = with_sinks(case)
  want = value_and_grads(case, as_one_more_key, sinks)
  assert_same(value_and_grads(case, run, sinks), want)
  assert float(jnp.linalg.norm(want[1][3])) > 0.01


def test_a_blind_query_gives_zeros():
  case = cases.case("mask", 3, length=12)
  case.visible.mask[:, 4:6] = False
  for path in ("plain", "blockwise"):
    run = functools.partial(attention_paths.attend, implementation=path)
    out = run(case.query, case.key, case.value, case.visible, sinks=with_sinks(case))
    assert not np.any(out[:, 4:6]) and np.any(out[:, 6:])


def test_tokens_and_heads_split_over_devices():
  case = cases.case("causal", 1, length=16)
  draw = lambda heads, seed: jax.random.normal(jax.random.key(seed), (2, 16, heads, 8))
  fields = {"query": draw(4, 0), "key": draw(2, 1), "value": draw(2, 2)}
  case = dataclasses.replace(case, **fields, weights=draw(4, 3))
  sinks = with_sinks(case)
  run = functools.partial(attention_paths.attend, implementation="blockwise")
  want = value_and_grads(case, run, sinks)
  with jax.set_mesh(
    jax.make_mesh((4, 2), ("cp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
  ):
    assert_same(value_and_grads(case, run, sinks), want)


def test_paths_that_cannot_refuse():
  call = attention_paths.Call(
    platform="gpu",
    dtype="bfloat16",
    head_dim=64,
    scores=4096**2,
    features=frozenset({"sinks"}),
  )
  assert attention_paths.choose(call) == "blockwise"
  with pytest.raises(ValueError, match="'cudnn' cannot do attention sinks"):
    attention_paths.choose(call, "cudnn")
  on_tpu = dataclasses.replace(call, platform="tpu")
  assert attention_paths.choose(on_tpu) == "splash"
  pages = paged.Call(
    platform="tpu", dtype="bfloat16", head_dim=64, page_tokens=16, sinks=True
  )
  assert paged.choose(pages) == "gather"
  with pytest.raises(ValueError, match="'ragged' cannot do attention sinks"):
    paged.choose(pages, "ragged")
