"""Pages against dense attention and against numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.transformer import attention_paths, paged
from tunix.models.transformer.visibility import Visibility

PAGE, WIDTH, POOL = 4, 6, 32


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def group(tables, starts, counts, tokens):
  table = np.zeros((len(tables), WIDTH), np.int32)
  for row, numbers in enumerate(tables):
    table[row, : len(numbers)] = numbers
  as_ints = lambda x: jnp.asarray(x, jnp.int32)
  return paged.Group(
    table=as_ints(table), start=as_ints(starts), count=as_ints(counts), tokens=tokens
  )


class Case:
  """Three sequences in shuffled pages: 11, 16 and 6 tokens are there already.

  A round runs one token of the first, an idle row, one token of the second (on the
  first slot of a page) and two blocks of the third, the second of which has padding.
  """

  def __init__(self, heads=4, kv_heads=2, head_dim=8, path="gather"):
    pages = [9, 3, 14], [5, 1, 12, 7, 20], [2, 30, 8, 11]
    before, self.ends = [11, 16, 6], [12, 17, 13]
    self.kv = [
      draw(2, end, kv_heads, head_dim, seed=i) for i, end in enumerate(self.ends)
    ]
    layer = paged.empty(
      pages=POOL,
      page_tokens=PAGE,
      kv_heads=kv_heads,
      head_dim=head_dim,
      dtype=jnp.float32,
      path=path,
    )
    past = group(pages, [0, 0, 0], before, 16)
    old = [
      np.concatenate([kv[:, :n], np.full((2, 16 - n, *kv.shape[2:]), 7.0)], axis=1)
      for kv, n in zip(self.kv, before)
    ]
    old = jnp.asarray(np.concatenate(old, axis=1))[:, :, None]
    self.past = paged.write(layer, *old, paged.Ragged((past,)))
    decode = group([pages[0], [], pages[1]], [11, 0, 16], [1, 0, 1], 1)
    blocks = group([pages[2], pages[2]], [6, 10], [4, 3], 4)
    self.ragged = paged.Ragged((decode, blocks))
    # Sequence and position of each valid token; None for padding.
    self.at = [(0, 11), None, (1, 16), *((2, p) for p in range(6, 13)), None]
    new = [
      self.kv[x[0]][:, x[1]] if x else np.full((2, kv_heads, head_dim), 5.0)
      for x in self.at
    ]
    self.key, self.value = jnp.asarray(np.stack(new, axis=1))[:, :, None]
    self.query = draw(len(self.at), 1, heads, head_dim, seed=9)

  def got(self, **options):
    @jax.jit
    def run(layer, query, key, value, ragged):
      layer = paged.write(layer, key, value, ragged)
      return paged.attend(query, layer, ragged, **options), layer

    return run(self.past, self.query, self.key, self.value, self.ragged)

  def want(self, window=None, **options):
    """Dense attention of each sequence, at the tokens of the round."""
    out = np.zeros(self.query[:, 0].shape, np.float32)
    for sequence, end in enumerate(self.ends):
      rows = [i for i, x in enumerate(self.at) if x and x[0] == sequence]
      positions = [self.at[i][1] for i in rows]
      query = np.zeros((1, end, *self.query.shape[2:]), np.float32)
      query[0, positions] = self.query[np.array(rows), 0]
      key, value = self.kv[sequence][:, None]
      visible = Visibility(jnp.arange(end), aligned=True)
      dense = attention_paths.attend(
        jnp.asarray(query), key, value, visible, window=window, **options
      )
      out[rows] = dense[0, np.array(positions)]
    return out

  @property
  def valid(self):
    return np.array([x is not None for x in self.at])


CASES = [
  ({}, {}),
  ({"kv_heads": 1}, {"window": 5, "scale": 0.3}),
  ({"kv_heads": 4}, {"window": 3, "softcap": 2.0}),
  ({}, {"window": 1}),
  ({}, {"window": 40, "softcap": 1.0}),
]


@pytest.mark.parametrize("shape, options", CASES)
def test_gather_equals_dense_attention(shape, options):
  case = Case(**shape)
  out = np.asarray(case.got(**options)[0][:, 0])
  assert np.all(np.isfinite(out))
  np.testing.assert_allclose(
    out[case.valid], case.want(**options)[case.valid], atol=2e-6
  )


def test_two_keys_by_hand():
  # Page 2 holds position 0, page 1 position 1. Keys 0 and ln 3 give the weights 1/4 and
  # 3/4; values 8 and 4 give 8/4 + 3 = 5. With a window of 1 only the value 4 is seen.
  layer = paged.empty(pages=3, page_tokens=1, kv_heads=1, head_dim=1, dtype=jnp.float32)
  numbers = lambda *x: jnp.asarray(x, jnp.float32).reshape(-1, 1, 1, 1)
  ragged = paged.Ragged((group([[2, 1]], [0], [2], 2),))
  layer = paged.write(layer, numbers(0, np.log(3)), numbers(8, 4), ragged)
  np.testing.assert_array_equal(layer.pages[1].reshape(-1), [0, 4, 8])
  out = paged.attend(numbers(1, 1), layer, ragged, scale=1.0)
  np.testing.assert_allclose(out.reshape(-1), [8, 5], rtol=1e-6)
  out = paged.attend(numbers(1, 1), layer, ragged, scale=1.0, window=1)
  np.testing.assert_allclose(out.reshape(-1), [8, 4], rtol=1e-6)
