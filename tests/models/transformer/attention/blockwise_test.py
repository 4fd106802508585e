import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.transformer import attention_cases as cases
from tunix.models.transformer.attention import blockwise
from tunix.models.transformer.visibility import Visibility, reach

KINDS = [
  "causal",
  "segments",
  "groups",
  "segments groups",
  "mask",
  "mask groups",
  "cache",
  "cache mask",
  "cache mask groups",
]


def options(seed):
  """Windows, soft caps and block sizes that do not divide the length."""
  rng = np.random.default_rng(100 + seed)
  window = None if rng.random() < 0.4 else int(rng.integers(1, 20))
  softcap = None if rng.random() < 0.5 else 2.0
  return {"window": window, "softcap": softcap}, [
    int(x) for x in rng.integers(3, 17, 2)
  ]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_the_whole(kind, seed):
  seed += 10 * KINDS.index(kind)
  named, (queries, keys) = options(seed)
  case = cases.case(kind, seed, **named)
  run = functools.partial(blockwise.attend, query_block=queries, key_block=keys)
  cases.assert_equal(cases.value_and_grads(case, run), cases.plain(case))


def test_queries_that_see_nothing_give_zeros_and_finite_gradients():
  case = cases.case("mask", 3, length=20)
  case.visible.mask[:, 4:9] = False
  run = functools.partial(blockwise.attend, query_block=4, key_block=8, **case.options)

  def loss(query, key, value):
    out = run(query, key, value, case.visible)
    return jnp.sum(out * case.weights), out

  arrays = case.query, case.key, case.value
  grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
  assert not np.any(out[:, 4:9]) and np.any(out[:, 10:])
  assert all(np.all(np.isfinite(g)) for g in grads)
  assert not np.any(grads[0][:, 4:9])


def test_bfloat16_adds_up_in_float32():
  case = cases.case("causal", 5, length=64)
  want = cases.plain(case)[0]
  half = [x.astype(jnp.bfloat16) for x in (case.query, case.key, case.value)]
  run = functools.partial(blockwise.attend, query_block=16, key_block=16)
  got = run(*half, case.visible, **case.options)
  assert got.dtype == jnp.bfloat16
  assert float(jnp.abs(got - want).max()) < 0.03


def test_visited_blocks():
  # 16 tokens in blocks of 4. Causal: 1, 2, 3, 4 blocks of keys. A window of 3 needs the
  # block before, two slots of it. Segments of 8 start at block 2.
  def visited(window=None, segments=None, groups=None, mask=None):
    visible = Visibility(jnp.arange(16), mask, segments, groups)
    options = blockwise._Options(1.0, None, window, (4, 4), None)
    index = blockwise._cut_visibility(visible, options, 16)
    return list(zip(index.first.tolist(), index.last.tolist()))

  assert visited() == [(0, 1), (0, 2), (0, 3), (0, 4)]
  assert visited(window=3) == [(0, 1), (0, 2), (1, 3), (2, 4)]
  halves = jnp.array([[1] * 8 + [2] * 8])
  assert visited(segments=halves) == [(0, 1), (0, 2), (2, 3), (2, 4)]
  image = jnp.array([[0] * 2 + [1] * 8 + [0] * 6])  # slots 2 to 9
  assert visited(groups=image) == [(0, 3), (0, 3), (0, 3), (0, 4)]
  mask = jnp.tril(jnp.ones((1, 16, 16), bool)).at[:, :, :5].set(False)
  first, last = zip(*visited(mask=mask))
  assert list(zip(first, last))[1:] == [(1, 2), (1, 3), (1, 4)] and last[0] == 0
  # A group opens what a mask closes: the image's first block sees its last.
  causal = jnp.tril(jnp.ones((1, 16, 16), bool))
  assert visited(mask=causal, groups=image) == visited(groups=image)


def test_reach_survives_ids_larger_than_the_row():
  visible = Visibility(jnp.arange(4), segment_ids=jnp.array([[7, 7, 900, 900]]))
  first, last = reach(visible.queries(), visible.keys(4))
  assert first.tolist() == [[0, 0, 0, 0]] and last.tolist() == [[0, 1, 2, 3]]
  visible = Visibility(jnp.arange(4), groups=jnp.array([[-3, 0, 0, -3]]))
  assert reach(visible.queries(), visible.keys(4))[1].tolist() == [[3, 1, 2, 3]]


@pytest.mark.parametrize(
  "length, most, want", [(5, 4, 3), (16, 8, 8), (300, 256, 256), (1100, 512, 384)]
)
def test_blocks_are_of_equal_size(length, most, want):
  assert blockwise.block_size(length, most) == want


def temporaries(length, run):
  shape = lambda heads: jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32)
  visible = Visibility(jnp.arange(length), aligned=True)

  def loss(query, key, value):
    return jnp.sum(run(query, key, value, visible, scale=0.25) ** 2)

  program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape(4), shape(2), shape(2))
  return program.compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_length():
  run = functools.partial(blockwise.attend, softcap=5.0, window=None)
  small, *larger = (temporaries(t, run) for t in (1024, 2048, 4096, 8192))
  for times, size in zip((2, 4, 8), larger):
    assert size < 1.1 * times * small
  assert larger[-1] < 8192 * 8192  # far from one byte a score


def test_mesh_moves_nothing(mesh_fsdp4_tp2):
  rng = np.random.default_rng(0)
  draw = lambda heads: jnp.asarray(rng.normal(size=(4, 40, heads, 8)), jnp.float32)
  arrays = draw(4), draw(2), draw(2)
  visible = Visibility(jnp.arange(40), aligned=True)

  def loss(query, key, value):
    run = functools.partial(blockwise.attend, query_block=16, key_block=16)
    return jnp.sum(run(query, key, value, visible, scale=0.4) ** 2)

  want = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
  spec = jax.sharding.PartitionSpec("fsdp", None, "tp", None)
  where = jax.sharding.NamedSharding(mesh_fsdp4_tp2, spec)
  step = jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=where, out_shardings=where)
  program = step.lower(*arrays).compile()
  for a, b in zip(program(*jax.device_put(arrays, where)), want):
    np.testing.assert_allclose(a, b, atol=1e-5)
  text = program.as_text()
  assert "all-gather" not in text and "all-to-all" not in text
