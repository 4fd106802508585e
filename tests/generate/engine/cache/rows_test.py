"""Rows in tiles: attention of one layer, and pages that are loaded and written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.generate.engine.cache import rows
from tunix.generate.engine.cache.rows import Places, RowLayer, Store
from tunix.models.transformer.attention import paths as attention_paths
from tunix.models.transformer.config import ShardingRules


def normal(seed: int, *shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def empty(slots: int, heads: int, size: int, width: int, page: int) -> RowLayer:
  tile, part = rows.tile_tokens(page), rows.tile_features(size)
  return RowLayer(
    jnp.zeros((slots, heads, width // tile, size, tile)),
    jnp.zeros((slots, heads, size // part, width, part)),
    places=None,  # type: ignore[arg-type]
  )


def dense(query, keys, values, scale, softcap=None, window=None, sinks=None):
  """Attention of the last tokens of one row, [Q, N, H], in float64."""
  query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
  group = query.shape[1] // keys.shape[1]
  keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
  scores = np.einsum("qnh,snh->nqs", query, keys) * scale
  if softcap is not None:
    scores = softcap * np.tanh(scores / softcap)
  at = np.arange(len(keys) - len(query), len(keys))[:, None] - np.arange(len(keys))
  seen = (at >= 0) & (at < (window or len(keys)))
  weights = np.where(seen, np.exp(scores), 0)
  total = weights.sum(-1, keepdims=True)
  if sinks is not None:
    total += np.exp(np.asarray(sinks, np.float64))[:, None, None]
  return np.einsum("nqs,snh->qnh", weights / total, values)


OPTIONS = {
  "plain": {},
  "capped": {"softcap": 3.0, "window": 9},
  "sinks": {"sinks": normal(9, 4)},
}


@pytest.mark.parametrize(
  "heads, size, page, chunk, options",
  [
    (4, 16, 16, 3, "plain"),
    (2, 64, 10, 1, "capped"),
    (1, 128, 16, 3, "sinks"),
    (2, 192, 40, 3, "capped"),
  ],
)
def test_attention_of_tiles(heads, size, page, chunk, options):
  """Two slots draw one token each, and a block has `chunk` tokens of a third."""
  lengths, width = (5, 61), rows.tile_tokens(page) * 4
  layer = empty(3, heads, size, width, page)
  rules = {"implementation": "auto", "rules": ShardingRules()}
  given = {"scale": size**-0.5, "softcap": None, "window": None, **OPTIONS[options]}
  texts = [(normal(i, n, heads, size), normal(10 + i, n, heads, size))
           for i, n in enumerate((*lengths, 40 + chunk))]  # fmt: skip
  queries = [normal(20 + i, n, 4, size) for i, n in enumerate((1, 1, chunk))]
  k, v = layer.k, layer.v
  tile = rows.tile_tokens(page)
  for slot, (keys, values) in enumerate(texts):  # all but the tokens of the call
    for i in range(len(keys) - len(queries[slot])):
      k = k.at[slot, :, i // tile, :, i % tile].set(keys[i])
      v = v.at[slot, :, :, i].set(values[i].reshape(heads, -1, v.shape[4]))
  slots = jnp.array([0, 1, 3, *[2] * chunk])  # the third slot decodes nothing
  at = jnp.array([4, 60, 0, *range(40, 40 + chunk)])
  layer = RowLayer(k, v, Places(slots, at, jnp.array([2]), 1, chunk))
  pick = lambda part: jnp.concatenate(
    [texts[0][part][-1:], texts[1][part][-1:], jnp.ones((1, heads, size)),
     texts[2][part][-chunk:]])[:, None]  # fmt: skip
  query = jnp.concatenate([*queries[:2], jnp.ones((1, 4, size)), queries[2]])[:, None]
  run = jax.jit(lambda layer, *call: layer.attend(*call, **rules, **given))
  out, after = run(layer, query, pick(0), pick(1))
  out = [out[:1, 0], out[1:2, 0], out[3:, 0]]
  for mine, one, (keys, values) in zip(out, queries, texts, strict=True):
    np.testing.assert_allclose(mine, dense(one, keys, values, **given), atol=2e-5)
  assert after.k.shape == k.shape and after.v.shape == v.shape


def test_long_blocks_take_the_other_paths_of_attention(monkeypatch):
  """With too many scores to hold at once, `attention_paths.attend` runs."""
  key = normal(0, 1, 2, 4, 64, 32), normal(1, 1, 2, 1, 128, 64)
  places = Places(
    jnp.zeros(16, jnp.int32), jnp.arange(16), jnp.zeros(1, jnp.int32), 0, 16
  )
  options = {"scale": None, "softcap": None, "window": None, "implementation": "auto"}
  run = lambda: RowLayer(*key, places).attend(
    normal(2, 16, 1, 4, 64), None, None, rules=ShardingRules(), **options
  )[0]
  want = run()
  monkeypatch.setattr(attention_paths, "PLAIN_SCORES_ELSEWHERE", 1)
  np.testing.assert_allclose(run(), want, atol=2e-5)


@pytest.mark.parametrize("page", [10, 40])
def test_pages_come_back_from_rows(page):
  """Pages of a completion are loaded into a row, and written to other pages."""
  heads, size, tile = 2, 128, rows.tile_tokens(page)
  layer = empty(2, heads, size, tile * 4, page)
  pages_k, pages_v = (
    normal(0, 9, heads, 1, size, page),
    normal(1, 9, heads, 2, page, 64),
  )
  store = Store((layer.k,), (layer.v,), (pages_k,), (pages_v,), groups=(0,))
  loads = [(1, place, 1 + place) for place in range(4)]
  none = jnp.zeros((1, 1, 2), jnp.int32), 0
  store = jax.jit(rows.load)(store, *none, jnp.array(loads), 4)
  # Token 3 of page 2 of the row, read as a query reads it.
  token = 2 * page + 3
  np.testing.assert_array_equal(
    store.rows_k[0][1, :, token // tile, :, token % tile], pages_k[3, :, 0, :, 3]
  )
  np.testing.assert_array_equal(store.rows_v[0][1, :, :, token], pages_v[3, :, :, 3])
  writes = jnp.array([(1, place, 5 + place) for place in range(4)])
  store = jax.jit(rows.write_back)(store, writes, 4)
  for before, after in ((pages_k, store.pages_k[0]), (pages_v, store.pages_v[0])):
    np.testing.assert_array_equal(after[5:9], before[1:5])
    np.testing.assert_array_equal(after[:5], before[:5])
